"""A queue whose consumers are peers with credit: no peer ever holds more items than its slots."""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Peer:
    __slots__ = ("free", "name", "order", "slots")

    def __init__(self, name: str, order: int):
        self.name = name
        self.order = order  # in which the peers joined
        self.slots = self.free = 0


_NOBODY = (None, None)


class CreditQueue(Generic[T]):
    """Items by attempt id, handed out in order to the peer with the most free slots."""

    def __init__(self):
        self._waiting: deque[tuple[int, T]] = deque()
        self._held: dict[int, tuple[_Peer, T]] = {}
        self._peers: dict[str, _Peer] = {}
        self._roomy: set[_Peer] = set()  # whoever has a free slot is in it: of a thousand peers few at a time
        self._num_joined = 0
        self.num_slots = 0

    def put(self, item_id: int, item: T, urgent: bool = False) -> None:
        """Urgent items go before all others: what they complete has already been paid for."""
        (self._waiting.appendleft if urgent else self._waiting.append)((item_id, item))

    def put_all(self, items: Iterable[tuple[int, T]]) -> None:
        """Items with their ids, behind what waits."""
        self._waiting.extend(items)

    def add_peer(self, name: str, slots: int) -> None:
        peer = self._peers.get(name)
        if peer is None:
            self._num_joined += 1
            peer = self._peers[name] = _Peer(name, self._num_joined)
        more = slots - peer.slots
        peer.slots, peer.free = slots, peer.free + more
        self.num_slots += more
        self._roomy.add(peer)

    def remove_peer(self, name: str) -> dict[int, T]:
        """Forget a peer; returns what it held."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return {}
        self.num_slots -= peer.slots
        self._roomy.discard(peer)
        held = {item_id: item for item_id, (holder, item) in self._held.items() if holder is peer}
        for item_id in held:
            del self._held[item_id]
        return held

    def done(self, item_id: int, name: str) -> bool:
        """Return the credit of an item that peer `name` has finished; False if it does not hold it."""
        peer, _ = self._held.get(item_id, _NOBODY)
        if peer is None or peer.name != name:
            return False
        del self._held[item_id]
        peer.free += 1
        self._roomy.add(peer)
        return True

    def all_done(self, item_ids: Iterable[int]) -> None:
        """Return the credit of finished items, whoever holds them."""
        held, roomy = self._held, self._roomy
        for item_id in item_ids:
            peer, _ = held.pop(item_id, _NOBODY)
            if peer is not None:
                peer.free += 1
                roomy.add(peer)

    def assign(self) -> dict[str, list[T]]:
        """Move waiting items to peers with free slots; returns what each peer is to be sent."""
        out: dict[str, list[T]] = {}
        waiting, held = self._waiting, self._held
        if not waiting:
            return out
        # The most free slots first; among equals whoever joined first.
        queue = [(-peer.free, peer.order, peer) for peer in self._roomy if peer.free > 0]
        if len(queue) == 1:  # as a run's only verifier
            return self._assign_to(queue[0][2])
        heapq.heapify(queue)
        while waiting and queue:
            peer = queue[0][2]
            item_id, item = waiting.popleft()
            held[item_id] = (peer, item)
            if (items := out.get(peer.name)) is not None:
                items.append(item)
            else:
                out[peer.name] = [item]
            peer.free -= 1
            if peer.free:
                heapq.heapreplace(queue, (-peer.free, peer.order, peer))
            else:
                heapq.heappop(queue)
                self._roomy.discard(peer)
        return out

    def _assign_to(self, peer: _Peer) -> dict[str, list[T]]:
        waiting, held = self._waiting, self._held
        items = []
        for _ in range(min(peer.free, len(waiting))):
            item_id, item = waiting.popleft()
            held[item_id] = (peer, item)
            items.append(item)
        peer.free -= len(items)
        if not peer.free:
            self._roomy.discard(peer)
        return {peer.name: items}

    @property
    def held(self) -> list[int]:
        """The ids of what peers hold."""
        return list(self._held)

    def clear(self) -> None:
        """Forget the items that wait."""
        self._waiting.clear()

    def discard(self, item_ids: set[int]) -> dict[str, list[int]]:
        """Take items out wherever they are; returns, by peer, the ids it held and must cancel."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in item_ids)
        cancelled: dict[str, list[int]] = {}
        for item_id in item_ids:
            if (holding := self._held.get(item_id)) is not None:
                cancelled.setdefault(holding[0].name, []).append(item_id)
                self.all_done([item_id])
        return cancelled

    def held_by(self, name: str) -> int:
        peer = self._peers.get(name)
        return peer.slots - peer.free if peer is not None else 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._held)
