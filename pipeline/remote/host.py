"""What the workers of one host are given: a version at a time, the same to all, since they share its download."""

from collections import Counter
from typing import NamedTuple

import msgspec

from pipeline.remote.parcels import Content
from pipeline.remote.tree import Tree
from pipeline.remote.wire import Offer, Piece

_COUNTED = 8  # parcels whose bytes are still counted
_MAX_FAILURES = 3  # of relays, until a host has no more of them


class Ware(NamedTuple):
    """What is on offer, and its bytes, which must be held until they have arrived."""

    offer: Offer
    weights: Content

    @property
    def version(self) -> int:
        return self.offer.notice.policy_version


class Host:
    """One version is under way until a worker has loaded it; of those that come meanwhile only the newest waits.

    A link slower than the learner's steps would else be told of ever newer versions and complete none, and workers that
    fetch different ones would share the link and be late with all of them.
    """

    def __init__(self, tree: Tree):
        self._tree = tree
        self.current: Ware | None = None
        self._next: Ware | None = None
        self._takers: set[str] = set()  # sessions that have it on offer, while it is under way
        self._source = ""  # that they were told of
        self._relays: dict[str, str] = {}  # by session, of those that have loaded ...
        self._whole = -1  # ... this version
        self._failures: set[int] = set()  # versions that a relay was to send, and did not
        self._sent: Counter[str] = Counter()
        self.copies = 0.0  # of the parcel that was sent most often, by bytes

    def announce(self, ware: Ware) -> None:
        """A worker of this host is to have it, or something newer."""
        if self.current is None or ware.version == self.current.version:
            self.current = ware
        elif ware.version > self.current.version:
            if not self._takers:
                self.current = ware
            elif self._next is None or ware.version >= self._next.version:
                self._next = ware

    def give(self, session: str) -> Ware | None:
        """What the session is to be offered, under way from now on; None as long as there is nowhere to fetch it."""
        assert self.current is not None
        if not self._takers and self._whole != self.current.version:
            is_direct = len(self._failures) >= _MAX_FAILURES
            source = self._tree.source_for(self, self.current.version, is_direct)
            if source is None:
                return None
            self._source = source
        self._takers.add(session)
        return self.current._replace(offer=msgspec.structs.replace(self.current.offer, source=self._source))

    def loaded(self, session: str, version: int, relay: str) -> None:
        """The session has it: the others find it on their machine, and what comes next may come."""
        if version > self._whole:
            self._whole, self._relays = version, {}
        if version == self._whole:
            self._relays[session] = relay
        if self.current is not None and version == self.current.version:
            self._move_on()

    def leave(self, session: str) -> None:
        """The session does not wait for it any more."""
        self._takers.discard(session)
        if not self._takers:
            self._move_on()

    def end(self, session: str) -> None:
        self._relays.pop(session, None)
        self.leave(session)

    def relay(self, version: int) -> str:
        """Where one of its workers passes this version on; empty if it does not."""
        return next(filter(None, self._relays.values()), "") if version == self._whole else ""

    def relay_failed(self, version: int) -> None:
        """What was to come from a relay was asked of the gateway, or was refused."""
        self._failures.add(version)

    def _move_on(self) -> None:
        self._takers.clear()
        self._tree.ended(self)
        if self._next is not None:
            self.current, self._next = self._next, None

    def sent(self, piece: Piece, num_bytes: int) -> None:
        """A piece of a parcel of `num_bytes` went out from the gateway."""
        self._sent[piece.checksum] += len(piece.data)
        self.copies = max(self.copies, self._sent[piece.checksum] / num_bytes)
        for checksum in list(self._sent)[:-_COUNTED]:
            del self._sent[checksum]
