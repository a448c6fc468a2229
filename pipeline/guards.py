"""What ends a long run unnoticed: processes that hang or die again and again (the supervisor looks), and what the
machine runs out of (the coordinator does, between two turns of its loop).
"""

import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from pipeline import checkpoints, rundir

PERIOD_S = 1.0
MIN_FREE_BYTES = 512 << 20  # beside what one more checkpoint takes
MEMORY_PERIOD_S = 5.0
OVERDUE_PERIOD_S = 10.0
NEAR_FRAC = 0.9  # of the bound on memory: a warning from here on, and what a run that was over it must fall below
MIN_JUMP_S = 5.0
# A look that comes so much later than it was due: this process was stopped, perhaps with all others of the job, and it
# may be the first to go on.
MAX_LATE_S = 5.0
MAX_READING_S = 1.0  # between two clocks: longer, and the process was stopped there
RESTART_WINDOW_S = 3600.0
MAX_RESTART_WAIT_S = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class HangWatch:
    """Finds hung processes by what the coordinator's loop reports in status.json, and itself by the file's age.

    A process is judged from its first word on, so a slow start is not a hang; and by no time in which this one did not
    run itself.
    """

    def __init__(self, run_dir: Path, hang_s: float, clock: Callable[[], float] = time.monotonic):
        self._run_dir, self._hang_s, self._clock = run_dir, hang_s, clock
        self._due, self._awake = clock(), -math.inf  # since when this process has not been stopped
        self._stamp = self._read_stamp()  # left by an earlier life
        self._changed: float | None = None

    def hung(self) -> dict[int, str]:
        """Process id and what it does not do, for every hung process; looks at most once a second."""
        now = self._clock()
        if now < self._due:
            return {}
        if now - self._due > MAX_LATE_S:
            self._awake = now
        self._due = now + PERIOD_S
        if (stamp := self._read_stamp()) != self._stamp:
            self._stamp, self._changed = stamp, now
        if self._changed is None:
            return {}
        if not (status := rundir.read_status(self._run_dir)):
            return {}
        age, awake_s = now - self._changed, now - self._awake
        if min(age, awake_s) > self._hang_s:
            return {status["pid"]: f"has not written status.json for {age:.0f} s"}
        silent = ((peer["pid"], peer["silent_s"] or 0.0) for peer in status.get("peers", {}).values())
        # A process on another machine has no id here; the gateway gives up on it.
        hung = {pid: s for pid, s in silent if pid and min(s, awake_s) > self._hang_s}
        return {pid: f"has said nothing for {s:.0f} s" for pid, s in hung.items()}

    def _read_stamp(self) -> int | None:
        try:
            return (self._run_dir / "status.json").stat().st_mtime_ns
        except FileNotFoundError:
            return None


class RestartBudget:
    """At most `limit` restarts in any hour, each after twice the wait of the one before in that hour, from `wait_s` on.

    A run of weeks outlives one death a day, and one that dies at every start ends soon.
    """

    def __init__(self, limit: int, wait_s: float, clock: Callable[[], float] = time.monotonic):
        self._limit, self._wait_s, self._clock = limit, wait_s, clock
        self._taken: deque[float] = deque()

    @property
    def is_spent(self) -> bool:
        while self._taken and self._clock() - self._taken[0] > RESTART_WINDOW_S:
            self._taken.popleft()
        return len(self._taken) >= self._limit

    def take(self) -> float:
        """Count a restart; the seconds to wait before it, which is until the hour is over if the budget is spent."""
        if self.is_spent:
            assert self._limit, "there is no hour after which it may start again"
            wait_s = self._taken[-self._limit] + RESTART_WINDOW_S - self._clock()
        else:
            wait_s = min(self._wait_s * 2.0 ** len(self._taken), MAX_RESTART_WAIT_S)
        self._taken.append(self._clock())
        return wait_s


