"""This system on the built-in job: `ngu train` in a process of its own."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.suite.e2e.runs import Mark, Trained, put_aside, run_to_end
from pipeline.metrics import Record, current_records, read_records

TAIL_STEPS = 2


def train(directory: Path, seed: int, settings: Sequence[str], every_steps: int) -> Trained:
    """Run to its end in `directory`, which is emptied first. Raises NguError when the run fails."""
    shutil.rmtree(directory, ignore_errors=True)
    models = directory / "models"
    models.mkdir(parents=True)
    run_dir = directory / "run"
    # Evaluation during training is off; what is held out stays, for the problems to train on are drawn around it.
    fixed = ["eval.every_steps=0", "eval.final_num_rollouts=1", f"daemon.checkpoint_every_steps={every_steps}"]
    argv = [sys.executable, "-m", "pipeline.cli", "train", *fixed, *settings]
    argv += ["--seed", str(seed), "--run-dir", str(run_dir), "--no-tui"]
    wall_s = run_to_end(argv, directory, lambda: _collect(run_dir, models))
    _collect(run_dir, models)
    return _read(run_dir, models, wall_s)


def _collect(run_dir: Path, models: Path) -> None:
    for checkpoint in (run_dir / "checkpoints").glob("step_*"):
        number = re.fullmatch(r"step_(\d+)", checkpoint.name)
        if number and not (to := models / str(int(number[1]))).exists():
            put_aside(checkpoint / "model", to)


def _read(run_dir: Path, models: Path, wall_s: float) -> Trained:
    records = current_records(read_records(run_dir / "metrics.jsonl"))
    steps = [r for r in records if r["kind"] == "step"]
    before = next(r for r in records if r["kind"] == "eval")
    spent = sum(before["core_s"].values())
    marks = [Mark(0, 0.0, 0, 0, 0.0)]
    for record in steps:
        core_s = sum(record["core_s"].values()) - spent
        marks.append(Mark(record["step"], record["metrics"]["wall_s"], record["rollouts"], record["tokens"], core_s))
    train_s = marks[-1].seconds
    kept = {int(path.name): path for path in models.iterdir() if path.name.isdecimal()}
    known = {step: path for step, path in kept.items() if step <= marks[-1].step}
    return Trained(marks, known, wall_s - train_s, _engine_idle(steps), _learner_idle(steps))


def _learner_idle(steps: Sequence[Record]) -> float:
    """The share of time in which the learner neither trains nor publishes, from its first batch on: before that it
    waits for engines to start, once a run.
    """
    busy_s = [r["metrics"]["step_s"] + r["metrics"]["publish_s"] for r in steps]
    begins_s = steps[0]["metrics"]["wall_s"] - busy_s[0]
    return 1 - sum(busy_s) / (steps[-1]["metrics"]["wall_s"] - begins_s)


def _engine_idle(steps: Sequence[Record]) -> float:
    """The share of time without a request in an engine, over engines, while rollouts are launched: the last steps train
    what is left of them.

    An engine's figure is that of its last heartbeat, up to a second before the step; the slope over all steps evens
    that out.
    """
    steps = steps[: max(2, len(steps) - TAIL_STEPS)]
    names = [name for name in steps[-1]["metrics"] if re.fullmatch(r"(engine-|remote)\d+/busy_s", name)]
    wall = [r["metrics"]["wall_s"] for r in steps]
    shares = [np.polyfit(wall, [r["metrics"][name] for r in steps], 1)[0] for name in names]
    return float(1 - np.mean(shares))
