"""What ends a long run unnoticed: processes that hang (the supervisor looks) and a full disk (the coordinator does)."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pipeline import rundir
from pipeline.errors import NguError

PERIOD_S = 1.0
# A checkpoint of the built-in model is a few MB; larger ones are refused by the learner's own write, with its reason.
MIN_FREE_BYTES = 512 << 20


class HangWatch:
    """Finds hung processes by what the coordinator's loop reports in status.json, and itself by the file's age.

    A process is judged from its first word on, so a slow start is not a hang.
    """

    def __init__(self, run_dir: Path, hang_s: float, clock: Callable[[], float] = time.monotonic):
        self._run_dir, self._hang_s, self._clock = run_dir, hang_s, clock
        self._due = 0.0
        self._stamp = self._read_stamp()  # left by an earlier life
        self._changed: float | None = None

    def hung(self) -> dict[int, str]:
        """Process id and what it does not do, for every hung process; looks at most once a second."""
        now = self._clock()
        if now < self._due:
            return {}
        self._due = now + PERIOD_S
        if (stamp := self._read_stamp()) != self._stamp:
            self._stamp, self._changed = stamp, now
        if self._changed is None:
            return {}
        try:
            status = rundir.read_status(self._run_dir)
        except NguError:
            return {}
        age = now - self._changed
        if age > self._hang_s:
            return {status["pid"]: f"has not written status.json for {age:.0f} s"}
        silent = ((peer["pid"], peer["silent_s"]) for peer in status.get("peers", {}).values())
        return {pid: f"has said nothing for {s:.0f} s" for pid, s in silent if s > self._hang_s}

    def _read_stamp(self) -> int | None:
        try:
            return (self._run_dir / "status.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None


class DiskGuard:
    """Says when the run must pause because its disk is nearly full, and when it may go on."""

    def __init__(self, run_dir: Path, free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free):
        self._run_dir, self._free_bytes = run_dir, free_bytes
        self._due = 0.0
        self.is_full = False

    def changed(self) -> bool:
        """Whether `is_full` is another than at the last look; looks at most once a second.

        It stays full until twice the bound is free, or a run at the bound would pause and go on all the time.
        """
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + PERIOD_S
        before = self.is_full
        self.is_full = self._free_bytes(self._run_dir) < (2 if before else 1) * MIN_FREE_BYTES
        return self.is_full != before
