"""Synthetic sweeps of which n*(C) is known exactly, for `ngu fit isocompute --check` and the tests."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from bench.scaling.law import Array
from bench.scaling.sweep import Sweep

NS = (8, 16, 32, 64, 128, 256, 512)
B_PROBLEMS = (32, 128)
NUM_SEEDS = 3
COMPUTES = np.geomspace(1e3, 3e6, 40)  # rollouts
NOISE = 0.004
OUTLIER_FRAC, OUTLIER_DROP = 0.05, 0.15

R0, CEILING = 0.1, 0.7
STEEPNESS = 1.1
SHIFT = 0.45  # of ln C_mid for each doubling of n
OVERFIT = 0.02  # relative loss of A, times the square of the doublings beyond n_sat


@dataclass(frozen=True)
class World:
    """R_n(C) = R0 + gain(n) / (1 + (C_mid(n) / C)^STEEPNESS), where argmax_n R_n(C) is a given sigmoid.

    With l = log2 n and C_mid growing by SHIFT a doubling, dR/dl = 0 asks for
    d ln gain / dl = STEEPNESS * SHIFT * (1 - expit(STEEPNESS * (ln C - ln C_mid(l)))). Put in the C at which l is to be
    optimal, that is the inverse of the wanted sigmoid, and integrate. Beyond n_sat the gain falls by OVERFIT times the square of the doublings.
    """

    n_sat: float
    c0: float
    k: float
    n_min: int = NS[0]

    def gain(self, n: NDArray[np.int64]) -> Array:
        low, high = np.log2(self.n_min), np.log2(self.n_sat)
        l_ = np.linspace(low, high, 4001)
        inside = l_[1:-1]
        ln_c = np.log(self.c0) + logit((inside - low) / (high - low)) * np.log(10) / self.k
        slope = STEEPNESS * SHIFT * expit(-STEEPNESS * (ln_c - self.ln_c_mid(inside)))
        ln_gain = np.concatenate([[0.0], np.cumsum(slope) * (l_[1] - l_[0]), [0.0]])
        ln_gain[-1] = ln_gain[-2]
        at = np.log2(n)
        relative = np.interp(at, l_, ln_gain - ln_gain[-1]) - OVERFIT * np.maximum(0.0, at - high) ** 2
        return (CEILING - R0) * np.exp(relative)

    def ln_c_mid(self, log2_n: Array) -> Array:
        return np.log(2e3) + SHIFT * (log2_n - np.log2(self.n_min))

    def reward(self, n: NDArray[np.int64], compute: Array) -> Array:
        """[..., N] for n [..., 1] and compute [N]."""
        return R0 + self.gain(n) * expit(STEEPNESS * (np.log(compute) - self.ln_c_mid(np.log2(n))))

    def sweep(self, rng: np.random.Generator, ns: tuple[int, ...] = NS) -> Sweep:
        """Every n with every B_problem and seed, with noise and sudden drops that make the curves non-monotone."""
        arms = np.array([(n, b) for n in ns for b in B_PROBLEMS for _ in range(NUM_SEEDS)])
        n, b_problem = (np.repeat(column[:, None], len(COMPUTES), axis=1) for column in arms.T)
        compute = np.tile(COMPUTES, (len(arms), 1))
        reward = self.reward(arms[:, :1], COMPUTES) + rng.normal(0, NOISE, n.shape)
        reward -= OUTLIER_DROP * (rng.random(n.shape) < OUTLIER_FRAC)
        run = np.repeat(np.arange(len(arms))[:, None], len(COMPUTES), axis=1)
        step = np.maximum(1, np.round(compute / (n * b_problem))).astype(int)
        flat = [x.ravel() for x in (run, b_problem, n, step, compute, reward.clip(0, 1))]
        return Sweep(*flat, r0=None).where(np.lexsort((-flat[5], flat[4])))
