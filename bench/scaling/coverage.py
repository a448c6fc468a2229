"""Coverage: unbiased pass@k, best@k and worst@k, and how two models' curves compare. Pure functions on counts.

A model is `num_correct` [P] of `num_rollouts` [P] rollouts for each of P problems. Problems are the unit of the
bootstrap: resampling them carries the noise of their rollouts along. (Resampling rollouts too would count that noise
twice, and biases pass@k near k = n, because a resample repeats rollouts.) Where the statement is about these very
problems and not about the kind of problem, `fixed_problems` resamples rollouts alone.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from bench.scaling.law import Array
from bench.scaling.resampling import interval
from bench.scaling.scalerl import Estimate

Ints = NDArray[np.int64]


def pass_at_k(num_rollouts: Ints, num_correct: Ints, k: int) -> Array:
    """Unbiased pass@k of each problem, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374); needs k <= n."""
    n, c = np.asarray(num_rollouts), np.asarray(num_correct)
    if not (1 <= k <= n.min()):
        raise ValueError(f"pass@{k} needs at least {k} rollouts of every problem, the fewest are {n.min()}")
    wrong = n - c
    with np.errstate(invalid="ignore"):
        none_right = np.exp(_ln_choose(np.maximum(wrong, k), k) - _ln_choose(n, k))
    return np.where(wrong < k, 1.0, np.where(c == 0, 0.0, 1.0 - none_right))


def best_at_k(rewards: Array, k: int) -> Array:
    """Unbiased mean of the best of k of the n rewards [P, n] of each problem: sum_i r_(i) C(i - 1, k - 1) / C(n, k)."""
    n = rewards.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} needs at least {k} rollouts of every problem, there are {n}")
    rank = np.arange(k, n + 1)
    weights = np.exp(_ln_choose(rank - 1, k - 1) - _ln_choose(n, k))
    return np.sort(rewards, axis=1)[:, k - 1 :] @ weights


def worst_at_k(rewards: Array, k: int) -> Array:
    """Unbiased mean of the worst of k of the n rewards [P, n] of each problem."""
    return -best_at_k(-np.asarray(rewards, float), k)


def mean_estimate(per_problem: Array, num_draws: int, rng: np.random.Generator) -> Estimate:
    """Mean over problems [P] with its 95% interval over resampled problems."""
    draws = problem_weights(len(per_problem), num_draws, rng) @ per_problem
    return Estimate(float(per_problem.mean()), *interval(draws))


def pass_at_k_estimate(
    num_rollouts: Ints,
    num_correct: Ints,
    k: int,
    num_draws: int,
    rng: np.random.Generator,
    *,
    fixed_problems: bool = False,
) -> Estimate:
    """Mean pass@k with its 95% interval.

    With `fixed_problems` the rollouts of each problem are resampled and the draws are centred on the estimate, which
    takes out the bias that repeated rollouts bring in.
    """
    value = pass_at_k(num_rollouts, num_correct, k)
    if not fixed_problems:
        return mean_estimate(value, num_draws, rng)
    resampled = rng.binomial(num_rollouts, num_correct / num_rollouts, size=(num_draws, len(num_rollouts)))
    draws = pass_at_k(num_rollouts, resampled, k).mean(1)
    centred = np.clip(draws - draws.mean() + value.mean(), 0.0, 1.0)
    return Estimate(float(value.mean()), *interval(centred))


def problem_weights(num_problems: int, num_draws: int, rng: np.random.Generator) -> Array:
    """Weights [D, P], rows summing to 1, of a bootstrap over problems."""
    counts = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), size=num_draws)
    return counts / num_problems


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
        [Estimate(float(v), *interval(d)) for v, d in zip(base.mean(0), base_draws.T, strict=True)],
        [Estimate(float(v), *interval(d)) for v, d in zip(tuned.mean(0), tuned_draws.T, strict=True)],
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
    with np.errstate(invalid="ignore", divide="ignore"):
        share = before / (before - after)
    at = np.exp(ln_k[first] + share * (ln_k[first + 1] - ln_k[first]))
    return np.where(falls.any(1), at, np.nan)


def _ln_choose(n: Array | Ints | int, k: int) -> Array:
    return gammaln(np.add(n, 1.0)) - gammaln(k + 1.0) - gammaln(np.subtract(n, k) + 1.0)
