"""Closed groups, cut into batches by attempts, completions or groups, as they finish or as they were launched."""

import math
from typing import Literal, NamedTuple

import msgspec

from pipeline.messages import Group

BatchBy = Literal["attempts", "completions", "groups"]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished round: `cost` in the batch unit, and the group it closed if it closed one.

    `ticket` is its place in the order of launches, `version` the policy's when it was launched.
    """

    cost: int
    group: Group | None
    ticket: int = 0
    version: int = 0


class BatcherState(msgspec.Struct):
    entries: list[Entry]
    carry: int


class Cut(NamedTuple):
    """How the next batch is cut: as rounds arrived, or as they were launched, up to the ticket `gap` of the first that
    has not finished (infinity: none). Rounds launched at version `due` or before belong to it whatever its size.
    """

    gap: float | None = None
    due: int = -1


ARRIVAL = Cut()


class Batcher:
    """By attempts, every finished round counts, also one that trains nothing: a step then costs a fixed number of
    rollouts (zero-variance groups are dropped, not refilled). By completions or groups only what is trained counts.
    """

    def __init__(self, batch_by: BatchBy, batch_size: int):
        self._batch_by = batch_by
        self._batch_size = batch_size
        self._entries: list[Entry] = []
        self._total = 0
        self._carry = 0  # units of the last batch beyond its size: they count towards the next
        self._in_training = 0
        self.num_rounds_taken = 0  # with the last batch

    def add_round(self, num_attempts: int, group: Group | None, ticket: int = 0, version: int = 0) -> None:
        if self._batch_by == "attempts":
            self._append(Entry(num_attempts, group, ticket, version))
        elif group is not None:
            cost = len(group.rollouts) if self._batch_by == "completions" else 1
            self._append(Entry(cost, group, ticket, version))

    def _append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._total += entry.cost

    @property
    def ready(self) -> bool:
        """Whether enough has finished for a batch; the order of launches may still make it wait."""
        return self._carry + self._total >= self._batch_size

    def can_take(self, cut: Cut) -> bool:
        return self.ready if cut.gap is None else self._next(cut) is not None

    def take(self, cut: Cut = ARRIVAL) -> list[Group]:
        """The groups of the next batch; may be empty when `batch_by` is attempts. Only when `can_take`."""
        chosen = self._next(cut)
        assert chosen is not None
        if cut.gap is None:
            self._entries = self._entries[len(chosen) :]
        else:
            taken = {id(entry) for entry in chosen}
            self._entries = [entry for entry in self._entries if id(entry) not in taken]
        units = sum(entry.cost for entry in chosen)
        self._total -= units
        self._carry += units - self._batch_size
        self._in_training, self.num_rounds_taken = self._batch_size, len(chosen)
        return [entry.group for entry in chosen if entry.group is not None]

    def _next(self, cut: Cut) -> list[Entry] | None:
        """The entries of the next batch, or None while it has to wait."""
        if not self.ready:
            return None
        entries, gap = self._entries, math.inf
        if cut.gap is not None:
            entries, gap = sorted(entries, key=lambda entry: entry.ticket), cut.gap
        chosen: list[Entry] = []
        units = self._carry
        for entry in entries:
            if entry.ticket > gap or (units >= self._batch_size and entry.version > cut.due):
                break
            chosen.append(entry)
            units += entry.cost
        return chosen if units >= self._batch_size else None

    def consumed(self) -> None:
        """The batch taken last is trained, or was empty."""
        self._in_training = 0

    @property
    def is_training(self) -> bool:
        return self._in_training > 0

    @property
    def num_untaken(self) -> int:
        """Units of the rounds that are in no batch yet."""
        return self._total

    @property
    def num_waiting(self) -> int:
        """Units finished and not yet consumed by an optimizer step."""
        return self._total + self._carry + self._in_training

    @property
    def num_batches(self) -> int:
        """Batches that are full and not yet consumed, the one in training included."""
        return self.num_waiting // self._batch_size

    @property
    def groups(self) -> list[Group]:
        return [e.group for e in self._entries if e.group is not None]

    def state(self) -> BatcherState:
        return BatcherState(list(self._entries), self._carry)

    def restore(self, state: BatcherState) -> None:
        self._entries = list(state.entries)
        self._total = sum(e.cost for e in state.entries)
        self._carry = state.carry
