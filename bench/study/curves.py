"""What one run measured: its pass@1 against what training cost, and where its rollouts went."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from bench.study.plan import Job, Outcome
from bench.study.runs import how_it_ended, run_dir
from bench.study.usage import Usage, read_usage
from pipeline import rundir
from pipeline.config import dump_config
from pipeline.errors import ConfigError
from pipeline.metrics import Record, current_records, read_records
from pipeline.report import summarize

Axis = Literal["rollouts", "tokens", "core_s"]
AXES: tuple[Axis, ...] = ("rollouts", "tokens", "core_s")
OUTCOMES: tuple[Outcome, ...] = ("hard", "overall")


class Point(msgspec.Struct, frozen=True):
    """An evaluation, at what training had cost when it ended. None where nothing of that kind was evaluated.

    `core_s`: CPU seconds of all roles since training began, without the share of evaluation: the learner's in full,
    the others' by training's share of the tokens that were generated.
    """

    step: int
    rollouts: int
    tokens: int
    core_s: float
    hard: float | None
    overall: float | None
    levels: dict[str, float]
    num_rollouts: dict[str, int]


class Trace(msgspec.Struct, frozen=True):
    """A run. `run_core_s` and `wall_s` are of the whole run, with its start and its evaluations; `train_s` is training
    with the evaluations beside it. `pass_at_k` and `reward_mean` are those of the last evaluation, over all held-out
    problems; `usage` is None without a ledger; `rollouts_at` are those judged by the end of each optimizer step.
    """

    arm: str
    seed: int
    state: str
    reason: str
    points: list[Point]
    steps: int
    rollouts: int
    tokens: int
    run_core_s: float
    wall_s: float
    train_s: float | None
    lag_mean: float | None
    lag_max: float | None
    ess_mean: float | None
    pass_at_k: dict[str, float]
    reward_mean: float | None
    usage: Usage | None
    rollouts_at: dict[int, int]


def read_trace(job: Job, out: Path) -> Trace:
    """From the files of a run that has ended. One that failed early may have no point at all."""
    run, ended = run_dir(out, job), how_it_ended(out, job)
    assert ended is not None
    records = current_records(read_records(run / "metrics.jsonl"))
    summary = summarize(records, rundir.read_status(run), dump_config(job.config))
    last_eval = next((r for r in reversed(records) if r["kind"] == "eval"), {})
    return Trace(
        arm=job.arm,
        seed=job.seed,
        state=ended.state,
        reason=ended.reason,
        points=_points(records),
        steps=summary["steps"],
        rollouts=max((r["rollouts"] for r in records), default=0),
        tokens=max((r["tokens"] for r in records), default=0),
        run_core_s=ended.core_s,
        wall_s=ended.wall_s,
        train_s=summary["train_s"],
        lag_mean=summary["lag_mean"],
        lag_max=summary["lag_max"],
        ess_mean=summary["ess_mean"],
        pass_at_k=last_eval.get("pass_at_k", {}),
        reward_mean=last_eval.get("best_at_k", {}).get("1"),
        usage=read_usage(run / "ledger.sqlite"),
        rollouts_at={r["step"]: r["rollouts"] for r in records if r["kind"] == "step"},
    )


def _points(records: Sequence[Record]) -> list[Point]:
    points: list[Point] = []
    before: Record = {}
    core_s = 0.0
    for record in (r for r in records if r["kind"] == "eval"):
        if points:
            core_s += training_s(before, record)
        before = record
        points.append(
            Point(
                step=record["step"],
                rollouts=record["rollouts"],
                tokens=record["tokens"],
                core_s=core_s,
                hard=record["hard_pass_at_1"],
                overall=record["mix_pass_at_1"],
                levels=record["pass_at_1"],
                num_rollouts=record["num_rollouts"],
            )
        )
    return points


def training_s(before: Record, record: Record) -> float:
    """CPU seconds of training between the ends of two evaluations."""
    spent = {role: s - before["core_s"].get(role, 0.0) for role, s in record["core_s"].items()}
    tokens = record["tokens"] - before["tokens"]
    eval_tokens = (record["mean_tokens"] or 0.0) * sum(record["num_rollouts"].values())
    if spent.pop("evaluator", None) is not None and record["phase"] == "during":
        eval_tokens = 0.0  # pinned: no engine of training made them
    return spent.pop("learner", 0.0) + tokens / max(tokens + eval_tokens, 1.0) * sum(spent.values())


# --- figures of a curve ---


def curve(trace: Trace, axis: Axis, outcome: Outcome) -> tuple[list[float], list[float]]:
    """Cost and pass@1 of each evaluation. Raises ConfigError when the task has no such pass@1."""
    values: list[Any] = [getattr(p, outcome) for p in trace.points]
    if None in values:
        raise ConfigError(f'the task has no hard levels; set outcome = "overall" in the study (arm {trace.arm})')
    return [float(getattr(p, axis)) for p in trace.points], values


def area(costs: Sequence[float], values: Sequence[float], budget: float) -> float:
    """The mean of a curve over the costs 0 to `budget`, by trapezoids; after its last point it stays where it was."""
    grid = np.union1d([c for c in costs if c < budget], [0.0, budget])
    return float(np.trapezoid(np.interp(grid, costs, values), grid) / budget)


def crossing(costs: Sequence[float], values: Sequence[float], threshold: float) -> float:
    """The cost at which the curve first reaches `threshold`, between two points on the straight line; inf if never.

    Evaluation noise makes it early rather than late, alike for every arm.
    """
    for i, value in enumerate(values):
        if value >= threshold:
            if i == 0:
                return float(costs[0])
            frac = (threshold - values[i - 1]) / (value - values[i - 1])
            return float(costs[i - 1] + frac * (costs[i] - costs[i - 1]))
    return math.inf
