"""What training did to a policy, problem by problem and strategy by strategy. Pure functions on counts.

The two-stage view (arXiv 2610.04158): a rollout first picks a strategy z and then carries it out, so
pass@1 = sum_z share(z) success(z), and training can change either factor.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from bench.scaling.law import Array
from bench.scaling.resampling import interval
from pipeline.at_k import Ints
from pipeline.estimates import Estimate, problem_weights

FALSE_DISCOVERY = 0.05
HISTOGRAM_BINS = 10


class GainedLost(msgspec.Struct, frozen=True):
    """Problems by index. `gained`: never solved before and solved after; `lost`: the reverse.

    `surely_better` and `surely_worse` are those whose pass rate changed by Fisher's exact test at a false discovery
    rate of 5% (Benjamini-Hochberg); a problem solved once in n rollouts before and never after is `lost` by luck as
    often as not.
    """

    gained: list[int]
    lost: list[int]
    surely_better: list[int]
    surely_worse: list[int]


def gained_and_lost(before_n: Ints, before_c: Ints, after_n: Ints, after_c: Ints) -> GainedLost:
    better = _discoveries(_fisher_tail(before_n, before_c, after_n, after_c))
    worse = _discoveries(_fisher_tail(after_n, after_c, before_n, before_c))
    return GainedLost(
        np.flatnonzero((before_c == 0) & (after_c > 0)).tolist(),
        np.flatnonzero((before_c > 0) & (after_c == 0)).tolist(),
        np.flatnonzero(better).tolist(),
        np.flatnonzero(worse).tolist(),
    )


class Strategies(msgspec.Struct, frozen=True):
    """Shares and successes by strategy over all rollouts, and the change of pass@1 split exactly into the two.

    The split is made within each problem and then averaged: `reweighted` = sum_z (share change) (mean success),
    `taught` = sum_z (mean share) (success change); their sum is `change`. Over pooled rollouts, a strategy that is now
    tried on harder problems too would seem to have been unlearned. Where a problem never saw a strategy on one side,
    success there is taken to be that of the other side, so its first use counts as reweighting; `first_used` is how
    much of `reweighted` rests on that.
    """

    names: list[str]
    share_before: list[float]
    share_after: list[float]
    success_before: list[float | None]
    success_after: list[float | None]
    reweighted: Estimate
    first_used: Estimate
    taught: Estimate
    change: Estimate


def strategies(
    names: list[str],
    before_used: Ints,
    before_correct: Ints,
    after_used: Ints,
    after_correct: Ints,
    num_draws: int,
    rng: np.random.Generator,
) -> Strategies:
    """Counts [P, Z] of rollouts that used each strategy, and of those that were right, before and after training.

    Intervals are over resampled problems, the same ones before and after.
    """
    share_0, success_0 = _shares(before_used, before_correct)  # [P, Z]
    share_1, success_1 = _shares(after_used, after_correct)
    first_used = np.isnan(success_0)
    known_0 = np.where(first_used, np.nan_to_num(success_1), success_0)
    known_1 = np.where(np.isnan(success_1), known_0, success_1)
    moved = (share_1 - share_0) * (known_0 + known_1) / 2
    taught = ((known_1 - known_0) * (share_0 + share_1) / 2).sum(1)
    parts = np.stack([moved.sum(1), (moved * first_used).sum(1), taught, moved.sum(1) + taught], axis=1)  # [P, 4]
    draws = problem_weights(len(parts), num_draws, rng) @ parts
    totals = [np.sum(t, axis=0, keepdims=True) for t in (before_used, before_correct, after_used, after_correct)]
    (all_share_0, all_success_0), (all_share_1, all_success_1) = _shares(*totals[:2]), _shares(*totals[2:])
    return Strategies(
        names,
        all_share_0[0].tolist(),
        all_share_1[0].tolist(),
        _or_none(all_success_0[0]),
        _or_none(all_success_1[0]),
        *(Estimate(float(v), *interval(d)) for v, d in zip(parts.mean(0), draws.T, strict=True)),
    )


class Interference(msgspec.Struct, frozen=True):
    """The distribution of pass@1 over problems. `histogram`: shares in ten equal bins.

    `zero_mass`: share of problems never solved in their rollouts. `distance_to_uniform`: Wasserstein-1 distance to the
    uniform distribution on [0, 1]: 0 for an even ladder of difficulty, 1/4 when half is always and half never solved,
    1/2 when all problems are alike at 0 or 1.
    """

    histogram: list[float]
    zero_mass: float
    distance_to_uniform: float


def interference(num_rollouts: Ints, num_correct: Ints) -> Interference:
    """Of one snapshot of P problems."""
    return _interference(num_correct / num_rollouts, np.ones(len(num_rollouts)))


def thinned_interference(solved: Mapping[str, Sequence[int]], num_rollouts: int) -> Interference:
    """As if each problem had `num_rollouts`, in expectation over which of its rollouts are drawn.

    `solved` is that of a run's evaluation (`pipeline.metrics`). More rollouts leave fewer problems never solved, so
    evaluations are compared at equally many; problems with fewer are left out.
    """
    weights = np.zeros(num_rollouts + 1)
    for size, counts in solved.items():
        for num_correct, num_problems in enumerate(counts):
            if num_problems and int(size) >= num_rollouts:
                weights += num_problems * _drawn(int(size), num_correct, num_rollouts)
    return _interference(np.arange(num_rollouts + 1) / num_rollouts, weights)


class Matthew(msgspec.Struct, frozen=True):
    """Slope of the gain in pass rate against the initial pass rate: above 0 the rich get richer.

    `slope` is corrected for the noise of the initial rate, which otherwise enters the gain with the opposite sign and
    makes any run look as if it helped the poor; `naive_slope` is the plain regression.
    """

    slope: Estimate
    naive_slope: float


def matthew(
    before_n: Ints, before_c: Ints, after_n: Ints, after_c: Ints, num_draws: int, rng: np.random.Generator
) -> Matthew:
    """slope = cov(p_after, p_before) / var(p_before) - 1, the sampling variance of p_before's estimate taken out.

    c (n - c) / (n^2 (n - 1)) estimates that variance without bias; every problem needs two initial rollouts. The slope
    is NaN where the initial rates vary no more than chance would have them.
    """
    if before_n.min() < 2:
        raise ValueError("the Matthew slope needs at least two initial rollouts of every problem")
    x, y = before_c / before_n, after_c / after_n
    noise = before_c * (before_n - before_c) / (before_n**2.0 * (before_n - 1))
    weights = np.vstack([np.full((1, len(x)), 1 / len(x)), problem_weights(len(x), num_draws, rng)])
    mean_x, mean_y = weights @ x, weights @ y
    bessel = len(x) / (len(x) - 1)
    covariance = bessel * (weights @ (x * y) - mean_x * mean_y)
    variance = bessel * (weights @ (x * x) - mean_x**2)
    true_variance = variance - weights @ noise
    slope = np.where(true_variance > 0, covariance / np.where(true_variance > 0, true_variance, 1.0) - 1, np.nan)
    naive = float(covariance[0] / variance[0] - 1) if variance[0] > 0 else float("nan")
    return Matthew(Estimate(float(slope[0]), *interval(slope[1:])), naive)


def _drawn(size: int, num_correct: int, num_drawn: int) -> Array:
    """The chance that 0, 1, ... of `num_drawn` out of `size` rollouts are right (hypergeometric), [num_drawn + 1]."""
    x = np.arange(num_drawn + 1)
    ln_p = _ln_choose(num_correct, x) + _ln_choose(size - num_correct, num_drawn - x) - _ln_choose(size, num_drawn)
    return np.exp(ln_p)


def _interference(rates: Array, weights: Array) -> Interference:
    total = weights.sum()
    counts, _ = np.histogram(rates, bins=HISTOGRAM_BINS, range=(0, 1), weights=weights)
    order = np.argsort(rates)
    distance = _distance_to_uniform(rates[order], weights[order] / total)
    return Interference((counts / total).tolist(), float(weights[rates == 0].sum() / total), distance)


def _distance_to_uniform(ordered: Array, weights: Array) -> float:
    """Integral over quantiles u of |Q(u) - u|, Q being a step function with a step for each rate: exact."""
    edges = np.concatenate([[0.0], np.cumsum(weights)])
    low, high = edges[:-1] - ordered, edges[1:] - ordered
    crosses = (low < 0) & (high > 0)
    area = np.where(crosses, (low**2 + high**2) / 2, np.abs(high**2 - low**2) / 2)
    return float(area.sum())


def _fisher_tail(n_0: Ints, c_0: Ints, n_1: Ints, c_1: Ints) -> Array:
    """One-sided Fisher p-values [P] that the second rate is above the first: P(X >= c_1), X hypergeometric."""
    found = np.ones(len(n_0))
    for i, (a, b, c, d) in enumerate(zip(n_0, c_0, n_1, c_1, strict=True)):
        right = int(b + d)
        x = np.arange(d, min(right, c) + 1)
        ln_p = _ln_choose(c, x) + _ln_choose(a, right - x) - _ln_choose(a + c, right)
        found[i] = min(1.0, float(np.exp(ln_p).sum()))
    return found


def _discoveries(p: Array) -> NDArray[np.bool_]:
    """Benjamini-Hochberg at FALSE_DISCOVERY."""
    order = np.argsort(p)
    below = np.flatnonzero(p[order] <= FALSE_DISCOVERY * np.arange(1, len(p) + 1) / len(p))
    found = np.zeros(len(p), bool)
    if len(below):
        found[order[: below[-1] + 1]] = True
    return found


def _ln_choose(n: int, k: NDArray[np.int64] | int) -> Array:
    return gammaln(n + 1.0) - gammaln(np.add(k, 1.0)) - gammaln(n - np.asarray(k) + 1.0)


def _shares(used: Ints, correct: Ints) -> tuple[Array, Array]:
    """Share of each strategy and its success (NaN where it was never used), [P, Z] both."""
    used = np.asarray(used, float)
    with np.errstate(invalid="ignore"):
        return used / used.sum(1, keepdims=True), correct / used


def _or_none(values: Array) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]
