"""ScaleRL fits: the published grid, the rival laws, recipes compared, and the self-check."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from bench.scaling.curves import Recipe
from bench.scaling.law import A, reward_at
from bench.scaling.resampling import point_weights
from bench.scaling.rivals import laws, power_law, rank
from bench.scaling.scalerl import (
    PUBLISHED_A,
    PUBLISHED_C_MID,
    compare,
    fit_parameters,
    fit_published,
    fit_recipe,
)
from bench.scaling.scalerl_check import NOISE, PUBLISHED, _power_law, _vectors, curve, recipe
from bench.scaling.scalerl_report import sentences


def noisy(name: str, seed: int = 0) -> Recipe:
    compute, exact, _ = curve(name)
    return recipe(name, compute, exact + np.random.default_rng(seed).uniform(-NOISE, NOISE, len(compute)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_row_is_recovered_from_a_clean_curve(name: str):
    compute, exact, truth = curve(name)
    _, optimum = fit_parameters([recipe(name, compute, exact).points], [truth[3]])
    np.testing.assert_allclose(optimum, truth[:3], rtol=1e-6)


def test_the_published_grid_search_finds_the_best_of_all_nodes():
    """Against a plain search of every node near the optimum with scipy, as the paper describes it."""
    data = noisy("Scout")
    a, ln_c_mid, b, _ = fit_published(data.points, 0.2)

    def at_node(node_a: float, node_c_mid: float) -> float:
        def law(compute: np.ndarray, b: float) -> np.ndarray:
            return reward_at(compute, np.array([node_a, np.log(node_c_mid), b, 0.2]))

        (best_b,), _ = curve_fit(law, data.compute, data.reward, p0=[1.5], bounds=(0.05, 10))
        return float(((law(data.compute, best_b) - data.reward) ** 2).sum())

    own = float(((reward_at(data.compute, np.array([a, ln_c_mid, b, 0.2])) - data.reward) ** 2).sum())
    near_a = PUBLISHED_A[np.abs(PUBLISHED_A - a) < 0.022]
    near_c = PUBLISHED_C_MID[np.abs(PUBLISHED_C_MID - np.exp(ln_c_mid)) < 1700]
    assert np.isclose(PUBLISHED_A, a).any()
    assert np.isclose(PUBLISHED_C_MID, np.exp(ln_c_mid)).any()
    assert min(at_node(x, y) for x in near_a for y in near_c) >= own * (1 - 1e-6)


def test_intervals_contain_the_truth_and_shrink_with_the_data():
    rng = np.random.default_rng(0)
    few, _ = fit_recipe(noisy("ScaleRL"), 0.2, "refined", 200, rng)
    compute = np.linspace(1500, 16_000, 1200)
    exact = reward_at(compute, curve("ScaleRL")[2])
    many, _ = fit_recipe(recipe("many", compute, exact + rng.uniform(-NOISE, NOISE, 1200)), 0.2, "refined", 200, rng)
    for fit in (few, many):
        assert fit.a.low <= 0.61 <= fit.a.high
        assert fit.residual_std == pytest.approx(NOISE / np.sqrt(3), rel=0.25)
    assert many.a.high - many.a.low < (few.a.high - few.a.low) / 2


def test_recipes_are_compared_under_one_ceiling():
    compute, exact, _ = curve("ScaleRL")
    slow = reward_at(compute, np.array([0.61, np.log(5000), 1.5, 0.2]))
    recipes = [recipe("fast", compute, exact), recipe("slow", compute, slow)]
    found = compare(recipes, [0.2, 0.2], 60, np.random.default_rng(0))
    assert found.common_a.value == pytest.approx(0.61)
    assert found.faster[0][1] == 1.0
    assert found.faster[1][0] == 0.0
    alone = [fit_recipe(r, 0.2, "refined", 60, np.random.default_rng(0))[0] for r in recipes]
    says = sentences(alone, [None, None], found, "rollouts")
    assert any("fast is faster than slow" in line for line in says)


def test_a_power_law_overshoots_a_sigmoid_as_published():
    assert _power_law().passed
    assert _vectors().passed


def test_the_power_law_is_recovered_and_is_a_minimum():
    compute = np.geomspace(10, 1e5, 50)
    found = power_law(compute, 0.8 - 2.0 * compute**-0.4, np.ones((1, 50)))
    np.testing.assert_allclose(found[0], [0.8, 2.0, 0.4], rtol=5e-3)
    above = power_law(compute, 1.3 - 1.5 * compute**-0.2, np.ones((1, 50)))
    assert above[0, 0] == 1.0


@pytest.mark.parametrize("name", sorted(laws(0.2)))
def test_weighting_a_point_is_repeating_it(name: str):
    law, _ = laws(0.2)[name]
    data = noisy("batch 512")
    weights = point_weights(data.seed, 2, np.random.default_rng(0))
    repeated = data.where(np.repeat(np.arange(len(data.reward)), weights[1].astype(int)))
    at = np.array([20_000.0, 40_000.0])
    once = law(repeated, np.ones((1, len(repeated.reward))), at)[0]
    np.testing.assert_allclose(law(data, weights, at)[1], once, atol=1e-4)


def test_the_law_that_made_the_data_predicts_best():
    ranking = rank(noisy("ScaleRL"), 0.2, np.random.default_rng(0))
    assert ranking is not None
    assert ranking.split == 8000
    assert {s.law for s in ranking.scores[:2]} == {"ScaleRL", "log-sigmoid"}
    assert ranking.scores[-1].law == "log-linear"
    assert "log-linear" not in ranking.not_worse
    compute = np.linspace(1000, 16_000, 60)
    line = recipe("line", compute, 0.05 * np.log(compute) - 0.2 + np.random.default_rng(0).normal(0, 0.002, 60))
    straight = rank(line, None, np.random.default_rng(0))
    assert straight is not None
    assert "log-linear" in straight.not_worse


def test_nothing_is_held_out_of_a_short_curve():
    data = noisy("ScaleRL")
    assert rank(data.where(np.arange(len(data.reward)) % 10 == 0), 0.2, np.random.default_rng(0)) is None


def test_an_undetermined_ceiling_is_said_and_not_claimed():
    compute = np.linspace(100, 1000, 30)
    line = recipe("line", compute, 0.1 + compute / 4000 + np.random.default_rng(0).normal(0, 0.003, 30))
    fit, _ = fit_recipe(line, 0.1, "refined", 60, np.random.default_rng(0))
    says = sentences([fit], [None], None, "rollouts")
    assert not fit.a_determined
    assert fit.a.value == pytest.approx(1.0)
    assert "no bend that determines a ceiling" in says[0]
    assert not any("ends near" in line for line in says)


def test_case_resampling_never_leaves_the_bounds():
    _, draws = fit_recipe(noisy("code of math+code"), 0.2, "refined", 100, np.random.default_rng(0))
    assert draws[:, A].max() <= 1.0
    assert draws[:, A].min() > 0.2
