"""Estimates of an evaluation against enumeration, exact arithmetic and simulation."""

from fractions import Fraction
from itertools import combinations
from math import comb, isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.at_k import best_at_k, pass_at_k, powers_up_to, worst_at_k
from pipeline.errors import ConfigError
from pipeline.estimates import Estimate, mean_estimate, parse_ks, rate_estimate, rising


def test_the_ks_reported_of_n_rollouts():
    assert [powers_up_to(n) for n in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@settings(max_examples=100)
@given(st.integers(1, 400), st.data())
def test_pass_at_k_is_exact_to_the_last_digit(n: int, data: st.DataObject):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(np.array([n]), np.array([c]), k)[0] == float(exact)


def test_pass_at_k_takes_any_shape():
    n, c = np.array([4, 8]), np.array([[0, 1], [4, 8], [1, 0]])
    found = pass_at_k(n, c, 2)
    assert found.shape == (3, 2)
    assert found.tolist() == [[0.0, 0.25], [1.0, 1.0], [0.5, 0.0]]


def test_problems_may_have_different_numbers_of_rewards():
    rewards = [np.array([0.0, 1.0, 0.5]), np.array([0.2, 0.1])]
    best = [np.mean([max(s) for s in combinations(r, 2)]) for r in rewards]
    worst = [np.mean([min(s) for s in combinations(r, 2)]) for r in rewards]
    assert best_at_k(rewards, 2) == pytest.approx(best, abs=1e-15)
    assert worst_at_k(rewards, 2) == pytest.approx(worst, abs=1e-15)


def test_a_worst_of_nothing_but_zeros_has_no_sign():
    assert not np.signbit(worst_at_k([np.zeros(3)], 2)).any()


@pytest.mark.parametrize(
    ("text", "ks"),
    [("64", [1, 2, 4, 8, 16, 32, 64]), ("1..6", [1, 2, 4, 6]), ("3..10", [3, 4, 8, 10]), ("1", [1]), ("8..8", [8])],
)
def test_ks_are_the_ends_and_the_powers_of_two_between(text: str, ks: list[int]):
    assert parse_ks(text) == ks


@pytest.mark.parametrize("text", ["", "many", "1..", "0", "8..4", "-3", "1...4"])
def test_a_k_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="--k"):
        parse_ks(text)


def test_a_rate_weighs_problems_by_their_trials():
    found = rate_estimate(np.array([1.0, 0.0]), np.array([1.0, 3.0]), 200, np.random.default_rng(0))
    assert found.value == 0.25
    assert found.low == 0.0
    assert found.high == 1.0


def test_nothing_tried_has_no_rate():
    assert isnan(rate_estimate(np.zeros(3), np.zeros(3), 50, np.random.default_rng(0)).value)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_interval_of_a_unanimous_rate_is_not_a_point(rate: float):
    """Of 24 problems that all fail, 0.142 is the largest true share under which that happens in 2.5% of the cases."""
    found = rate_estimate(np.full(24, rate), np.ones(24), 50, np.random.default_rng(0))
    bound = 1 - 0.025 ** (1 / 24)
    assert (found.low, found.high) == pytest.approx((0.0, bound) if rate == 0 else (1 - bound, 1.0))


def test_bounds_hold_for_larger_and_smaller_k():
    curve = [Estimate(0.2, 0.1, 0.9), Estimate(0.5, 0.4, 0.6), Estimate(1.0, 0.3, 1.0)]
    assert [(e.low, e.high) for e in rising(curve)] == [(0.1, 0.6), (0.4, 0.6), (0.4, 1.0)]


def test_intervals_of_a_mean_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        found = mean_estimate(rng.exponential(1.0, 60), 200, rng)
        held += found.low <= 1.0 <= found.high
    assert 0.86 <= held / 200 <= 0.99
