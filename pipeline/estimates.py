"""Means and rates over problems with their intervals. Pure functions.

Problems are the unit of the bootstrap: resampling them carries the noise of their rollouts along. (Resampling rollouts
too would count that noise twice, and biases pass@k near k = n, because a resample repeats rollouts.)
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from pipeline.at_k import Array, Ints, best_at_k, pass_at_k, worst_at_k
from pipeline.errors import ConfigError

NUM_DRAWS = 1000
TAIL = 0.025  # of a 95% interval, on either side


class Estimate(msgspec.Struct, frozen=True):
    """A value with its 95% bootstrap interval (both NaN without draws)."""

    value: float
    low: float
    high: float


class AtK(msgspec.Struct, frozen=True):
    """Over all problems: the chance that one of k rollouts is right, and the best and worst reward of k."""

    k: int
    pass_at_k: Estimate
    best_at_k: Estimate
    worst_at_k: Estimate


def parse_ks(text: str) -> list[int]:
    """The ks that "64" or "1..256" asks for: both ends and the powers of two between; a single number starts at 1."""
    first, dots, last = text.partition("..")
    try:
        low, high = (int(first), int(last)) if dots else (1, int(first))
    except ValueError:
        raise ConfigError(f"--k {text!r}: give a number such as 64, or a range such as 1..256") from None
    if not 1 <= low <= high:
        raise ConfigError(f"--k {text}: k counts up from at least 1")
    powers = (2**i for i in range(high.bit_length()))
    return sorted({low, high, *(k for k in powers if low < k < high)})


def at_ks(
    num_rollouts: Ints, num_correct: Ints, rewards: Sequence[Array], ks: Sequence[int], rng: np.random.Generator
) -> list[AtK]:
    """pass@k, best@k and worst@k at rising k, of problems with `num_rollouts` [P], `num_correct` [P] and rewards
    [P][num_rollouts]. All are of the same resampled problems.
    """
    if not ks:
        return []
    weights, ones = problem_weights(len(rewards), NUM_DRAWS, rng), np.ones(len(rewards))
    passed = [pass_at_k(num_rollouts, num_correct, k) for k in ks]
    return [
        AtK(k, at_k, _mean_of_draws(best_at_k(rewards, k), weights), _mean_of_draws(worst_at_k(rewards, k), weights))
        for k, at_k in zip(ks, rising([rate_of_draws(p, ones, weights @ p) for p in passed]), strict=True)
    ]


def level_mean(
    pass_rates: Array, levels: Sequence[str], level_weights: Mapping[str, float], rng: np.random.Generator
) -> Estimate | None:
    """The mean of `pass_rates` [P] over levels under their weights; each level's problems share its weight. None where
    no weight is above 0.
    """
    size = Counter(levels)
    trials = np.array([level_weights.get(level, 0.0) / size[level] for level in levels])
    return rate_estimate(pass_rates * trials, trials, NUM_DRAWS, rng) if trials.any() else None


def mean_estimate(per_problem: Array, num_draws: int, rng: np.random.Generator) -> Estimate:
    """Mean over problems [P] with its 95% interval over resampled problems."""
    return _mean_of_draws(per_problem, problem_weights(len(per_problem), num_draws, rng))


def _mean_of_draws(per_problem: Array, weights: Array) -> Estimate:
    return Estimate(math.fsum(per_problem) / len(per_problem), *percentiles(weights @ per_problem))


def rate_estimate(successes: Array, trials: Array, num_draws: int, rng: np.random.Generator) -> Estimate:
    """sum(successes) / sum(trials), [P] each and 0 <= successes <= trials, resampling problems.

    The trials may be weights. NaN where there are none.
    """
    if not trials.sum() > 0:
        return Estimate(math.nan, math.nan, math.nan)
    weights = problem_weights(len(trials), num_draws, rng)
    with np.errstate(invalid="ignore"):
        draws = (weights @ successes) / (weights @ trials)
    return rate_of_draws(successes, trials, draws)


def rate_of_draws(successes: Array, trials: Array, draws: Array) -> Estimate:
    """`rate_estimate` with its bootstrap draws given.

    A bootstrap sees no spread where every problem is at 0, or every one at 1. There the interval is Clopper and
    Pearson's (Biometrika 26:4, 1934) for that many problems, which bounds the rate whatever happens within a problem.
    """
    value = math.fsum(successes) / math.fsum(trials)
    reach = 1.0 - TAIL ** (1.0 / int((trials > 0).sum()))
    if not successes.any():
        return Estimate(value, 0.0, reach)
    if np.array_equal(successes, trials):
        return Estimate(value, 1.0 - reach, 1.0)
    return Estimate(value, *percentiles(draws))


def rising(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Estimates of pass@k at increasing k, with the bounds that each lends the others.

    pass@k never falls with k, whatever the policy, so a lower bound at one k holds at all larger ones and an upper
    bound at all smaller ones.
    """
    lows = np.maximum.accumulate([e.low for e in estimates])
    highs = np.minimum.accumulate([e.high for e in reversed(estimates)])[::-1]
    return [Estimate(e.value, float(lo), float(hi)) for e, lo, hi in zip(estimates, lows, highs, strict=True)]


def problem_weights(num_problems: int, num_draws: int, rng: np.random.Generator) -> Array:
    """Weights [D, P], rows summing to 1, of a bootstrap over problems."""
    counts = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), size=num_draws)
    return counts / num_problems


def percentiles(draws: Array) -> tuple[float, float]:
    """Bounds of the central 95% of the finite draws."""
    low, high = np.quantile(draws[np.isfinite(draws)], [TAIL, 1 - TAIL], method="weibull")
    return float(low), float(high)
