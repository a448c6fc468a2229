"""The runs of a study, one at a time: each is `ngu train` in a process and a run directory of its own.

OUT/runs/ARM/seed_N/       the run directory
OUT/runs/ARM/seed_N.toml   its config
OUT/runs/ARM/seed_N.log    what it printed
OUT/runs/ARM/seed_N.json   how it ended; written last, so a run without it is run again from the start
"""

import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bench.study.plan import Job
from pipeline import rundir
from pipeline.errors import ConfigError, NguError
from pipeline.init_config import render_config
from pipeline.metrics import read_records
from pipeline.progress import duration, number

TRAIN = [sys.executable, "-m", "pipeline.cli", "train"]
STOP_TIMEOUT_S = 120.0


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run ended. `core_s`: CPU seconds of all its processes, from start to end."""

    key: str
    state: Literal["finished", "failed"]
    reason: str
    wall_s: float
    core_s: float


def run_dir(out: Path, job: Job) -> Path:
    return out / "runs" / job.arm / f"seed_{job.seed}"


def how_it_ended(out: Path, job: Job) -> Ended | None:
    """None for a run that has not come to its end, or did so with other settings."""
    try:
        ended = msgspec.json.decode(run_dir(out, job).with_suffix(".json").read_bytes(), type=Ended)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return ended if ended.key == job.key else None


def run_all(jobs: Sequence[Job], out: Path, say: Callable[[str], None]) -> None:
    """Run what has not ended yet. A run that fails is a result like any other; it is not run again.

    Raises ConfigError when a run refuses its config, NguError when somebody stops a run.
    """
    todo = [job for job in jobs if how_it_ended(out, job) is None]
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there already")
    started = time.monotonic()
    for i, job in enumerate(todo, start=1):
        ended = _run(job, out)
        left_s = (time.monotonic() - started) / i * (len(todo) - i)
        say(f"[{len(jobs) - len(todo) + i}/{len(jobs)}] {job.arm} seed {job.seed}: {_line(out, job, ended)}; "
            f"{duration(left_s)} left")  # fmt: skip


def _run(job: Job, out: Path) -> Ended:
    directory = run_dir(out, job)
    if directory.exists():
        if rundir.is_running(directory):
            raise ConfigError(f"{directory} is still running; wait for it, or `ngu stop {directory}`")
        shutil.rmtree(directory)  # interrupted, or run with other settings
    config, log = directory.with_suffix(".toml"), directory.with_suffix(".log")
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.with_suffix(".json").unlink(missing_ok=True)
    rundir.write_atomic(config, render_config(job.config).encode())
    argv = [*TRAIN, str(config), "--run-dir", str(directory), "--no-tui"]
    started, cpu_s = time.monotonic(), _children_s()
    with log.open("wb") as file:
        # A process group of its own: Ctrl-C reaches the study alone, which ends the run in order.
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0)
    try:
        exit_status = process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise
    state, reason = _outcome(directory, exit_status, log)
    ended = Ended(job.key, state, reason, time.monotonic() - started, _children_s() - cpu_s)
    rundir.write_atomic(directory.with_suffix(".json"), msgspec.json.encode(ended))
    return ended


def _outcome(directory: Path, exit_status: int, log: Path) -> tuple[Literal["finished", "failed"], str]:
    status = rundir.read_status(directory) if directory.is_dir() else {}
    state = status.get("state")
    if state == "finished":
        return "finished", ""
    lines = log.read_text(errors="replace").strip().splitlines() or [f"nothing in {log}"]
    if not status and exit_status == 2:
        raise ConfigError(lines[-1].removeprefix("ngu: error: "))
    if state == "stopped":
        raise NguError(f"{directory} was stopped; the same command goes on with the study, and runs it again")
    return "failed", status.get("reason") or lines[-1]


def _end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _children_s() -> float:
    """CPU seconds of every process that ended below this one and was waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _line(out: Path, job: Job, ended: Ended) -> str:
    if ended.state == "failed":
        return f"failed: {ended.reason}"
    evals = [r for r in read_records(run_dir(out, job) / "metrics.jsonl") if r["kind"] == "eval"]
    last = evals[-1] if evals else {}
    return (
        f"hard pass@1 {number(last.get('hard_pass_at_1'))}, overall {number(last.get('mix_pass_at_1'))}, "
        f"{duration(ended.wall_s)}"
    )