class DiskGuard:
    """Says when the run must pause because its disk is nearly full, and when it may go on."""

    def __init__(self, run_dir: Path, free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free):
        self._run_dir, self._free_bytes = run_dir, free_bytes
        self._due = 0.0
        self.is_full = False
        self.free_bytes = 0
        self.checkpoint_bytes = 0  # of the newest one

    def changed(self) -> bool:
        """Whether `is_full` is another than at the last look; looks at most once a second.

        It stays full until `MIN_FREE_BYTES` more are free, or a run at the bound would pause and go on all the time.
        """
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + PERIOD_S
        before, self.free_bytes = self.is_full, self._free_bytes(self._run_dir)
        self.checkpoint_bytes = checkpoints.newest_bytes(self._run_dir)
        self.is_full = self.free_bytes < self.checkpoint_bytes + (2 if before else 1) * MIN_FREE_BYTES
        return self.is_full != before


class MemoryGuard:
    """Holds the memory of a run's processes against a bound (0: measures only)."""

    def __init__(self, bound_bytes: float, resident_bytes: Callable[[], int]):
        self._bound_bytes, self._resident_bytes = bound_bytes, resident_bytes
        self._due = 0.0
        self.level: Literal["ok", "near", "over"] = "ok"
        self.resident_bytes = 0

    def changed(self) -> bool:
        """Whether `level` is another than at the last look; looks at most every `MEMORY_PERIOD_S`."""
        if time.monotonic() < self._due:
            return False
        self._due = time.monotonic() + MEMORY_PERIOD_S
        before, self.resident_bytes = self.level, self._resident_bytes()
        if not self._bound_bytes or self.resident_bytes < NEAR_FRAC * self._bound_bytes:
            self.level = "ok"
        else:
            self.level = "over" if before == "over" or self.resident_bytes >= self._bound_bytes else "near"
        return self.level != before


class OverdueGuard:
    """Knows since when each attempt has been with an engine, from looks `OVERDUE_PERIOD_S` apart.

    A request that its server has lost, or a worker that takes work and gives none back, would keep a run from its end.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._due = clock, 0.0
        self._since: dict[int, float] = {}

    def overdue(self, held: Callable[[], Iterable[int]], bound_s: float) -> list[int]:
        """Of the attempts `held` now those that have been for more than `bound_s`."""
        now = self._clock()
        if now < self._due:
            return []
        self._due = now + OVERDUE_PERIOD_S
        self._since = {attempt_id: self._since.get(attempt_id, now) for attempt_id in held()}
        return [attempt_id for attempt_id, since in self._since.items() if now - since > bound_s]


class ClockGuard:
    """Notices that somebody set the wall clock, or that the machine slept."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic):
        self._wall, self._monotonic = wall, monotonic
        self._offset_s = wall() - monotonic()

    def jump_s(self) -> float:
        """By how much the wall clock jumped since the last look; 0 unless by more than `MIN_JUMP_S`."""
        before, wall, after = self._monotonic(), self._wall(), self._monotonic()
        if after - before > MAX_READING_S:
            return 0.0
        jump, self._offset_s = wall - after - self._offset_s, wall - after
        return jump if abs(jump) > MIN_JUMP_S else 0.0


def is_process(pid: int) -> bool:
    """Whether a process of this machine lives, or has yet to be waited for; 0, one of another machine, always does."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # a peer may claim any number
        return False
    except PermissionError:
        pass
    return True


def tree_bytes(root: int) -> int:
    """Anonymous resident memory of a process and all its descendants.

    Weights in shared memory do not count: every process that maps them would count them again, and they are bounded.
    """
    return sum(map(anonymous_bytes, _tree(root)))


def anonymous_bytes(pid: int) -> int:
    """Of one process, without what it shares with others; 0 when it has just ended."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def _tree(root: int) -> Iterator[int]:
    yield root
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except OSError:
            continue
        for pid in pids:
            yield from _tree(int(pid))
