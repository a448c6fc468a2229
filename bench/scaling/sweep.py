"""Sweeps over (problems per batch, rollouts per problem): what `ngu fit isocompute` reads.

One row an evaluation, in CSV or JSON lines; `ngu sweep isocompute` writes one:

| column | meaning |
|---|---|
| `run_id`, `seed` | the run; several runs may share a seed |
| `b_problem`, `n` | problems per batch and rollouts per problem of that run |
| `step` | optimizer steps done, so rollouts = b_problem * n * step |
| `compute` | spent so far, in any one unit (rollouts, tokens, hours); 0 before training |
| `reward` | held-out reward in [0, 1] |
| `best_at_k`, `worst_at_k`, ... | optional: other targets in [0, 1], of any name |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.scaling.law import Array
from bench.scaling.tables import Row, integer, number, read_table, require_columns
from pipeline.errors import ConfigError

TABLE = "sweep.csv"
COLUMNS = ("run_id", "seed", "b_problem", "n", "step", "compute")
Ints = NDArray[np.int64]

MIN_NS = 3  # with two values of n, n*(C) is one step and not a curve


@dataclass(frozen=True)
class Sweep:
    """Evaluations as parallel arrays [N] sorted by compute; `run` numbers the runs; `r0` is the reward at compute 0."""

    run: Ints
    b_problem: Ints
    n: Ints
    step: Ints
    compute: Array
    reward: Array
    r0: float | None

    def where(self, index: NDArray[np.bool_] | NDArray[np.intp]) -> "Sweep":
        return Sweep(
            self.run[index],
            self.b_problem[index],
            self.n[index],
            self.step[index],
            self.compute[index],
            self.reward[index],
            self.r0,
        )

    def in_order(self) -> "Sweep":
        """Sorted by compute; of equal compute the best reward comes first, for only it can break the record there."""
        return self.where(np.lexsort((-self.reward, self.compute)))

    @property
    def ns(self) -> Ints:
        return np.unique(self.n)


def load_sweep(paths: Sequence[Path], target: str) -> Sweep:
    """Read and check the tables, or that of `ngu sweep` in a directory; raises ConfigError naming file and row."""
    rows: list[tuple[str, int, int, int, float, float]] = []
    for path in (p / TABLE if p.is_dir() else p for p in paths):
        table = read_table(path)
        require_columns(path, table, (*COLUMNS, target))
        rows += [_row(path, i, row, target) for i, row in enumerate(table)]
    names = sorted({row[0] for row in rows})
    number_of = {name: i for i, name in enumerate(names)}
    run = np.array([number_of[row[0]] for row in rows])
    b_problem, n, step = (np.array([row[i] for row in rows]) for i in (1, 2, 3))
    compute, reward = (np.array([row[i] for row in rows]) for i in (4, 5))
    for i, name in enumerate(names):
        _check_run(name, b_problem[run == i], n[run == i], step[run == i], compute[run == i])
    untrained = compute == 0
    r0 = float(reward[untrained].mean()) if untrained.any() else None
    return Sweep(run, b_problem, n, step, compute, reward, r0).where(~untrained).in_order()


def restrict(sweep: Sweep, b_problem: int | None, batch: int | None) -> Sweep:
    """The runs with this number of problems per batch, or with this many rollouts per batch; raises ConfigError."""
    if b_problem is not None and batch is not None:
        raise ConfigError("--b-problem and --batch exclude each other: with both fixed there is one n and no frontier")
    if b_problem is not None:
        kept, rule = sweep.b_problem == b_problem, f"b_problem = {b_problem}"
        known = np.unique(sweep.b_problem)
    elif batch is not None:
        kept, rule = sweep.b_problem * sweep.n == batch, f"b_problem * n = {batch}"
        known = np.unique(sweep.b_problem * sweep.n)
    else:
        kept, rule, known = np.full(len(sweep.n), True), "any batch", np.array([], int)
    part = sweep.where(kept)
    if len(part.ns) < MIN_NS:
        tried = f" (the sweep has {', '.join(map(str, known))})" if len(known) else ""
        raise ConfigError(
            f"{rule}: {len(part.ns)} values of n, at least {MIN_NS} are needed for a frontier; sweep more n{tried}"
        )
    if np.ptp(part.reward) < 1e-9:
        raise ConfigError(f"{rule}: the reward is {part.reward[0]:g} throughout; there is no frontier to fit")
    return part


def _row(path: Path, i: int, row: Row, target: str) -> tuple[str, int, int, int, float, float]:
    reward, compute = number(path, i, row, target), number(path, i, row, "compute")
    b_problem, n, step = (integer(path, i, row, name) for name in ("b_problem", "n", "step"))
    if not 0 <= reward <= 1:
        raise ConfigError(f"{path}, row {i + 1}: {target} is {reward:g}; rescale it to [0, 1]")
    if b_problem < 1 or n < 1 or compute < 0 or step < (compute > 0):
        raise ConfigError(
            f"{path}, row {i + 1}: b_problem and n must be at least 1, compute at least 0, and step at least 1 once "
            "compute is spent"
        )
    return str(row["run_id"]), b_problem, n, step, compute, reward


def _check_run(name: str, b_problem: Ints, n: Ints, step: Ints, compute: Array) -> None:
    if len(np.unique(n)) > 1 or len(np.unique(b_problem)) > 1:
        raise ConfigError(f"run {name}: n or b_problem changes within the run; give every arm a run_id of its own")
    if (np.diff(compute) <= 0).any() or (np.diff(step) < 0).any():
        raise ConfigError(
            f"run {name}: compute must increase from row to row; sort the rows or give runs their own run_id"
        )
