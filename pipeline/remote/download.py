"""Parcels on their way to a worker: asked for piece by piece, kept in memory that needs no clearing up."""

import os
from collections.abc import Callable

from pipeline.errors import WeightError
from pipeline.remote.wire import PIECE_BYTES, Parcel, Piece

# Pieces asked for and not here yet: 4 MiB fill a link of 1 GB/s at 4 ms, and hold up work on a slow one for as long as
# those take.
WINDOW = 32


class Download:
    """One parcel. Its file has no name and goes with the process, however that ends."""

    def __init__(self, parcel: Parcel, pull: Callable[[str, int], None]):
        self.parcel = parcel
        self._pull = pull
        self._fd = os.memfd_create("ngu-worker")
        self._asked: set[int] = set()
        self._next = 0
        self._ask()

    @property
    def path(self) -> str:
        """Opens the bytes as long as this is not closed, also in processes of the same user."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def is_complete(self) -> bool:
        return self._next >= self.parcel.num_bytes and not self._asked

    def _ask(self) -> None:
        while len(self._asked) < WINDOW and self._next < self.parcel.num_bytes:
            self._asked.add(self._next)
            self._pull(self.parcel.checksum, self._next)
            self._next += PIECE_BYTES

    def ask_again(self) -> None:
        """After a new connection: what was on its way over the old one is lost."""
        for offset in sorted(self._asked):
            self._pull(self.parcel.checksum, offset)

    def put(self, piece: Piece) -> None:
        """Raises WeightError when the piece is not of the size that the parcel says."""
        if piece.checksum != self.parcel.checksum or piece.offset not in self._asked:
            return
        if len(piece.data) != min(PIECE_BYTES, self.parcel.num_bytes - piece.offset):
            raise WeightError(f"a piece of {len(piece.data)} bytes at {piece.offset} of {self.parcel.num_bytes} came")
        os.pwrite(self._fd, piece.data, piece.offset)
        self._asked.discard(piece.offset)
        self._ask()

    def read(self) -> bytes:
        return os.pread(self._fd, self.parcel.num_bytes, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
