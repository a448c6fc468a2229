"""Scratch directories that outlive their process, however it ends, only until the next of their kind begins."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

_OUTSIDE = ".outside"


class Scratch:
    """A directory `prefix*` in $TMPDIR, locked by its owner; the kernel lets go of the lock when that process ends."""

    def __init__(self, prefix: str):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_abandoned(path)
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


def _remove_if_abandoned(path: Path) -> None:
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
