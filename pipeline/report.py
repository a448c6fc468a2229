"""What a run came to: `summary.json` and four plots, computed from the run's files alone.

`python -m pipeline.report RUN` writes them again at any time, also while the run is going on.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from pipeline import rundir, tracing
from pipeline.config import dump_config
from pipeline.errors import NguError
from pipeline.metrics import Record, current_records, read_records

PLOTS = ("reward.png", "pass_at_1_by_level.png", "lag.png", "rollouts_by_level.png")


def write_report(run_dir: Path) -> dict[str, Any]:
    """Write `summary.json`, the plots and, of a profiled run, `trace.json` into the run directory."""
    from pipeline import plots

    tracing.merge(run_dir)

    records = current_records(read_records(run_dir / "metrics.jsonl"))
    summary = summarize(records, rundir.read_status(run_dir), dump_config(rundir.read_config(run_dir)))
    rundir.write_atomic(run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    steps = [r for r in records if r["kind"] == "step"]
    figures = (
        plots.reward(steps),
        plots.pass_at_1([r for r in records if r["kind"] == "eval"]),
        plots.lag(steps),
        plots.rollouts_by_level(summary["rollouts_by_level"]),
    )
    for name, figure in zip(PLOTS, figures, strict=True):
        rundir.write_atomic(run_dir / name, plots.to_png(figure))
    return summary


def current_summary(run_dir: Path) -> dict[str, Any]:
    """The summary as of now: read if the last report is newer than the run's files, else computed."""
    summary = run_dir / "summary.json"
    sources = [p for p in (run_dir / "status.json", run_dir / "metrics.jsonl") if p.exists()]
    if summary.exists() and all(summary.stat().st_mtime_ns >= p.stat().st_mtime_ns for p in sources):
        return rundir.read_json(summary)
    return write_report(run_dir)


def summarize(records: list[Record], status: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run; None where the run has not got that far.

    `lag_mean` and `ess_mean` average over steps, `lag_max` is the largest of any step. The final values are those of
    the evaluation after training, or of the latest one if the run ended before it; `evaluated_at_step` tells which.
    `wall_s` is from the first start to the last sign of life, pauses included; `train_s` is the training alone.
    """
    steps = [r for r in records if r["kind"] == "step"]
    before, after = _evaluations(records)
    levels = [r for r in records if r["kind"] == "levels"]
    last = steps[-1] if steps else {}
    return {
        "state": status.get("state"),
        "reason": status.get("reason", ""),
        "task": config["task"]["kind"],
        "sampler": config["sampler"]["kind"],
        "seed": config["seed"],
        "steps": last.get("step", 0),
        "rollouts": last.get("rollouts", 0),
        "tokens": last.get("tokens", 0),
        "wall_s": _wall_s(records, status),
        "train_s": max(_series(steps, "wall_s"), default=None),
        "hard_pass_at_1_before": before.get("hard_pass_at_1"),
        "hard_pass_at_1": after.get("hard_pass_at_1"),
        "mix_pass_at_1_before": before.get("mix_pass_at_1"),
        "mix_pass_at_1": after.get("mix_pass_at_1"),
        "evaluated_at_step": after.get("step"),
        "lag_mean": _mean(_series(steps, "lag_mean")),
        "lag_max": max(_series(steps, "lag_max"), default=None),
        "ess_mean": _mean(_series(steps, "ess")),
        "attempts": status.get("attempts", {}),
        "pass_at_1_before": before.get("pass_at_1", {}),
        "pass_at_1": after.get("pass_at_1", {}),
        "eval_rollouts": after.get("num_rollouts", {}),
        "rollouts_by_level": levels[-1]["rollouts_by_level"] if levels else {},
        "left_out_as_stale": levels[-1].get("left_out", {}) if levels else {},
    }


def _evaluations(records: Iterable[Record]) -> tuple[Record, Record]:
    """The evaluation before training and the one that counts as final; empty if there is none."""
    evals = [r for r in records if r["kind"] == "eval"]
    before = next((r for r in evals if r["phase"] == "before"), {})
    later = [r for r in evals if r["phase"] != "before"]
    closing = [r for r in later if r["phase"] == "after"]
    return before, (closing or later or [{}])[-1]


def _wall_s(records: list[Record], status: dict[str, Any]) -> float | None:
    if "started" in status and "time" in status:
        return round(status["time"] - status["started"], 3)
    times = [r["time"] for r in records if "time" in r]
    return round(times[-1] - times[0], 3) if times else None


def _series(steps: Iterable[Record], name: str) -> list[float]:
    return [r["metrics"][name] for r in steps if r["metrics"].get(name) is not None]


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m pipeline.report RUN", file=sys.stderr)
        return 2
    try:
        run_dir = rundir.find(sys.argv[1])
        write_report(run_dir)
    except NguError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return e.exit_status
    print(f"wrote {run_dir}/summary.json, {', '.join(PLOTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
