"""How many rollouts per problem a compute budget is best spent with: n*(C) from a sweep (IsoCompute, arXiv 2603.12151).

1. For each n, the record-breaking points over its runs: the first point in a higher reward bin than all before; and at
   its largest compute the best so far, without which a curve would rise on after its last record.
2. Through them a monotone sigmoid R_n(C), in the form of the ScaleRL law with one R0 for the whole sweep.
3. The frontier f(C) = max_n R_n(C), over the n whose runs reach C, and n*(C) its argmax.
4. A sigmoid of log2 n*(C) in ln C, from the smallest n swept up to n_sat.

Intervals are from a bootstrap over runs within each n.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.special import expit

from bench.scaling.law import LN_C_MID, R0, A, Array, B, Points, reward_at, solve, start, tie
from bench.scaling.resampling import interval, run_weights
from bench.scaling.sweep import MIN_NS, Sweep
from pipeline.errors import ConfigError
from pipeline.estimates import Estimate

REWARD_BIN = 0.005
MIN_RECORDS = 3
NUM_COMPUTES = 64
SPLINE_NODES = 241
# Saturation is claimed when n*(C) has come this near its plateau within the sweep...
PLATEAU_FRAC = 0.9
# ...and the largest n lost at the largest compute in this share of the draws.
SURE_FRAC = 0.95
KEPT_DRAWS = 200

Bools = NDArray[np.bool_]


class Curve(msgspec.Struct, frozen=True):
    """The sigmoid of one n; `compute_per_rollout` is the median cost, 1 where compute is counted in rollouts."""

    n: int
    num_runs: int
    num_records: int
    a: float
    c_mid: float
    b: float
    r0: float
    compute_low: float
    compute_high: float
    compute_per_rollout: float


class FrontierPoint(msgspec.Struct, frozen=True):
    """One compute of the frontier: `best_n` won there; `n_star` is the sigmoid through the winners."""

    compute: float
    reward: Estimate
    best_n: int
    n_star: Estimate


class Record(msgspec.Struct, frozen=True):
    """A record-breaking point of its n; `on_frontier`: it broke the record of the whole sweep."""

    n: int
    b_problem: int
    compute: float
    reward: float
    on_frontier: bool


class Saturation(msgspec.Struct, frozen=True):
    """Whether the plateau of n*(C) was observed, and why not if it was not. `n_sat` is only then a finding."""

    observed: bool
    n_sat: Estimate
    reason: str


class IsoFit(msgspec.Struct, frozen=True):
    """log2 n*(C) = log2 n_min + (log2 n_sat - log2 n_min) / (1 + (C0 / C)^(k / ln 10)): `k` is per decade of compute.

    `draws` [D][3] are bootstrap values of (log2 n_sat, ln C0, k), for intervals at other computes. `grows_frac` is the
    share of draws in which the winner at the largest compute has a larger n than that at the smallest.
    """

    n_min: int
    n_sat: Estimate
    c0: Estimate
    k: Estimate
    grows_frac: float
    saturation: Saturation
    curves: list[Curve]
    frontier: list[FrontierPoint]
    records: list[Record]
    left_out: list[int]
    draws: list[list[float]]

    def log2_n_star(self, compute: float) -> Estimate:
        """log2 n*(C) at any compute, with its interval."""
        low = np.log2(self.n_min)

        def at(log2_n_sat: Array, ln_c0: Array, k: Array) -> Array:
            return low + (log2_n_sat - low) * expit(k / np.log(10) * (np.log(compute) - ln_c0))

        value = at(*(np.array([v]) for v in (np.log2(self.n_sat.value), np.log(self.c0.value), self.k.value)))[0]
        return Estimate(float(value), *interval(at(*np.array(self.draws).T)))


@dataclass(frozen=True)
class _Arms:
    """The sweep split by n, each with its points and, for every draw (row 0: the data), which are records [D, N_n].

    `fitted` are those points and then the best of each run, put at the largest compute of its n; `weights`
    [D, N_n + runs] say which of them the curve of a draw goes through.
    """

    ns: NDArray[np.int64]
    records: list[Array]
    fitted: list[Points]
    weights: list[Array]
    compute_low: Array
    compute_high: Array


def record_breaking(reward: Array, included: Bools) -> Bools:
    """Points, in order of compute [N], that enter a higher reward bin than every included point before: [D, N].

    Points that are not `included` [D, N] neither are records nor stand in the way of one.
    """
    bins = np.where(included, np.floor(reward / REWARD_BIN + 1e-9), -np.inf)
    best_before = np.maximum.accumulate(bins, axis=1)[:, :-1]
    return included & (bins > np.pad(best_before, ((0, 0), (1, 0)), constant_values=-np.inf))


def fit_isocompute(sweep: Sweep, num_draws: int, rng: np.random.Generator) -> IsoFit:
    """Fit curves, frontier and n*(C); raises ConfigError when fewer than three n have enough record-breaking points."""
    arms, left_out = _arms(sweep, num_draws, rng)
    curves = _curves(arms, sweep.r0)  # [D, R, 4]
    grid = np.geomspace(np.sort(arms.compute_low)[1], arms.compute_high.max(), NUM_COMPUTES)
    rewards = np.stack([reward_at(grid, curves[:, i]) for i in range(len(arms.ns))], axis=1)  # [D, R, G]
    reached = (grid >= arms.compute_low[:, None]) & (grid <= arms.compute_high[:, None] * (1 + 1e-9))
    rewards = np.where(reached, rewards, -np.inf)
    winner = rewards.argmax(1)  # [D, G]
    per_n = [_curve(sweep, arms, i, curves[0, i]) for i in range(len(arms.ns))]
    law = _fit_n_star(arms.ns, grid, _argmax_n(arms.ns, rewards), rng)
    n_star = 2 ** reward_at(grid, law)
    best = rewards.max(1)
    return IsoFit(
        n_min=int(arms.ns[0]),
        n_sat=_estimate(2 ** law[:, A]),
        c0=_estimate(np.exp(law[:, LN_C_MID])),
        k=_estimate(law[:, B] * np.log(10)),
        grows_frac=float((winner[1:, -1] > winner[1:, 0]).mean()),
        saturation=_saturation(arms.ns, law, rewards, winner, grid, min(c.num_runs for c in per_n)),
        curves=per_n,
        frontier=[
            FrontierPoint(float(c), _estimate(best[:, g]), int(arms.ns[winner[0, g]]), _estimate(n_star[:, g]))
            for g, c in enumerate(grid)
        ],
        records=_records(sweep, arms),
        left_out=left_out,
        draws=np.stack([law[1:, A], law[1:, LN_C_MID], law[1:, B] * np.log(10)], axis=1)[:KEPT_DRAWS].tolist(),
    )


def _arms(sweep: Sweep, num_draws: int, rng: np.random.Generator) -> tuple[_Arms, list[int]]:
    ns, records, fitted, weights, left_out = [], [], [], [], []
    for n in sweep.ns:
        part = sweep.where(sweep.n == n)
        runs = np.unique(part.run)
        drawn = np.vstack([np.ones(len(runs)), run_weights(len(runs), num_draws, rng)]) > 0
        breaking = record_breaking(part.reward, drawn[:, np.searchsorted(runs, part.run)])
        if breaking[0].sum() < MIN_RECORDS:
            left_out.append(int(n))
            continue
        best = np.array([part.reward[part.run == run].max() for run in runs])
        last = np.arange(len(runs)) == np.where(drawn, best, -np.inf).argmax(1)[:, None]  # [D, runs]
        compute = np.concatenate([part.compute, np.full(len(runs), part.compute.max())])
        ns.append(n)
        records.append(breaking.astype(float))
        fitted.append(Points.of(compute, np.concatenate([part.reward, best])))
        weights.append(np.hstack([breaking, last]).astype(float))
    if len(ns) < MIN_NS:
        raise ConfigError(
            f"only {len(ns)} values of n have {MIN_RECORDS} record-breaking points (bins of {REWARD_BIN}), {MIN_NS} "
            "are needed; train longer, evaluate more often, or sweep more n"
        )
    low, high = (np.array([f(p.ln_compute) for p in fitted]) for f in (np.min, np.max))
    return _Arms(np.array(ns), records, fitted, weights, np.exp(low), np.exp(high)), left_out


def _curves(arms: _Arms, r0: float | None) -> Array:
    """The sigmoid of every n in every draw, [D, R, 4]; R0 is that measured before training or one free value."""
    tied = tie(arms.fitted, [r0] * len(arms.ns), common_r0=True)
    of_data = [
        Points(p.ln_compute[w[0] > 0], p.reward[w[0] > 0]) for p, w in zip(arms.fitted, arms.weights, strict=True)
    ]
    nodes = np.concatenate([start(p, r0) for p in of_data])
    free = (tied.matrix @ nodes / tied.matrix.sum(1))[None]
    first, _ = solve(of_data, tied, free)
    optimum = tied.matrix @ first.ravel() / tied.matrix.sum(1)
    found, _ = solve(arms.fitted, tied, np.tile(optimum, (len(arms.weights[0]), 1)), arms.weights)
    return found


def _argmax_n(ns: NDArray[np.int64], rewards: Array) -> Array:
    """Where on the axis of log2 n the reward is highest, [D, G]: the maximum of a cubic spline through the swept n.

    The best swept n alone is wrong by up to half a doubling, always to the same side of a rising n*(C).
    """
    log2_n = np.log2(ns)
    found = np.empty((rewards.shape[0], rewards.shape[2]))
    reached = np.isfinite(rewards[0])  # [R, G], the same in every draw
    patterns, which = np.unique(reached, axis=1, return_inverse=True)
    for i, pattern in enumerate(patterns.T):
        columns, knots = np.flatnonzero(which == i), log2_n[pattern]
        fine = np.linspace(knots[0], knots[-1], SPLINE_NODES) if len(knots) > 1 else knots
        # The spline is linear in its values: one matrix evaluates it for all draws and computes.
        basis = CubicSpline(knots, np.eye(len(knots)))(fine) if len(knots) > 1 else np.ones((1, 1))
        values = np.einsum("fr,drg->dfg", basis, rewards[:, pattern][:, :, columns], optimize=True)
        found[:, columns] = fine[values.argmax(1)]
    return found


def _fit_n_star(ns: NDArray[np.int64], grid: Array, log2_star: Array, rng: np.random.Generator) -> Array:
    """The sigmoid through log2 n*(C) [D, G] for every draw, [D, 4], R0 being log2 of the smallest n.

    n* is known only as finely as n was swept, an error that is the same for all draws. It shows as lack of fit, so each
    draw also carries the residuals of the fit to the data, shifted along the compute axis and with a random sign.
    """
    law = _sigmoids(ns, grid, log2_star[:1], None)
    residual = log2_star[0] - reward_at(grid, law[0])
    shifts = (np.arange(len(grid)) + rng.integers(0, len(grid), (len(log2_star) - 1, 1))) % len(grid)
    signs = rng.choice([-1.0, 1.0], (len(log2_star) - 1, 1))
    return np.vstack([law, _sigmoids(ns, grid, log2_star[1:] + signs * residual[shifts], law[0, :R0])])


def _sigmoids(ns: NDArray[np.int64], grid: Array, log2_star: Array, free: Array | None) -> Array:
    """Least-squares parameters [D, 4] for each row of `log2_star` [D, G], from the starting values `free`.

    The solver gives draws weights and not values, so every (compute, n) is a point and a row spreads its weight over
    the two n around its n*: the minimum is the same.
    """
    log2_n = np.log2(ns)
    floor, ceiling = float(log2_n[0]), float(log2_n[-1])
    if free is None:
        free = start(Points(np.log(grid), log2_star[0]), floor, floor=floor, ceiling=ceiling)[:R0]
    position = np.interp(log2_star, log2_n, np.arange(len(ns)))
    weights = np.maximum(0.0, 1 - np.abs(position[:, :, None] - np.arange(len(ns))))  # [D, G, R]
    points = Points(np.repeat(np.log(grid), len(ns)), np.tile(log2_n, len(grid)))
    tied = tie([points], [floor], floor=floor, ceiling=ceiling)
    found, _ = solve([points], tied, np.tile(free, (len(log2_star), 1)), [weights.reshape(len(weights), -1)])
    return found[:, 0]


def _saturation(
    ns: NDArray[np.int64], law: Array, rewards: Array, winner: NDArray[np.intp], grid: Array, fewest_runs: int
) -> Saturation:
    n_sat, largest = _estimate(2 ** law[:, A]), int(ns[-1])
    tried = np.flatnonzero(np.isfinite(rewards[0, -1]))  # the computes at which the largest n has data
    if len(tried) == 0:
        return Saturation(False, n_sat, f"n = {largest} was not tried at any compute of the frontier")
    end = int(tried[-1])
    lost = float((winner[1:, end] < len(ns) - 1).mean())
    reached = float(expit(law[0, B] * (np.log(grid[-1]) - law[0, LN_C_MID])))
    if fewest_runs < 2:
        reason = "some n have a single run, and no draw shows how far its luck goes"
    elif winner[0, end] == len(ns) - 1:
        reason = f"n = {largest}, the largest tried, is the best at the largest compute"
    elif lost < SURE_FRAC:
        reason = f"n = {largest}, the largest tried, loses at the largest compute in only {lost:.0%} of the draws"
    elif n_sat.high >= largest * (1 - 1e-6):
        reason = f"the interval of the plateau reaches n = {largest}, the largest tried"
    elif reached < PLATEAU_FRAC and n_sat.value > ns[0]:
        reason = f"n*(C) has come only {reached:.0%} of the way to its plateau by the largest compute"
    else:
        return Saturation(True, n_sat, f"n = {largest} was tried and lost in {lost:.0%} of the draws")
    return Saturation(False, n_sat, reason)


def _curve(sweep: Sweep, arms: _Arms, i: int, parameters: Array) -> Curve:
    n = int(arms.ns[i])
    part = sweep.where(sweep.n == n)
    cost = part.compute / (part.b_problem * n * part.step)
    a, ln_c_mid, b, r0 = (float(v) for v in parameters)
    return Curve(
        n=n,
        num_runs=len(np.unique(part.run)),
        num_records=int(arms.records[i][0].sum()),
        a=a,
        c_mid=float(np.exp(ln_c_mid)),
        b=b,
        r0=r0,
        compute_low=float(arms.compute_low[i]),
        compute_high=float(arms.compute_high[i]),
        compute_per_rollout=float(np.median(cost)),
    )


def _records(sweep: Sweep, arms: _Arms) -> list[Record]:
    everything = np.full((1, len(sweep.n)), True)
    frontier = record_breaking(sweep.reward, everything)[0]
    own = np.full(len(sweep.n), False)
    for n, mask in zip(arms.ns, arms.records, strict=True):
        own[sweep.n == n] = mask[0] > 0
    return [
        Record(
            int(sweep.n[i]), int(sweep.b_problem[i]), float(sweep.compute[i]), float(sweep.reward[i]), bool(frontier[i])
        )
        for i in np.flatnonzero(own)
    ]


def _estimate(samples: Array) -> Estimate:
    """Row 0 is the data, the others are draws."""
    return Estimate(float(samples[0]), *interval(samples[1:]))
