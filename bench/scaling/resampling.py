"""Bootstrap draws as weights: how often each point counts in each draw."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtrit

from bench.scaling.law import Array

CONFIDENCE = 0.95


def point_weights(seeds: NDArray[np.int64], num_draws: int, rng: np.random.Generator) -> Array:
    """Counts [D, N]: draw whole seeds with replacement (if there are several), then points within each seed drawn.

    `seeds` [N] numbers the seed of each point. Seeds are the larger unit because the points of one run share its luck.
    """
    ids = np.unique(seeds)
    copies = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=num_draws)
    weights = np.zeros((num_draws, len(seeds)))
    for column, seed in enumerate(ids):
        members = np.flatnonzero(seeds == seed)
        for draw in np.flatnonzero(copies[:, column]):
            picks = rng.integers(0, len(members), copies[draw, column] * len(members))
            weights[draw, members] = np.bincount(picks, minlength=len(members))
    return weights


def run_weights(num_runs: int, num_draws: int, rng: np.random.Generator) -> Array:
    """Counts [D, R] of a bootstrap over runs."""
    return rng.multinomial(num_runs, np.full(num_runs, 1 / num_runs), size=num_draws).astype(float)


def interval(draws: Array, num_points: int | None = None, num_parameters: int = 1) -> tuple[float, float]:
    """95% percentile interval of the finite draws; (nan, nan) when there are none.

    Percentiles of a bootstrap over few points are too narrow: with `num_points` the tails are those of the expanded
    percentile interval, Phi(-sqrt(N / (N - p)) t(N - p)) (Hesterberg, The American Statistician 69:4, 2015).
    """
    finite = draws[np.isfinite(draws)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    tail = (1 - CONFIDENCE) / 2
    if num_points is not None:
        freedom = max(1, num_points - num_parameters)
        tail = float(ndtr(np.sqrt(num_points / freedom) * stdtrit(freedom, tail)))
    low, high = np.quantile(finite, [tail, 1 - tail], method="weibull")
    return float(low), float(high)
