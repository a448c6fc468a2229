"""Curves of held-out reward against compute, from run directories or CSV files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.scaling.law import Array, Points
from bench.scaling.tables import Row, integer, number, read_table, require_columns
from pipeline.errors import ConfigError
from pipeline.metrics import Record, current_records, read_records

Unit = Literal["core_hours", "gpu_hours", "rollouts", "tokens", "steps", "compute"]
PassRate = Literal["mix", "hard"]

# How a unit is written in a sentence or on an axis.
UNIT_NAMES: dict[Unit, str] = {"core_hours": "core-hours", "gpu_hours": "GPU-hours"}

# Fewer than this and three parameters plus noise leave nothing to check the fit against.
MIN_POINTS = 6


@dataclass(frozen=True)
class Recipe:
    """All evaluations of one recipe: `compute`, `reward` and `seed` are [N]; the seeds' curves follow each other.

    `r0` is the mean reward at compute 0, if it was measured; those evaluations are not among the points.
    """

    name: str
    compute: Array
    reward: Array
    seed: NDArray[np.int64]
    r0: float | None

    @property
    def points(self) -> Points:
        return Points.of(self.compute, self.reward)

    @property
    def num_seeds(self) -> int:
        return len(np.unique(self.seed))

    def where(self, mask: NDArray[np.bool_]) -> "Recipe":
        return Recipe(self.name, self.compute[mask], self.reward[mask], self.seed[mask], self.r0)


@dataclass(frozen=True)
class _Curve:
    """One run of one seed; `where` names it in errors."""

    recipe: str
    seed: int
    compute: Array
    reward: Array
    where: str


def load_recipes(paths: Sequence[Path], unit: Unit | None, pass_rate: PassRate) -> tuple[list[Recipe], Unit]:
    """Read runs (directories) and tables (files), all in one unit of compute; raises ConfigError.

    Runs whose configs differ only in the seed are one recipe. A table has a column of compute named by its unit,
    `reward` (or `pass_at_1`), and optionally `recipe` and `seed`.
    """
    runs = [path for path in paths if path.is_dir()]
    tables = [(path, read_table(path)) for path in paths if not path.is_dir()]
    unit = unit or _unit_of(tables)
    if unit in ("gpu_hours", "compute") and runs:
        raise ConfigError(f"{runs[0]}: a run is measured in core_hours, rollouts, tokens or steps; --unit says {unit}")
    curves = _run_curves(runs, unit, pass_rate)
    for path, rows in tables:
        curves += _table_curves(path, rows, unit)
    by_recipe: dict[str, list[_Curve]] = {}
    for curve in curves:
        _check(curve)
        by_recipe.setdefault(curve.recipe, []).append(curve)
    return [_recipe(name, members) for name, members in by_recipe.items()], unit


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError for what no law can be fitted to."""
    if len(recipe.reward) < MIN_POINTS:
        raise ConfigError(
            f"{recipe.name}: {len(recipe.reward)} evaluations in the fit window, at least {MIN_POINTS} are needed; "
            "widen the window or evaluate more often"
        )
    if np.ptp(recipe.reward) < 1e-9:
        raise ConfigError(f"{recipe.name}: the reward is {recipe.reward[0]:g} throughout; there is no curve to fit")


def _check(curve: _Curve) -> None:
    falls = np.flatnonzero(np.diff(curve.compute) <= 0)
    if len(falls):
        at = int(falls[0])
        raise ConfigError(
            f"{curve.where}: compute must increase, but {curve.compute[at + 1]:g} follows {curve.compute[at]:g}; "
            "give different runs different seeds or recipes"
        )
    if len(curve.compute) and curve.compute[0] < 0:
        raise ConfigError(f"{curve.where}: compute {curve.compute[0]:g} is negative")
    outside = np.flatnonzero((curve.reward < 0) | (curve.reward > 1))
    if len(outside):
        raise ConfigError(
            f"{curve.where}: reward {curve.reward[outside[0]]:g} is no pass rate; rescale rewards to [0, 1]"
        )


