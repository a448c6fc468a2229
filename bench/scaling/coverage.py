"""Coverage: how the pass@k curves of two models compare. Pure functions on counts.

A model is `num_correct` [P] of `num_rollouts` [P] rollouts for each of P problems, and problems are the unit of the
bootstrap.
"""

import msgspec
import numpy as np

from bench.scaling.law import Array
from bench.scaling.resampling import interval
from pipeline.at_k import Ints, pass_at_k
from pipeline.estimates import Estimate, problem_weights, rate_of_draws, rising


class Crossing(msgspec.Struct, frozen=True):
    """Where the tuned model's pass@k curve falls below the base model's.

    `n_star` is that k (by interpolation in log k), None if it does not happen up to `k_max`; `crossed_frac` is the
    share of draws in which it does, and `low`, `high` bound n_star among those. `gap_at_k_max` is tuned minus base
    there.
    """

    n_star: float | None
    low: float | None
    high: float | None
    crossed_frac: float
    k_max: int
    gap_at_k_max: Estimate


class Coverage(msgspec.Struct, frozen=True):
    """pass@k of both models at each k, and their crossing."""

    ks: list[int]
    base: list[Estimate]
    tuned: list[Estimate]
    crossing: Crossing


def compare_coverage(
    num_rollouts: Ints, base_correct: Ints, tuned_correct: Ints, ks: list[int], num_draws: int, rng: np.random.Generator
) -> Coverage:
    """Both curves over the same P problems, resampled together; `ks` must increase and not exceed `num_rollouts`."""
    base = np.stack([pass_at_k(num_rollouts, base_correct, k) for k in ks], axis=1)  # [P, K]
    tuned = np.stack([pass_at_k(num_rollouts, tuned_correct, k) for k in ks], axis=1)
    weights = problem_weights(len(base), num_draws, rng)
    base_draws, tuned_draws = weights @ base, weights @ tuned
    gap, gap_draws = (tuned - base).mean(0), tuned_draws - base_draws
    at = crossing_points(gap_draws, ks)
    crossed = np.isfinite(at)
    low, high = interval(at) if crossed.any() else (None, None)
    here = float(crossing_points(gap[None], ks)[0])
    return Coverage(
        ks,
        rising([rate_of_draws(v, np.ones(len(v)), d) for v, d in zip(base.T, base_draws.T, strict=True)]),
        rising([rate_of_draws(v, np.ones(len(v)), d) for v, d in zip(tuned.T, tuned_draws.T, strict=True)]),
        Crossing(
            here if np.isfinite(here) else None,
            low,
            high,
            float(crossed.mean()),
            ks[-1],
            Estimate(float(gap[-1]), *interval(gap_draws[:, -1])),
        ),
    )


def compare_by_level(
    levels: list[str],
    num_rollouts: Ints,
    base_correct: Ints,
    tuned_correct: Ints,
    ks: list[int],
    num_draws: int,
    rng: np.random.Generator,
) -> dict[str, Coverage]:
    """`compare_coverage` within each level of difficulty; `levels` [P] names the level of each problem."""
    labels = np.array(levels)
    return {
        str(level): compare_coverage(
            num_rollouts[labels == level],
            base_correct[labels == level],
            tuned_correct[labels == level],
            ks,
            num_draws,
            rng,
        )
        for level in np.unique(labels)
    }


def crossing_points(gap: Array, ks: list[int]) -> Array:
    """First k at which each row of `gap` [D, K] goes from above 0 to below, in log k between two ks; NaN if never.

    Where the curves touch (both at 1, say) the gap is taken to keep its sign until it has the other one.
    """
    gap = gap.copy()
    for j in range(1, gap.shape[1]):
        touching = gap[:, j] == 0
        gap[touching, j] = 1e-300 * np.sign(gap[touching, j - 1])
    falls = (gap[:, :-1] > 0) & (gap[:, 1:] < 0)
    rows, first = np.arange(len(gap)), falls.argmax(1)
    before, after = gap[rows, first], gap[rows, first + 1]
    ln_k = np.log(ks)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = before / (before - after)
        at = np.exp(ln_k[first] + share * (ln_k[first + 1] - ln_k[first]))
    return np.where(falls.any(1), at, np.nan)
