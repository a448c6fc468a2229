"""What the workers of one run on one host share: each parcel is fetched by one of them, and mapped by all."""

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

import xxhash

from pipeline.errors import WeightError
from pipeline.remote.parcels import unpack_model
from pipeline.remote.wire import Parcel
from pipeline.scratch import SharedScratch

_PREFIX = "ngu-worker-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Held:
    """The bytes of a parcel, or the first of them. They have no file, and go with the last process that holds them."""

    def __init__(self, parcel: Parcel, fd: int):
        self.parcel = parcel
        self.fd = fd

    @property
    def path(self) -> str:
        """Opens the bytes as long as this is not closed, also in other processes of the same user."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def num_bytes(self) -> int:
        """How many are here. They come in order."""
        return os.fstat(self.fd).st_size

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == self.parcel.num_bytes

    def close(self) -> None:
        os.close(self.fd)


class HostStore:
    """A directory that says which process has which parcel: links to open descriptors in /proc.

    Whoever fetches a parcel has its lock, which the kernel takes away when that process ends, however it does. Those
    who wait hold what has come so far, so that the next to fetch goes on from there.
    """

    def __init__(self, run: str):
        """`run` names the run, the same on every host."""
        # Of this boot: $TMPDIR may be the same directory on many hosts.
        known = f"{run} {_BOOT_ID.read_text()} {os.getuid()}"
        self._scratch = SharedScratch(_PREFIX, xxhash.xxh3_64_hexdigest(known.encode()))
        self._dir = self._scratch.path
        self._id = uuid.uuid4().hex
        place = self._dir.stat()
        # Containers and namespaces of one kernel may have directories of their own.
        self.name = xxhash.xxh3_64_hexdigest(f"{known} {place.st_dev} {place.st_ino}".encode())
        self._locks: dict[Parcel, int] = {}
        self._followed: Held | None = None

    # --- what is here ---

    def find(self, parcel: Parcel) -> Held | None:
        """The whole parcel, if some worker of this host has it."""
        for link in self._dir.glob(f"{parcel.checksum}.whole.*"):
            held = _open(parcel, link)
            if held is not None and held.is_whole:
                self._link(held, self._own_link(parcel))
                return held
            if held is not None:
                held.close()
        return None

    def release(self, held: Held) -> None:
        self._own_link(held.parcel).unlink(missing_ok=True)
        held.close()

    def discard(self, held: Held) -> None:
        """`release` bytes that were refused: nobody is to find them any more."""
        for link in self._dir.glob(f"{held.parcel.checksum}.whole.*"):
            if _is_at(link, held.fd):
                link.unlink(missing_ok=True)
        held.close()

    # --- what is on its way ---

    def claim(self, parcel: Parcel) -> Held | None:
        """What there is of the parcel, for the caller to fetch the rest of; None while another process does."""
        path = self._lock_path(parcel)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                held = self.find(parcel) or self._follow(parcel) or Held(parcel, os.memfd_create(_memory_name(parcel)))
                if held is self._followed:
                    self._followed = None
                self._locks[parcel] = fd
                self._link(held, self._part_link(parcel))
                return held
        os.close(fd)
        return None

    def num_here(self, parcel: Parcel) -> int:
        """Bytes that have come to the process which fetches it."""
        followed = self._follow(parcel)
        return followed.num_bytes if followed is not None else 0

    def depose(self, parcel: Parcel) -> None:
        """Let another process fetch it, though the one that does has not ended."""
        self._lock_path(parcel).unlink(missing_ok=True)

    def is_claimed(self, held: Held) -> bool:
        """Whether it is still for the caller to fetch."""
        return _is_at(self._lock_path(held.parcel), self._locks[held.parcel])

    def done(self, held: Held) -> None:
        """The caller, who had claimed it, has all of it, or will not go on."""
        fd = self._locks.pop(held.parcel)
        if held.is_whole:
            self._link(held, self._own_link(held.parcel))
            for path, ours in ((self._part_link(held.parcel), held.fd), (self._lock_path(held.parcel), fd)):
                if _is_at(path, ours):
                    path.unlink(missing_ok=True)
        os.close(fd)

    def _follow(self, parcel: Parcel) -> Held | None:
        """What has come of a parcel, held so that it does not go with the process that fetches it."""
        if self._followed is not None and self._followed.parcel != parcel:
            self.unfollow()
        if self._followed is None:
            self._followed = _open(parcel, self._part_link(parcel))
        return self._followed

    def unfollow(self) -> None:
        if self._followed is not None:
            self._followed.close()
            self._followed = None

    # --- config and tokenizer ---

    def unpacked(self, held: Held) -> Path:
        """The directory with the files of a model parcel; raises WeightError when they did not arrive whole."""
        directory = self._dir / f"{held.parcel.checksum}.model"
        if not directory.exists():
            data = os.pread(held.fd, held.parcel.num_bytes, 0)
            if xxhash.xxh3_64_hexdigest(data) != held.parcel.checksum:
                self.discard(held)
                raise WeightError("the model's config and tokenizer did not arrive whole; start the worker again")
            partial = self._dir / f"{directory.name}.{self._id}"
            partial.mkdir()
            unpack_model(data, partial)
            with contextlib.suppress(OSError):  # another worker was faster
                partial.rename(directory)
        return directory

    def close(self) -> None:
        self.unfollow()
        self._scratch.close()

    def _own_link(self, parcel: Parcel) -> Path:
        return self._dir / f"{parcel.checksum}.whole.{self._id}"

    def _part_link(self, parcel: Parcel) -> Path:
        return self._dir / f"{parcel.checksum}.part"

    def _lock_path(self, parcel: Parcel) -> Path:
        return self._dir / f"{parcel.checksum}.lock"

    def _link(self, held: Held, path: Path) -> None:
        partial = self._dir / f".{self._id}"
        partial.symlink_to(held.path)
        partial.replace(path)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:  # removed; or a link to what an ended process had
        return False


def _memory_name(parcel: Parcel) -> str:
    return f"ngu-{parcel.checksum}"


def _open(parcel: Parcel, link: Path) -> Held | None:
    """What a link leads to, if that is memory of this parcel: a process may have ended, and its number be another's."""
    with contextlib.suppress(OSError):
        if link.readlink().readlink().name == f"memfd:{_memory_name(parcel)} (deleted)":
            return Held(parcel, os.open(link, os.O_RDWR | os.O_CLOEXEC))
    return None
