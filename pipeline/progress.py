"""Where a run stands, put together from its files: what every view of it shows."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import rundir
from pipeline.metrics import Record, RecordTail

# Steps whose pace gives the time left: long enough to smooth one slow step, short enough to follow a changing pace.
PACE_STEPS = 10


class Progress:
    """The last status and the history of a run; `refresh` reads what is new.

    `status` may lack any key while the run starts. Only files are read, so it works from any terminal.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.status: dict[str, Any] = {}
        self.evals: list[Record] = []
        self.steps: list[Record] = []
        self._tail = RecordTail(run_dir / "metrics.jsonl")

    def refresh(self) -> list[Record]:
        """Returns the new records."""
        self.status = rundir.read_status(self.run_dir)
        new = self._tail.read()
        self.evals += [r for r in new if r["kind"] == "eval"]
        self.steps = (self.steps + [r for r in new if r["kind"] == "step"])[-(PACE_STEPS + 1) :]
        return new

    @property
    def state(self) -> str:
        return self.status.get("state", "starting")

    @property
    def elapsed_s(self) -> float:
        started = self.status.get("started")
        if started is None:
            return 0.0
        end = self.status.get("time", started) if self.state in rundir.END_STATES else time.time()
        return max(0.0, end - started)

    @property
    def done_frac(self) -> float:
        """Between 0 and 1, by whichever limit (steps or rollouts) will end the run first."""
        if self.state == "finished":
            return 1.0
        return max(_frac(self.status, "step", "max_steps"), _frac(self.status, "rollouts", "max_rollouts"))

    @property
    def time_left_s(self) -> float | None:
        """At the pace of the last steps; None before there is one. Leaves out the closing evaluation."""
        if len(self.steps) < 2 or self.state not in ("training", "evaluating"):
            return None
        first, last = self.steps[0], self.steps[-1]
        if last["step"] <= first["step"]:
            return None
        pace_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
        per_step = (last["rollouts"] - first["rollouts"]) / (last["step"] - first["step"])
        steps_left = _left(self.status, "step", "max_steps")
        if per_step > 0:
            steps_left = min(steps_left, _left(self.status, "rollouts", "max_rollouts") / per_step)
        return None if math.isinf(steps_left) else max(0.0, steps_left * pace_s)

    def evaluated(self, name: str) -> list[float]:
        """The history of an evaluation's number, such as `hard_pass_at_1`."""
        return [r[name] for r in self.evals if r.get(name) is not None]


def duration(seconds: float | None) -> str:
    """`1:02:03` or `2:03`; a dash for an unknown one."""
    if seconds is None:
        return "-"
    minutes, s = divmod(int(seconds + 0.5), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` after the point, or a large value with k, M or G; a dash for an unknown one."""
    if value is None or not math.isfinite(value):
        return "-"
    for start, unit, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= start:
            return f"{value / unit:.1f}{name}"
    return f"{value:.{digits}f}"


def of(value: int, limit: int | None) -> str:
    """`3/10`, or `3` where there is no limit."""
    return f"{value}/{limit}" if limit else f"{value}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values of a rate between 0 and 1 as block characters."""
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[min(int(max(v, 0.0) * len(blocks)), len(blocks) - 1)] for v in values[-width:])


def _frac(status: dict[str, Any], name: str, limit: str) -> float:
    return min(1.0, (status.get(name) or 0) / status[limit]) if status.get(limit) else 0.0


def _left(status: dict[str, Any], name: str, limit: str) -> float:
    return max(0, status[limit] - (status.get(name) or 0)) if status.get(limit) else math.inf
