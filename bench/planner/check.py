"""Finished runs against the plan of their own job: what was measured over what was planned, and a verdict."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from rich.table import Table

from bench.lag_model import compare
from bench.planner.hardware import Rates
from bench.planner.lengths import Lengths
from bench.planner.placements import Split, period_of
from bench.planner.shape import ModelSize
from bench.planner.tables import render
from bench.planner.work import Job
from bench.suite.base import Outcome, Row, figure
from bench.suite.tables import row_table
from pipeline.errors import ConfigError
from pipeline.metrics import current_records, read_records
from pipeline.rundir import read_config

# Sizes of a model decide work and memory alone, which are not compared.
_ANY_MODEL = ModelSize("any", 1.0, 1.0, 1, 1, 1)


# What a plan is for: how long a step takes and how old the trained tokens are, in the mean.
_JUDGED = ("period_s", "token lag", "launch lag")
_AGREES_PERCENT = 15.0


class Figure(msgspec.Struct, frozen=True):
    name: str
    measured: float
    planned: float


class Comparison(msgspec.Struct, frozen=True):
    run: str
    steps: int
    figures: list[Figure]


class Verdict(msgspec.Struct, frozen=True):
    """The median over runs of 100 |measured / planned - 1|, and whether it is as near as a plan should be."""

    row: Row
    outcome: Outcome | None


def check_run(run_dir: Path, rates: Rates, skip: int) -> Comparison:
    """Lengths, round sizes and the share that is trained are those of the run; times are those of `rates`.

    Raises ConfigError for a run that is too short, or whose engines also evaluate.
    """
    config = read_config(run_dir)
    if config.eval.every_steps and not config.eval.pinned:
        raise ConfigError(f"{run_dir}: its engines also evaluate during training; run it with eval.every_steps=0")
    steps = [r for r in current_records(read_records(run_dir / "metrics.jsonl")) if r["kind"] == "step"]
    steps = [r for r in steps if r["step"] > skip]
    if len(steps) < 4:
        raise ConfigError(f"{run_dir}: {len(steps)} steps after the first {skip}; at least 4 are needed")
    first, last = steps[0], steps[-1]
    num_steps = last["step"] - first["step"]
    period_s = (last["metrics"]["wall_s"] - first["metrics"]["wall_s"]) / num_steps
    tokens = (last["tokens"] - first["tokens"]) / num_steps
    lengths, group = _of_ledger(run_dir, first["step"])
    job = Job(
        model=_ANY_MODEL,
        lengths=lengths,
        algorithm="ngu",
        prompt_tokens=0.0,
        batch=round((last["rollouts"] - first["rollouts"]) / num_steps),
        group=group,
        trained_share=fmean(r["metrics"]["num_tokens"] for r in steps[1:]) / tokens,
    )
    engines, learners = config.engines, config.learner.num_processes
    split = Split(engines.count, engines.tp, engines.slots, learners, config.staleness.max_lag)
    plan = period_of("in_flight" if split.max_lag else "synchronous", job, split, rates)
    lag, _ = compare(run_dir, skip)
    figures = [
        Figure("period_s", period_s, plan.period_s),
        Figure("token lag", lag.token, plan.lag.token),
        Figure("launch lag", lag.launch, plan.lag.launch),
        Figure("largest lag", lag.largest, plan.lag.largest),
    ]
    return Comparison(str(run_dir), len(steps), figures)


def _of_ledger(run_dir: Path, step: int) -> tuple[Lengths, int]:
    """Lengths of judged attempts, and the mean size of a round."""
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT num_tokens FROM attempts WHERE num_tokens > 0 AND step >= ?", (step,)).fetchall()
        sizes = db.execute("SELECT count(*) FROM attempts GROUP BY chain_id, round").fetchall()
    return Lengths(np.array([n for (n,) in rows]), is_measured=True), max(1, round(fmean(n for (n,) in sizes)))


def judge(found: Sequence[Comparison]) -> list[Verdict]:
    """Period and mean lags over all runs. Left out is what nothing was planned of: the lag of synchronous runs.

    The largest lag is not judged: it is one event of a run, and a whole number.
    """
    rows = []
    for name in _JUDGED:
        ratios = [f.measured / f.planned for one in found for f in one.figures if f.name == name and f.planned]
        off = [100 * abs(r - 1) for r in ratios]
        rows += [figure(f"plan off by, {name.removesuffix('_s')}", "%", off, at_most=_AGREES_PERCENT)] if off else []
    return [Verdict(row, row.outcome) for row in rows]


def check_table(found: Sequence[Comparison], verdicts: Sequence[Verdict]) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    for name in ("figure", "measured", "planned", "measured / planned"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for one in found:
        for i, f in enumerate(one.figures):
            name = Path(one.run).name if i == 0 else ""
            ratio = f"{f.measured / f.planned:.3f}" if f.planned else ""
            table.add_row(name, f.name, f"{f.measured:.3g}", f"{f.planned:.3g}", ratio)
    return render(table, "", row_table(verdict.row for verdict in verdicts))
