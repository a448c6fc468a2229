"""How much the reward depends on n, and how much on problems per batch, at equal compute."""

import msgspec
import numpy as np

from bench.scaling.law import Array
from bench.scaling.sweep import Sweep


class Sensitivity(msgspec.Struct, frozen=True):
    """Relative spread of the best reward, (max - min) / mean, at `compute`, the most that every arm reached in a run.

    `n`: over n at fixed problems per batch, averaged over those; `b_problem`: the other way round. None where the sweep
    did not vary it. Rewards are the mean over the runs of an arm; one that ended early stays at its best.
    """

    compute: float
    n: float | None
    b_problem: float | None


def sensitivity(sweep: Sweep) -> Sensitivity:
    pairs = {*zip(sweep.b_problem.tolist(), sweep.n.tolist(), strict=True)}
    compute = float(min(sweep.compute[(sweep.b_problem == b) & (sweep.n == n)].max() for b, n in pairs))
    arms: dict[tuple[int, int], list[float]] = {}
    for run in np.unique(sweep.run):
        mine = (sweep.run == run) & (sweep.compute <= compute)
        first = int(np.flatnonzero(mine)[0])
        arm = int(sweep.b_problem[first]), int(sweep.n[first])
        arms.setdefault(arm, []).append(float(sweep.reward[mine].max()))
    table = np.full((len(np.unique(sweep.b_problem)), len(sweep.ns)), np.nan)
    for (b_problem, n), rewards in arms.items():
        row, column = np.searchsorted(np.unique(sweep.b_problem), b_problem), np.searchsorted(sweep.ns, n)
        table[row, column] = np.mean(rewards)
    return Sensitivity(compute, _spread(table), _spread(table.T))


def _spread(table: Array) -> float | None:
    """Mean over the rows with at least two arms of (max - min) / mean; None without such a row."""
    spreads = []
    for row in table:
        seen = row[np.isfinite(row)]
        if len(seen) > 1 and seen.mean() > 0:
            spreads.append(float(np.ptp(seen) / seen.mean()))
    return float(np.mean(spreads)) if spreads else None
