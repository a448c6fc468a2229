"""The least-squares solver of the saturating law: exact on clean data, a true minimum on noisy data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from bench.scaling.law import LN_C_MID, A, B, Points, reward_at, solve, start, tie
from bench.scaling.resampling import interval, point_weights
from bench.scaling.scalerl import compute_at, fit_parameters
from bench.scaling.scalerl_check import VECTORS, curve


def parameters(a: float = 0.61, c_mid: float = 2542.0, b: float = 1.92, r0: float = 0.2) -> np.ndarray:
    return np.array([a, np.log(c_mid), b, r0])


@pytest.mark.parametrize(("row", "expected"), VECTORS.items())
def test_the_law_gives_the_published_test_vectors(row: tuple[str, int], expected: float):
    _, _, truth = curve(row[0])
    truth[[0, 3]] = 1.0, 0.0
    assert reward_at([row[1]], truth)[0] == pytest.approx(expected, abs=5e-5)


def test_limits_of_the_law():
    a, half = reward_at([1e300, 2542.0], parameters())
    assert reward_at([0.0], parameters())[0] == 0.2
    assert (a, half) == pytest.approx((0.61, (0.61 + 0.2) / 2))
    assert reward_at(compute_at(0.9, parameters())[None], parameters())[0] == pytest.approx(0.2 + 0.9 * 0.41)


@settings(max_examples=40)
@given(
    st.floats(0.35, 0.95),
    st.floats(0.02, 0.3),
    st.floats(0.6, 4.0),
    st.floats(0.05, 0.6),
    st.booleans(),
    st.floats(0, 9),
)
def test_clean_curves_are_recovered(a: float, r0: float, b: float, where: float, r0_given: bool, ln_unit: float):
    """Whatever the unit of compute, as long as the data show both the rise and the bend."""
    compute = np.geomspace(0.02, 20, 40) * np.exp(ln_unit)
    truth = np.array([a, np.log(where * np.exp(ln_unit)), b, r0])
    tied, optimum = fit_parameters([Points.of(compute, reward_at(compute, truth))], [r0 if r0_given else None])
    np.testing.assert_allclose(tied.expand(optimum[None])[0, 0], truth, rtol=1e-5, atol=1e-6)


def test_draws_are_the_minima_that_a_general_solver_finds_one_by_one():
    rng = np.random.default_rng(0)
    compute = np.linspace(500, 12_000, 40)
    points = Points.of(compute, reward_at(compute, parameters()) + rng.normal(0, 0.01, 40))
    weights = point_weights(np.zeros(40, np.int64), 12, rng)
    tied, optimum = fit_parameters([points], [None])
    found, sse = solve([points], tied, np.tile(optimum, (12, 1)), [weights])
    for draw in range(12):
        root = np.sqrt(weights[draw])
        reference = least_squares(
            lambda p, root=root: root * (points.reward - reward_at(compute, p)),
            found[draw, 0] + [0.01, 0.05, 0.1, -0.01],
            xtol=1e-14,
            ftol=1e-14,
            gtol=1e-14,
        )
        assert sse[draw] == pytest.approx(2 * reference.cost, rel=1e-8)
        np.testing.assert_allclose(found[draw, 0], reference.x, rtol=1e-4, atol=1e-5)


def test_a_point_of_compute_0_pins_r0():
    compute = np.concatenate([[0.0], np.geomspace(300, 30_000, 20)])
    tied, optimum = fit_parameters([Points.of(compute, reward_at(compute, parameters()))], [None])
    np.testing.assert_allclose(tied.expand(optimum[None])[0, 0], parameters(), rtol=1e-6)


def test_a_curve_without_a_bend_ends_on_the_ceiling():
    compute = np.linspace(100, 1000, 20)
    _, optimum = fit_parameters([Points.of(compute, 0.1 + compute / 4000)], [0.1])
    assert optimum[A] == 1.0


def test_recipes_share_one_ceiling_and_keep_their_own_speed():
    compute = np.geomspace(300, 30_000, 30)
    truths = np.array([parameters(), parameters(c_mid=6000, b=1.2)])
    recipes = [Points.of(compute, reward_at(compute, t)) for t in truths]
    tied, optimum = fit_parameters(recipes, [0.2, 0.2], common_a=True)
    assert len(optimum) == 5
    np.testing.assert_allclose(tied.expand(optimum[None])[0], truths, rtol=1e-6)


def test_constants_may_differ_between_draws():
    compute = np.geomspace(300, 30_000, 30)
    points = Points.of(compute, reward_at(compute, parameters()))
    tied = tie([points], [0.2])
    fixed = np.zeros((2, 4))
    fixed[:, 3] = 0.2, 0.25
    per_draw = type(tied)(tied.matrix, fixed, tied.low, tied.high)
    found, sse = solve([points], per_draw, np.tile(start(points, 0.2)[:3], (2, 1)))
    np.testing.assert_allclose(found[0, 0], parameters(), rtol=1e-6)
    assert found[1, 0, 3] == 0.25
    assert sse[0] < 1e-15 < sse[1]


def test_the_grid_of_starting_values_spans_the_data():
    compute = np.linspace(500, 12_000, 4000)
    node = start(Points.of(compute, reward_at(compute, parameters())), 0.2)
    assert abs(node[LN_C_MID] - np.log(2542)) < 0.5
    assert abs(node[B] - 1.92) < 0.5


def test_bootstrap_weights_draw_seeds_and_then_their_points():
    seeds = np.repeat([0, 1, 2], [4, 6, 8])
    weights = point_weights(seeds, 300, np.random.default_rng(1))
    per_seed = np.stack([weights[:, seeds == s].sum(1) / (seeds == s).sum() for s in range(3)], axis=1)
    assert (per_seed == per_seed.round()).all(), "a seed drawn m times brings m times its points"
    assert (per_seed.sum(1) == 3).all()
    assert 0.2 < (per_seed == 0).mean() < 0.4


def test_intervals_hold_the_middle_of_the_draws():
    draws = np.random.default_rng(0).normal(size=20_000)
    low, high = interval(np.append(draws, np.nan))
    assert (low, high) == pytest.approx((-1.96, 1.96), abs=0.05)
    wider = interval(draws, num_points=8, num_parameters=3)
    assert wider[0] < low
    assert wider[1] > high
    assert np.isnan(interval(np.full(3, np.nan))).all()
