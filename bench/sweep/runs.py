"""The runs of a sweep over the cores, and the table of what they measured."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.files import read_results, run_rest
from bench.scaling.sweep import TABLE
from bench.stability.course import Course
from bench.stability.grid import run_courses
from bench.sweep.plan import COLUMNS, Plan, SweepArm
from pipeline.errors import ConfigError
from pipeline.rundir import write_atomic

RESULTS = "runs.jsonl"


class Ran(msgspec.Struct, frozen=True):
    """A line of the result file."""

    key: str
    b_problem: int
    n: int
    seed: int
    course: Course


def run_sweep(plan: Plan, out: Path, processes: int, on_done: Callable[[Ran, int], object]) -> list[Ran]:
    """Run what `out` does not hold yet; its table is written anew after every run, so that a part can be fitted.

    `on_done` is told each new result and how many runs are left. Raises ConfigError, and NguError when a process is
    killed.
    """
    keys = {arm.key for arm in plan.arms}

    def courses(todo: Sequence[SweepArm]) -> Iterator[Ran]:
        for arm, course in run_courses(todo, processes):
            yield Ran(arm.key, arm.b_problem, arm.n, arm.config.seed, course)

    def keep(ran: Ran, num_left: int) -> None:
        here.append(ran)
        write_table(plan, here, out)
        on_done(ran, num_left)

    here = [ran for ran in find_runs(out) if ran.key in keys]
    ran = run_rest(plan.arms, out / RESULTS, Ran, courses, keep)
    write_table(plan, ran, out)
    return ran


def find_runs(out: Path) -> list[Ran]:
    """What `out` holds, of this sweep and of others; raises ConfigError."""
    return read_results(out / RESULTS, Ran, repair=False)


def write_table(plan: Plan, runs: Sequence[Ran], out: Path) -> None:
    """One row an evaluation, in the columns that `ngu fit isocompute` reads; raises ConfigError."""
    text = io.StringIO()
    extra = [f"{name}{end}" for name in plan.weights if name != "reward" for end in ("", "_best_at_k", "_worst_at_k")]
    writer = csv.DictWriter(text, [*COLUMNS, *extra], lineterminator="\n")
    writer.writeheader()
    for ran in sorted(runs, key=lambda r: (r.b_problem, r.n, r.seed)):
        writer.writerows(_rows(plan, ran))
    try:
        write_atomic(out / TABLE, text.getvalue().encode())
    except OSError as e:
        raise ConfigError(f"{out / TABLE}: cannot be written: {e.strerror}; choose another --out") from None


def _rows(plan: Plan, ran: Ran) -> Iterator[dict[str, Any]]:
    for found in ran.course.evaluations:
        row: dict[str, Any] = {"run_id": f"b{ran.b_problem}-n{ran.n}-s{ran.seed}", "seed": ran.seed}
        row |= {"b_problem": ran.b_problem, "n": ran.n, "step": found.batches, "ending": ran.course.ending}
        row["compute"] = found.batches * ran.b_problem * ran.n
        for target, weights in plan.weights.items():
            prefix = "" if target == "reward" else f"{target}_"
            row[target] = _mean(found.by_level, weights)
            row[f"{prefix}best_at_k"] = _mean(found.best_by_level, weights)
            row[f"{prefix}worst_at_k"] = _mean(found.worst_by_level, weights)
        yield row


def _mean(rates: dict[str, float], weights: dict[str, float]) -> float:
    """Over the levels that were evaluated."""
    total = sum(weights.get(level, 0.0) for level in rates)
    return round(sum(rate * weights.get(level, 0.0) for level, rate in rates.items()) / total, 6) if total else math.nan
