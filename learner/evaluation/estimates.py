"""Means and rates over problems with their intervals. Pure functions.

Problems are the unit of the bootstrap: resampling them carries the noise of their rollouts along. (Resampling rollouts
too would count that noise twice, and biases pass@k near k = n, because a resample repeats rollouts.)
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.at_k import Array
from pipeline.errors import ConfigError

NUM_DRAWS = 1000
TAIL = 0.025  # of a 95% interval, on either side


class Estimate(msgspec.Struct, frozen=True):
    """A value with its 95% bootstrap interval (both NaN without draws)."""

    value: float
    low: float
    high: float


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


def mean_estimate(per_problem: Array, num_draws: int, rng: np.random.Generator) -> Estimate:
    """Mean over problems [P] with its 95% interval over resampled problems."""
    draws = problem_weights(len(per_problem), num_draws, rng) @ per_problem
    return Estimate(math.fsum(per_problem) / len(per_problem), *percentiles(draws))


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
