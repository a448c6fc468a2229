"""Closed groups in arrival order, cut into batches by attempts, completions or groups."""

from collections import deque
from typing import Literal

import msgspec

from pipeline.messages import Group

BatchBy = Literal["attempts", "completions", "groups"]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A finished round: `cost` in the batch unit, and the group it closed if it closed one."""

    cost: int
    group: Group | None


class BatcherState(msgspec.Struct):
    entries: list[Entry]
    carry: int


class Batcher:
    """By attempts, every finished round counts, also one that trains nothing: a step then costs a fixed number of
    rollouts (zero-variance groups are dropped, not refilled). By completions or groups only what is trained counts.
    """

    def __init__(self, batch_by: BatchBy, batch_size: int):
        self._batch_by = batch_by
        self._batch_size = batch_size
        self._entries: deque[Entry] = deque()
        self._total = 0
        self._carry = 0  # units of the last batch beyond its size: they count towards the next
        self._in_training = 0

    def add_round(self, num_attempts: int, group: Group | None) -> None:
        if self._batch_by == "attempts":
            self._append(Entry(num_attempts, group))
        elif group is not None:
            self._append(Entry(len(group.rollouts) if self._batch_by == "completions" else 1, group))

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._total += entry.cost

    @property
    def ready(self) -> bool:
        return self._carry + self._total >= self._batch_size

    def take(self) -> list[Group]:
        """The groups of the next batch, oldest first; may be empty when `batch_by` is attempts."""
        assert self.ready
        groups: list[Group] = []
        units = self._carry
        while units < self._batch_size:
            entry = self._entries.popleft()
            self._total -= entry.cost
            units += entry.cost
            if entry.group is not None:
                groups.append(entry.group)
        self._carry = units - self._batch_size
        self._in_training = self._batch_size
        return groups

    def consumed(self) -> None:
        """The batch taken last is trained, or was empty."""
        self._in_training = 0

    @property
    def num_waiting(self) -> int:
        """Units finished and not yet consumed by an optimizer step."""
        return self._total + self._carry + self._in_training

    @property
    def groups(self) -> list[Group]:
        return [e.group for e in self._entries if e.group is not None]

    def state(self) -> BatcherState:
        return BatcherState(list(self._entries), self._carry)

    def restore(self, state: BatcherState) -> None:
        self._entries = deque(state.entries)
        self._total = sum(e.cost for e in state.entries)
        self._carry = state.carry
