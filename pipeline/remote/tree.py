"""Which host has a version from where: a few from the gateway, the rest from hosts that have it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

# Transfers at a time from one place. Whoever has a version passes it on, so with F at a time it reaches n hosts in the
# time of F log(n) / log(F + 1) transfers.
FAN_OUT = 3
# A transfer that takes longer does not keep others waiting: those who have it may be stuck, or just far away.
_HOLDS_S = 60.0


class Place(Protocol):
    """A host. `relay` is where it passes a version on, if it has it."""

    def relay(self, version: int) -> str: ...


class _Transfer(NamedTuple):
    source: Place | None
    began_s: float


class Tree:
    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._places: dict[Place, None] = {}
        self._transfers: dict[Place, _Transfer] = {}  # by where to

    def source_for(self, place: Place, version: int, is_direct: bool) -> str | None:
        """Where `place` is to fetch a version: the address of a relay, "" for the gateway, None for nowhere yet.

        One that `is_direct` is sent to no relay.
        """
        now = self._clock()
        self._places[place] = None
        busy = [t.source for to, t in self._transfers.items() if to is not place and now - t.began_s < _HOLDS_S]
        if busy.count(None) < FAN_OUT or is_direct:
            self._transfers[place] = _Transfer(None, now)
            return ""
        for source in self._places:
            address = source.relay(version) if source is not place else ""
            if address and busy.count(source) < FAN_OUT:
                self._transfers[place] = _Transfer(source, now)
                return address
        return None

    def ended(self, place: Place) -> None:
        """It has what it fetched, or does not want it any more."""
        self._transfers.pop(place, None)

    def forget(self, place: Place) -> None:
        self._places.pop(place, None)
        self.ended(place)
