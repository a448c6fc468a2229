"""Synthetic sweeps of which n*(C) is known exactly, for `ngu fit isocompute --check` and the tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from bench.scaling.isocompute import fit_isocompute
from bench.scaling.law import Array
from bench.scaling.sweep import Sweep

NS = (8, 16, 32, 64, 128, 256, 512)
B_PROBLEMS = (32, 128)
NUM_SEEDS = 3
COMPUTE_RANGE = 1e3, 3e6  # rollouts
NUM_POINTS = 40 * len(NS) * len(B_PROBLEMS) * NUM_SEEDS
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
    optimal, that is the inverse of the wanted sigmoid, and integrate. Beyond n_sat the gain falls by OVERFIT times the
    square of the doublings.
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

    def sweep(self, rng: np.random.Generator, ns: tuple[int, ...] = NS, num_points: int = NUM_POINTS) -> Sweep:
        """Every n with every B_problem and seed, with noise and sudden drops that make the curves non-monotone.

        `num_points` is about how many evaluations it has for each `NS` n.
        """
        computes = np.geomspace(*COMPUTE_RANGE, max(1, round(num_points / (len(NS) * len(B_PROBLEMS) * NUM_SEEDS))))
        arms = np.array([(n, b) for n in ns for b in B_PROBLEMS for _ in range(NUM_SEEDS)])
        n, b_problem = (np.repeat(column[:, None], len(computes), axis=1) for column in arms.T)
        compute = np.tile(computes, (len(arms), 1))
        reward = self.reward(arms[:, :1], computes) + rng.normal(0, NOISE, n.shape)
        reward -= OUTLIER_DROP * (rng.random(n.shape) < OUTLIER_FRAC)
        run = np.repeat(np.arange(len(arms))[:, None], len(computes), axis=1)
        step = np.maximum(1, np.round(compute / (n * b_problem))).astype(int)
        return Sweep(
            run.ravel(), b_problem.ravel(), n.ravel(), step.ravel(), compute.ravel(), reward.clip(0, 1).ravel(), None
        ).in_order()


WORLDS = (World(64, 3e4, 2.0), World(128, 6e4, 2.0), World(256, 1e5, 3.0))
UNSEEN = World(2048, 1e6, 2.0)  # its plateau lies beyond the largest n and compute of the sweep
NUM_SWEEPS, NUM_DRAWS = 20, 200
# n is swept in steps of a factor 2, which leaves n*(C) off by up to a quarter of a doubling; see `_fit_n_star`.
MIN_INSIDE = 0.80


class Line(msgspec.Struct, frozen=True):
    """One checked claim."""

    name: str
    passed: bool
    detail: str


def check(seed: int) -> Iterator[Line]:
    """Every check in turn; about half a minute of one core."""
    rng = np.random.default_rng(seed)
    for world in WORLDS:
        yield _recovered(world, rng)
    yield _refused("plateau beyond the sweep", UNSEEN, NS, rng)
    yield _refused("no larger n tried", World(128, 6e4, 2.0), NS[:5], rng)


def _recovered(world: World, rng: np.random.Generator) -> Line:
    inside, values, observed = [], [], 0
    truth = world.n_sat, world.c0, world.k
    for _ in range(NUM_SWEEPS):
        fit = fit_isocompute(world.sweep(rng), NUM_DRAWS, rng)
        estimates = fit.n_sat, fit.c0, fit.k
        inside.append([e.low <= true <= e.high for e, true in zip(estimates, truth, strict=True)])
        values.append([e.value for e in estimates])
        observed += fit.saturation.observed
    share, mean = np.mean(inside, axis=0), np.mean(values, axis=0)
    parts = [
        f"{name} {true:g} found {found:.3g}, inside {frac:.0%}"
        for name, true, found, frac in zip(("n_sat", "C0", "k"), truth, mean, share, strict=True)
    ]
    return Line(
        f"n_sat = {world.n_sat:g}, C0 = {world.c0:g}, k = {world.k:g}",
        bool((share >= MIN_INSIDE).all()),
        f"{'; '.join(parts)}; saturation observed in {observed} of {NUM_SWEEPS} sweeps",
    )


def _refused(name: str, world: World, ns: tuple[int, ...], rng: np.random.Generator) -> Line:
    claims = sum(fit_isocompute(world.sweep(rng, ns), NUM_DRAWS, rng).saturation.observed for _ in range(NUM_SWEEPS))
    return Line(name, claims == 0, f"saturation claimed in {claims} of {NUM_SWEEPS} sweeps")
