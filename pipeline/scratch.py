"""Scratch directories that outlive their processes, however those end, only until the next of their kind begins."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pipeline.errors import ConfigError

_OUTSIDE = ".outside"


class Scratch:
    """A directory `prefix*` in $TMPDIR, locked by its owner; the kernel lets go of the lock when that process ends."""

    def __init__(self, prefix: str):
        _remove_abandoned(prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            with contextlib.suppress(FileNotFoundError):  # somebody took it for abandoned: it was not locked yet
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._fd)

    def take_over(self, files: Iterable[Path]) -> None:
        """Let these files, which lie elsewhere, go with the directory."""
        with (self.path / _OUTSIDE).open("a") as known:
            known.writelines(f"{file}\n" for file in files)

    def close(self) -> None:
        _remove(self.path)
        os.close(self._fd)


class SharedScratch:
    """The directory `prefix` + `key` in $TMPDIR, of every process that names it so; it goes with the last of them.

    Raises ConfigError when another user has it.
    """

    def __init__(self, prefix: str, key: str):
        _remove_abandoned(prefix)
        self.path = Path(tempfile.gettempdir()) / f"{prefix}{key}"
        while True:
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # the last of the others has just left
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if os.fstat(self._fd).st_uid != os.getuid():
                    os.close(self._fd)
                    raise ConfigError(f"{self.path} belongs to another user; set TMPDIR to a directory of your own")
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._fd)):
                    return
                os.close(self._fd)

    def close(self) -> None:
        with contextlib.suppress(BlockingIOError):  # others are here
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path)
        os.close(self._fd)


def _remove_abandoned(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # still locked, or gone meanwhile
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():  # what another user's directory names is not ours to remove
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(path)
            finally:
                os.close(fd)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for file in (path / _OUTSIDE).read_text().splitlines():
            Path(file).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
