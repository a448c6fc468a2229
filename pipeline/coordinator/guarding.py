"""What the coordinator does when the machine runs out of something; it looks between two turns of its loop."""

import time
from typing import Literal

from pipeline.coordinator.loop import Coordinator, Mode
from pipeline.guards import PERIOD_S, ClockGuard, DiskGuard, MemoryGuard, OverdueGuard
from pipeline.messages import Cancel
from pipeline.room import MAX_SEQ_MULTIPLIER

Reason = Literal["disk", "memory"]
# An attempt may take so many times as long as one of all tokens at the slowest pace of late.
OVERDUE_TIMES = 10.0


class Guards:
    def __init__(self, coordinator: Coordinator, disk: DiskGuard, memory: MemoryGuard, clock: ClockGuard):
        self._coordinator = coordinator
        self._disk, self._memory, self._clock = disk, memory, clock
        self._paused_for: set[Reason] = set()
        self._mode_before: Mode = "run"
        self._overdue = OverdueGuard(coordinator.clock)
        self._dead_due = 0.0

    def look(self) -> None:
        if self._disk.changed():
            self._on_disk()
        if self._memory.changed():
            self._on_memory()
        if time.monotonic() >= self._dead_due:
            self._dead_due = time.monotonic() + PERIOD_S
            self._coordinator.peers.lose_dead()
        self._launch_overdue_again()
        if jump_s := self._clock.jump_s():
            self._warn(f"the wall clock jumped by {jump_s:+.0f} s, or the machine slept: times on record jump with it")
        host = {"resident_bytes": self._memory.resident_bytes, "disk_free_bytes": self._disk.free_bytes}
        self._coordinator.tally.host = {f"host/{name}": float(value) for name, value in host.items()}

    def _launch_overdue_again(self) -> None:
        flow, config = self._coordinator.flow, self._coordinator.config
        slowest_s = config.sampling.max_new_tokens * MAX_SEQ_MULTIPLIER * flow.tally.slowest_pace_s
        bound_s = max(config.daemon.hang_s, OVERDUE_TIMES * slowest_s)
        queues = (flow.work, flow.eval_work)
        overdue = set(self._overdue.overdue(lambda: [i for queue in queues for i in queue.held], bound_s))
        for queue in queues if overdue else ():
            for name, ids in queue.discard(overdue).items():
                self._coordinator.outbox.append((name, Cancel(tuple(ids))))
                self._warn(f"{name} has not ended {len(ids)} attempts in {bound_s:.0f} s: they are launched again")
                for attempt_id in ids:
                    flow.fail(attempt_id, f"{name} did not give it back")

    def _on_disk(self) -> None:
        if self._disk.is_full:
            fits = self._disk.free_bytes > self._disk.checkpoint_bytes  # without one the journal holds everything
            self._pause("disk", saves=fits)
            done = "saved and paused" if fits else "paused"
            self._warn(f"the disk is nearly full: {done} until there is room on the run's file system")
        else:
            self._go_on("disk")

    def _on_memory(self) -> None:
        guards = self._coordinator.config.guards
        bound = f"guards.memory_gib = {guards.memory_gib:g}"
        if self._memory.level == "near":
            self._warn(f"the run's processes hold nine tenths of {bound}")
        elif self._memory.level == "ok":
            self._go_on("memory")
        elif guards.memory == "pause":
            self._pause("memory")
            self._warn(f"the run's processes hold more than {bound}: saved and paused until they hold less")
        elif guards.memory == "stop":
            self._coordinator.stop_requested = True
            self._warn(f"the run's processes hold more than {bound}: saved and stopped; `ngu resume` goes on")
        else:
            self._warn(f"the run's processes hold more than {bound}")

    def _warn(self, text: str) -> None:
        self._coordinator.tally.warn(text)

    def _pause(self, reason: Reason, saves: bool = True) -> None:
        coordinator = self._coordinator
        if not self._paused_for:
            self._mode_before = coordinator.mode
        self._paused_for.add(reason)
        coordinator.mode = "pause"
        coordinator.save_requested |= saves

    def _go_on(self, reason: Reason) -> None:
        """Unless another guard still waits, or a person said something else meanwhile."""
        self._paused_for.discard(reason)
        if not self._paused_for and self._coordinator.mode == "pause":
            self._coordinator.mode = self._mode_before
