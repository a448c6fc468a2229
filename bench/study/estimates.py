"""A figure over seeds with its uncertainty."""

import msgspec
import numpy as np

from bench.scaling.resampling import interval, run_weights

NUM_DRAWS = 10_000


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds with a 95% bootstrap interval over seeds; no interval for a single seed."""

    value: float
    low: float | None
    high: float | None


def estimate(by_seed: dict[int, float]) -> Estimate:
    values = np.array(list(by_seed.values()))
    if len(values) < 2:
        return Estimate(float(values.mean()), None, None)
    weights = run_weights(len(values), NUM_DRAWS, np.random.default_rng(0))
    low, high = interval(weights @ values / len(values), len(values))
    return Estimate(float(values.mean()), low, high)