def _recipe(name: str, curves: list[_Curve]) -> Recipe:
    compute = np.concatenate([c.compute for c in curves])
    reward = np.concatenate([c.reward for c in curves])
    seed = np.concatenate([np.full(len(c.compute), i) for i, c in enumerate(curves)])
    zero = compute == 0
    r0 = float(reward[zero].mean()) if zero.any() else None
    return Recipe(name, compute[~zero], reward[~zero], seed[~zero], r0)


# --- tables ---


def _unit_of(tables: list[tuple[Path, list[Row]]]) -> Unit:
    """The unit that a table's header names; rollouts when there are only runs."""
    for path, rows in tables:
        found = [u for u in get_args(Unit) if u in rows[0]]
        if not found:
            raise ConfigError(f"{path}: missing a column of compute; name it one of {', '.join(get_args(Unit))}")
        if len(found) > 1:
            raise ConfigError(f"{path}: several columns of compute ({', '.join(found)}); choose one with --unit")
        return found[0]
    return "rollouts"


def _table_curves(path: Path, rows: list[Row], unit: Unit) -> list[_Curve]:
    reward = "pass_at_1" if "reward" not in rows[0] and "pass_at_1" in rows[0] else "reward"
    require_columns(path, rows, (unit, reward))
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for i, row in enumerate(rows):
        seed = integer(path, i, row, "seed") if "seed" in row else 0
        name = str(row.get("recipe") or path.stem)
        points.setdefault((name, seed), []).append((number(path, i, row, unit), number(path, i, row, reward)))
    curves = []
    for (name, seed), pairs in points.items():
        compute, rewards = np.array(pairs).T
        curves.append(_Curve(name, seed, compute, rewards, f"{path} ({name}, seed {seed})"))
    return curves


# --- runs ---


def _run_curves(runs: list[Path], unit: Unit, pass_rate: PassRate) -> list[_Curve]:
    """The curves of runs; a recipe is named after the first of its runs."""
    curves, names = [], {}
    for run in runs:
        records = current_records(read_records(run / "metrics.jsonl"))
        if not records:
            raise ConfigError(f"{run}: no metrics.jsonl with records; `ngu train` prints where its run lives")
        config = _config(run)
        seed = int(config.pop("seed", 0))
        recipe = names.setdefault(msgspec.json.encode(config, order="deterministic"), run.name)
        compute, reward = _evaluations(run, records, unit, pass_rate, config)
        curves.append(_Curve(recipe, seed, compute, reward, str(run)))
    return curves


def _config(run: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((run / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{run}/config.json: cannot be read: {e}") from None


def _evaluations(
    run: Path, records: list[Record], unit: Unit, pass_rate: PassRate, config: dict[str, Any]
) -> tuple[Array, Array]:
    """Compute that made the evaluated policy, and its held-out pass rate; the last evaluation of a step counts.

    The compute is that of the step's own record: an evaluation in flight is written later, when more has been spent.
    """
    steps = {r["step"]: r for r in records if r["kind"] == "step"}
    rates: dict[int, float] = {}
    for record in records:
        if record["kind"] == "eval" and record.get(f"{pass_rate}_pass_at_1") is not None:
            rates[record["step"]] = float(record[f"{pass_rate}_pass_at_1"])
    if not rates:
        raise ConfigError(f"{run}: no evaluation with {pass_rate}_pass_at_1; train with eval.every_steps above 0")
    spent = {0: 0.0} | {step: _spent(record, unit, config) for step, record in steps.items()}
    known = sorted(step for step in rates if step in spent)
    return np.array([spent[step] for step in known]), np.array([rates[step] for step in known])


def _spent(record: Record, unit: Unit, config: dict[str, Any]) -> float:
    match unit:
        case "steps":
            return float(record["step"])
        case "core_hours":
            # Every engine and the learner compute on one thread each; pauses of the run are not in wall_s.
            cores = int(config.get("engines", {}).get("count", 1)) + 1
            return float(record["metrics"]["wall_s"]) / 3600 * cores
        case _:
            return float(record[unit])
