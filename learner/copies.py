"""Models and checkpoints of the first rank's host on the other hosts of a learner, which have no file of the run."""

import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from learner.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.scratch import SharedScratch

PIECE_BYTES = 1 << 26  # crosses in well under the time after which a rank counts as silent


class _Listing(msgspec.Struct, frozen=True):
    """Names and sizes of files below a directory, and what of it is to be opened: "." or one of them."""

    opens: str
    files: list[tuple[str, int]]


class Copies(AbstractContextManager["Copies"]):
    """On other hosts a directory in $TMPDIR, which the ranks of one share and which goes with the block; nothing where
    all ranks are on one host. Every rank must do the same with it.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._scratch: SharedScratch | None = None
        self._known: dict[str, str] = {}  # paths of the first rank's host -> of this one
        if ranks.per_node:
            token = ranks.share(secrets.token_bytes(8) if ranks.is_first else None).hex()
            if node := ranks.rank // ranks.per_node:
                self._scratch = SharedScratch("ngu-learner-", f"{token}-{node}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            self._scratch.close()

    def here(self, path: str, find: Callable[[str], tuple[Path, Iterable[Path]]]) -> str:
        """What is at `path` on the first rank's host, on this one.

        `find` is called there alone, and says what `path` leads to, and which files are needed of that. Raises what it
        raises, and ConfigError where there is no room for them.
        """
        if not self._ranks.per_node:
            return path
        if path not in self._known:
            self._known[path] = self._copy(path, find)
        return self._known[path]

    def _copy(self, path: str, find: Callable[[str], tuple[Path, Iterable[Path]]]) -> str:
        listing, base = None, Path()
        if self._ranks.is_first:
            found, files = find(path)
            base = found if found.is_dir() else found.parent
            sizes = [(str(file.relative_to(base)), file.stat().st_size) for file in files]
            listing = _Listing(str(found.relative_to(base)), sizes)
        packed = self._ranks.share(msgspec.msgpack.encode(listing) if self._ranks.is_first else None)
        listing = msgspec.msgpack.decode(packed, type=_Listing)
        target = self._scratch and self._scratch.path / str(len(self._known))
        try:
            for name, size in listing.files:
                with self._open(base / name, target and target / name) as file:
                    self._pass_on(file, size)
        except OSError as e:
            what = "a learner's node needs room in $TMPDIR" if target else "it is needed on the learner's other nodes"
            raise ConfigError(f"{target or base}: {e.strerror}; {what}") from None
        self._ranks.total(0.0)  # nobody reads before all is written
        return path if target is None else str(target / listing.opens)

    def _open(self, source: Path, target: Path | None) -> AbstractContextManager[IO[bytes] | None]:
        """The file that this rank has to read or to write, or None."""
        if self._ranks.is_first:
            return source.open("rb")
        if target is None or self._ranks.rank % self._ranks.per_node:
            return nullcontext()
        target.parent.mkdir(parents=True, exist_ok=True)
        return target.open("wb")

    def _pass_on(self, file: IO[bytes] | None, size: int) -> None:
        for _ in range(0, size, PIECE_BYTES):
            read = file.read(PIECE_BYTES) if file is not None and self._ranks.is_first else None
            piece = self._ranks.share(read)
            if file is not None and not self._ranks.is_first:
                file.write(piece)
