"""A parcel on its way to a host: asked for piece by piece, in order."""

import os
from collections.abc import Callable

from pipeline.errors import WeightError
from pipeline.remote.store import Held
from pipeline.remote.wire import PIECE_BYTES, Piece

# Pieces asked for and not here yet: 4 MiB fill a link of 1 GB/s at 4 ms, and hold up work on a slow one for as long as
# those take.
WINDOW = 32


class Download:
    """Fetches what `held` lacks of its parcel."""

    def __init__(self, held: Held, pull: Callable[[str, int], None]):
        self.held = held
        self._parcel = held.parcel
        self._pull = pull
        self._asked: set[int] = set()
        self._next = held.num_bytes if held.is_whole else held.num_bytes // PIECE_BYTES * PIECE_BYTES
        self._ask()

    @property
    def is_complete(self) -> bool:
        return self._next >= self._parcel.num_bytes and not self._asked

    def _ask(self) -> None:
        while len(self._asked) < WINDOW and self._next < self._parcel.num_bytes:
            self._asked.add(self._next)
            self._pull(self._parcel.checksum, self._next)
            self._next += PIECE_BYTES

    def ask_again(self) -> None:
        """After a new connection: what was on its way over the old one is lost."""
        for offset in sorted(self._asked):
            self._pull(self._parcel.checksum, offset)

    def put(self, piece: Piece) -> None:
        """Raises WeightError when the piece is not of the size that the parcel says."""
        if piece.checksum != self._parcel.checksum or piece.offset not in self._asked:
            return
        if len(piece.data) != min(PIECE_BYTES, self._parcel.num_bytes - piece.offset):
            raise WeightError(f"a piece of {len(piece.data)} bytes at {piece.offset} of {self._parcel.num_bytes} came")
        os.pwrite(self.held.fd, piece.data, piece.offset)
        self._asked.discard(piece.offset)
        self._ask()
