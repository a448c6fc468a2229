"""One training run of any side, and what is measured of it; the same for all, so that figures can be compared.

While a run trains, its weights are put aside every few steps; afterwards they are all judged alike, by the same engine
on the same problems. So no side pays for evaluation while its clock runs, and no side judges itself.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pipeline.errors import NguError

POLL_S = 0.1


class Mark(msgspec.Struct, frozen=True):
    """What training had cost after a step: seconds since it began, rollouts, tokens, and processor seconds."""

    step: int
    seconds: float
    rollouts: int
    tokens: int
    core_s: float


class Trained(msgspec.Struct, frozen=True):
    """A run that has ended. `models` are the weights put aside, by step.

    `startup_s`: everything before and after training. Idle shares are of the time of training.
    """

    marks: list[Mark]
    models: dict[int, Path]
    startup_s: float
    engine_idle: float
    learner_idle: float


class Run(msgspec.Struct, frozen=True):
    """A run with its pass@1 on held-out problems: `hard` by step, `final_hard` and `final_overall` at the end from
    more rollouts.
    """

    key: str
    arm: str
    seed: int
    marks: list[Mark]
    hard: dict[int, float]
    final_hard: float
    final_overall: float
    startup_s: float
    engine_idle: float
    learner_idle: float

    @property
    def end(self) -> Mark:
        return self.marks[-1]

    def cost_at(self, step: int) -> Mark:
        return next(mark for mark in self.marks if mark.step == step)


def put_aside(model: Path, to: Path) -> bool:
    """Keep a model directory that its run may remove at any time; False when it was just being removed."""
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(model, partial, copy_function=os.link)
    except (FileNotFoundError, shutil.Error):
        return False
    partial.rename(to)
    return True


def run_to_end(
    argv: Sequence[str],
    directory: Path,
    while_it_runs: Callable[[], None] = lambda: None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> float:
    """Seconds that a command took; its output goes to DIRECTORY/log. Raises NguError with its last line if it fails."""
    started = time.monotonic()
    log = directory / "log"
    with log.open("wb") as file:
        # A process group of its own: Ctrl-C reaches the benchmark alone, which ends the run in order. A launcher that
        # is killed instead leaves its workers behind.
        process = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )
    try:
        while process.poll() is None:
            while_it_runs()
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise NguError(f"{log}: status {process.returncode}, and at its end: {last}")
    return time.monotonic() - started
