"""A queue whose consumers are peers with credit: no peer ever holds more items than its slots."""

import heapq
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class CreditQueue(Generic[T]):
    """Items by attempt id, handed out in order to the peer with the most free slots."""

    def __init__(self):
        self._waiting: deque[tuple[int, T]] = deque()
        self._held: dict[str, dict[int, T]] = {}
        self._slots: dict[str, int] = {}
        self._holder: dict[int, str] = {}
        self.num_slots = 0

    def put(self, item_id: int, item: T, urgent: bool = False) -> None:
        """Urgent items go before all others: what they complete has already been paid for."""
        (self._waiting.appendleft if urgent else self._waiting.append)((item_id, item))

    def add_peer(self, name: str, slots: int) -> None:
        self.num_slots += slots - self._slots.get(name, 0)
        self._slots[name] = slots
        self._held.setdefault(name, {})

    def remove_peer(self, name: str) -> dict[int, T]:
        """Forget a peer; returns what it held."""
        self.num_slots -= self._slots.pop(name, 0)
        held = self._held.pop(name, {})
        for item_id in held:
            del self._holder[item_id]
        return held

    def done(self, item_id: int) -> bool:
        """Return the credit of a finished item; False if no peer holds it."""
        name = self._holder.pop(item_id, None)
        if name is None:
            return False
        del self._held[name][item_id]
        return True

    def holder(self, item_id: int) -> str | None:
        return self._holder.get(item_id)

    def assign(self) -> dict[str, list[T]]:
        """Move waiting items to peers with free slots; returns what each peer is to be sent."""
        out: dict[str, list[T]] = {}
        if not self._waiting:
            return out
        # The most free slots first; among equals whoever joined first.
        free = [
            (len(self._held[name]) - slots, order, name)
            for order, (name, slots) in enumerate(self._slots.items())
            if len(self._held[name]) < slots
        ]
        heapq.heapify(free)
        while self._waiting and free:
            minus_free, order, name = free[0]
            item_id, item = self._waiting.popleft()
            self._held[name][item_id] = item
            self._holder[item_id] = name
            out.setdefault(name, []).append(item)
            if minus_free < -1:
                heapq.heapreplace(free, (minus_free + 1, order, name))
            else:
                heapq.heappop(free)
        return out

    def clear(self) -> None:
        """Forget the items that wait."""
        self._waiting.clear()

    def discard(self, item_ids: set[int]) -> dict[str, list[int]]:
        """Take items out wherever they are; returns, by peer, the ids it held and must cancel."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in item_ids)
        cancelled: dict[str, list[int]] = {}
        for item_id in item_ids:
            name = self._holder.get(item_id)
            if name is not None:
                self.done(item_id)
                cancelled.setdefault(name, []).append(item_id)
        return cancelled

    def held_by(self, name: str) -> int:
        return len(self._held.get(name, ()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._holder)
