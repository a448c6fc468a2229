"""Coverage and what training did to a policy, against enumeration and against worlds whose truth is known."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import fisher_exact, wasserstein_distance

from bench.scaling.coverage import (
    compare_by_level,
    compare_coverage,
    crossing_points,
)
from bench.scaling.reshaping import gained_and_lost, interference, matthew, strategies
from pipeline.at_k import best_at_k, pass_at_k, worst_at_k


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(right: list[bool], data: st.DataObject):
    k = data.draw(st.integers(1, len(right)))
    subsets = [any(s) for s in combinations(right, k)]
    found = pass_at_k(np.array([len(right)]), np.array([sum(right)]), k)
    assert found[0] == pytest.approx(np.mean(subsets), abs=1e-12)


@settings(max_examples=50)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8), st.data())
def test_best_and_worst_at_k_are_means_over_subsets(rewards: list[float], data: st.DataObject):
    k = data.draw(st.integers(1, len(rewards)))
    row = np.array([rewards])
    assert best_at_k(row, k)[0] == pytest.approx(np.mean([max(s) for s in combinations(rewards, k)]), abs=1e-12)
    assert worst_at_k(row, k)[0] == pytest.approx(np.mean([min(s) for s in combinations(rewards, k)]), abs=1e-12)


def test_pass_at_k_is_unbiased_and_exact_at_the_ends():
    rng = np.random.default_rng(0)
    counts = rng.binomial(32, 0.02, size=200_000)
    assert pass_at_k(np.full(len(counts), 32), counts, 16).mean() == pytest.approx(1 - 0.98**16, abs=2e-3)
    many = pass_at_k(np.full(3, 100_000), np.array([0, 1, 100_000]), 50_000)
    assert many == pytest.approx([0, 0.5, 1], abs=1e-9)


@pytest.mark.parametrize("k", [0, 9])
def test_k_beyond_the_rollouts_is_refused(k: int):
    with pytest.raises(ValueError, match=f"@{k} needs"):
        pass_at_k(np.array([8, 9]), np.array([1, 1]), k)
    with pytest.raises(ValueError, match=f"@{k} needs"):
        best_at_k(np.zeros((2, 8)), k)


def two_strategy_counts(shares: tuple[float, float], num_rollouts: int) -> np.ndarray:
    """Expected successes where half the problems yield to the first strategy and half to the second only."""
    success = np.array([[0.6, 0.05]] * 50 + [[0.0, 0.3]] * 50)
    return np.round(success @ shares * num_rollouts).astype(int)


def test_the_two_strategy_example_crosses():
    """Training on problems of the first kind: pass@1 .24 -> .30, but pass@64 1.0 -> .72; no support is lost."""
    n = np.full(100, 100_000)
    base, tuned = two_strategy_counts((0.5, 0.5), 100_000), two_strategy_counts((0.97, 0.03), 100_000)
    ks = [1, 2, 4, 16, 64, 256]
    found = compare_coverage(n, base, tuned, ks, 200, np.random.default_rng(0))
    assert [e.value for e in found.base][::2] == pytest.approx([0.237, 0.635, 1.0], abs=2e-3)
    assert [e.value for e in found.tuned][::2] == pytest.approx([0.296, 0.503, 0.720], abs=2e-3)
    crossing = found.crossing
    assert crossing.n_star is not None
    assert 1 < crossing.n_star < 4
    assert crossing.crossed_frac > 0.95
    assert crossing.gap_at_k_max.value < 0


def test_no_crossing_where_training_only_helps():
    n, base = np.full(40, 64), np.arange(40)
    found = compare_coverage(n, base, base + 10, [1, 4, 16], 100, np.random.default_rng(0)).crossing
    assert (found.n_star, found.low, found.high, found.crossed_frac) == (None, None, None, 0.0)
    assert found.gap_at_k_max.value > 0


def test_where_curves_cross_and_where_they_only_touch():
    gaps = np.array([[0.2, 0.0, -0.2], [0.2, 0.1, 0.0], [0.1, -0.1, 0.1], [-0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
    found = crossing_points(gaps, [1, 4, 16])
    assert found[0] == pytest.approx(4)
    assert found[2] == pytest.approx(2)
    assert np.isnan(found[[1, 3, 4]]).all()


def test_levels_are_compared_apart():
    n = np.full(100, 1000)
    base, tuned = two_strategy_counts((0.5, 0.5), 1000), two_strategy_counts((0.97, 0.03), 1000)
    found = compare_by_level(["a"] * 50 + ["b"] * 50, n, base, tuned, [1, 16], 50, np.random.default_rng(0))
    assert found["a"].crossing.gap_at_k_max.value > -1e-3
    assert found["b"].crossing.gap_at_k_max.value < -0.5


def test_gained_and_lost_and_surely_so():
    before_n, after_n = np.full(4, 64), np.full(4, 32)
    before, after = np.array([0, 1, 40, 0]), np.array([20, 0, 1, 0])
    found = gained_and_lost(before_n, before, after_n, after)
    assert (found.gained, found.lost) == ([0], [1])
    assert (found.surely_better, found.surely_worse) == ([0], [2])
    p = fisher_exact([[1, 31], [40, 24]], alternative="less").pvalue
    assert p < 0.05 / 4


def test_luck_alone_makes_no_sure_change():
    rng = np.random.default_rng(0)
    n, rates = np.full(300, 16), rng.uniform(0, 0.3, 300)
    found = gained_and_lost(n, rng.binomial(n, rates), n, rng.binomial(n, rates))
    assert found.gained
    assert found.lost
    assert len(found.surely_better) + len(found.surely_worse) <= 2


def test_the_change_is_split_exactly_into_reweighting_and_teaching():
    rng = np.random.default_rng(0)
    share_0, share_1 = np.array([0.2, 0.8]), np.array([0.9, 0.1])
    used_0, used_1 = rng.multinomial(64, share_0, 50), rng.multinomial(64, share_1, 50)
    only_shares = strategies(
        ["working", "guess"],
        used_0,
        rng.binomial(used_0, [0.7, 0.0]),
        used_1,
        rng.binomial(used_1, [0.7, 0.0]),
        100,
        rng,
    )
    assert only_shares.reweighted.value == pytest.approx(0.49, abs=0.03)
    assert only_shares.taught.low < 0 < only_shares.taught.high
    total = only_shares.reweighted.value + only_shares.taught.value
    assert only_shares.change.value == pytest.approx(total)


def test_trying_a_strategy_on_harder_problems_unlearns_nothing():
    """Success within each problem stays as it was; over pooled rollouts that of "work" falls from 0.9 to 0.55."""
    before, after = np.array([[64, 0], [0, 64]] * 20), np.array([[64, 0], [64, 0]] * 20)
    easy_hard = np.array([[58, 0], [13, 0]] * 20)
    found = strategies(
        ["work", "guess"], before, easy_hard * (before > 0), after, easy_hard, 50, np.random.default_rng(0)
    )
    assert found.success_after[0] == pytest.approx(71 / 128)
    assert found.taught.value == 0.0
    assert found.reweighted.value == pytest.approx(13 / 128)
    assert found.first_used.value == pytest.approx(13 / 128)


def test_a_strategy_that_was_never_used_before_counts_as_reweighting():
    before, after = np.array([[10, 0]] * 3), np.array([[5, 5]] * 3)
    found = strategies(["a", "b"], before, before * 0, after, after * [0, 1], 20, np.random.default_rng(0))
    assert found.success_before == [0.0, None]
    assert found.success_after == [0.0, 1.0]
    assert found.change.value == pytest.approx(0.5)
    assert found.reweighted.value == pytest.approx(0.5)
    assert found.taught.value == pytest.approx(0.0)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=30))
def test_distance_to_uniform_is_the_earth_movers(correct: list[int]):
    n = np.full(len(correct), 16)
    found = interference(n, np.array(correct))
    uniform = (np.arange(4000) + 0.5) / 4000
    expected = wasserstein_distance(np.array(correct) / 16, uniform)
    assert found.distance_to_uniform == pytest.approx(expected, abs=3e-4)
    assert found.zero_mass == pytest.approx(correct.count(0) / len(correct))
    assert sum(found.histogram) == pytest.approx(1)


def test_the_matthew_slope_is_not_fooled_by_noise():
    """No problem changed: regression to the mean alone gives the naive slope -0.4, the corrected one is 0."""
    rng = np.random.default_rng(0)
    n, rates = np.full(20_000, 8), rng.beta(2, 5, 20_000)
    found = matthew(n, rng.binomial(n, rates), n, rng.binomial(n, rates), 50, rng)
    assert found.naive_slope < -0.3
    assert found.slope.low < found.slope.value < found.slope.high
    assert found.slope.value == pytest.approx(0, abs=0.06)
    richer = matthew(n, rng.binomial(n, rates), n, rng.binomial(n, np.minimum(1, 1.5 * rates)), 50, rng)
    assert richer.slope.value == pytest.approx(0.47, abs=0.1)


def test_the_matthew_slope_needs_two_rollouts_and_some_spread():
    one = np.ones(5, int)
    with pytest.raises(ValueError, match="two initial rollouts"):
        matthew(one, one, one, one, 10, np.random.default_rng(0))
    same = np.full(20, 4)
    assert np.isnan(matthew(same, same // 2, same, same // 2, 10, np.random.default_rng(0)).slope.value)
