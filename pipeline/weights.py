"""Weights from the learner to the engines of one host: a safetensors file per version, announced by its notice.

A version names exact bytes. The file is complete before its final name exists, and a reader checks size and checksum
of the very bytes that it then uses, so neither a torn write nor a file replaced in between can be served.

A file that has been replaced is written over with a later version, since the pages of a new one cost more than the
copy. A reader holds a shared lock on the file while it has any use for its bytes, and the publisher takes only what
nobody holds: a reader that is slow keeps its bytes, one that dies lets go of them, and meanwhile there are new files.
"""

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.errors import WeightError
from pipeline.messages import WeightsNotice, pack_ids, pack_logprobs
from pipeline.weights_layout import (
    LENGTH_BYTES,
    PIECE_BYTES,
    TensorEntry,
    file_parts,
    pieces,
    read_entries,
    torch_view,
)

if TYPE_CHECKING:
    from torch import Tensor

# Two versions stay readable: the newest, and the one an engine may have been told of just before.
KEPT_VERSIONS = 2
STREAM_BYTES = 64 << 20  # a file of fewer may be read from a processor's last cache
NUM_FILES = KEPT_VERSIONS + 1  # of a publisher, which take turns: those, and the one that is written over next


class WeightPublisher:
    """Writes versions into `directory` (best under /dev/shm), which it owns: made here, removed by `close`.

    It takes the bytes of three versions there: those that are kept, and the one that is written over next.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._kept: list[_File] = []
        self._spare: _File | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise WeightError(f"{directory}: cannot make the weights directory: {e.strerror}") from None
        self._remove_files()

    def publish(
        self,
        state_dict: "Mapping[str, Tensor]",
        policy_version: int,
        model_dir: Path | str,
        canary_ids: "np.ndarray | list[int]",
        canary_logprobs: "np.ndarray | list[float]",
    ) -> WeightsNotice:
        """Write one version and forget all but the last two; raises WeightError when it does not fit.

        `canary_ids` [T] and `canary_logprobs` [T-1] are copied into the notice. Tied weights (one storage, several
        names) are saved once, under the first name.
        """
        path = self.directory / f"{policy_version}.safetensors"
        file, self._spare = self._spare, None
        if file is not None and not file.claim():
            file.remove()
            file = None
        try:
            file = file or _File(path.with_suffix(".safetensors.partial"))
            checksum, num_bytes = file.write(state_dict)
            file.rename(path)
        except BaseException as e:
            if file is not None:
                file.remove()
            if not isinstance(e, OSError):
                raise
            raise WeightError(
                f"{path}: cannot write the weights: {e.strerror}; free space or use another directory"
            ) from e
        self._keep(file)
        return WeightsNotice(
            policy_version=policy_version,
            path=str(path),
            checksum=checksum,
            num_bytes=num_bytes,
            model_dir=str(model_dir),
            canary_ids=pack_ids(canary_ids),
            canary_logprobs=pack_logprobs(canary_logprobs),
        )

    def _keep(self, file: "_File") -> None:
        for replaced in [f for f in self._kept if f.path == file.path]:  # its name is the new file's already
            self._kept.remove(replaced)
            replaced.close()
        self._kept.append(file)
        while len(self._kept) > KEPT_VERSIONS:
            oldest = self._kept.pop(0)
            if self._spare is not None:
                self._spare.remove()
            try:
                # A reader that looks for the version does not find it from here on.
                oldest.rename(self.directory / "spare.safetensors")
                self._spare = oldest
            except OSError:  # somebody has removed it
                oldest.close()

    def close(self) -> None:
        """Remove the directory; engines that still have a file open keep its bytes."""
        for file in (*self._kept, *filter(None, [self._spare])):
            file.close()
        self._kept, self._spare = [], None
        self._remove_files()
        if self.directory.exists():
            self.directory.rmdir()

    def _remove_files(self) -> None:
        for path in self.directory.glob("*.safetensors*"):
            path.unlink(missing_ok=True)


class _File:
    """A file of the publisher, open as long as it may be written to, under one name after the other."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        # Memory of a file that has lost its name stays taken as long as it is open, so not longer than this object.
        self.close = weakref.finalize(self, os.close, self._fd)
        self._map: mmap.mmap | None = None

    def claim(self) -> bool:
        """Whether it can be written over: no reader holds it, and it is still what its name stands for."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or in a file system without locks
            return False
        return _is_at(self.path, self._fd)

    def write(self, state_dict: "Mapping[str, Tensor]") -> tuple[str, int]:
        """The whole file: its checksum and number of bytes."""
        header, tensors = file_parts(state_dict)
        num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self._resize(num_bytes)
        assert self._map is not None
        digest, position = xxhash.xxh3_64(header), len(header)
        self._map[:position] = header
        place, copy = np.frombuffer(self._map, dtype=np.uint8), _copy_for(num_bytes)
        for piece in pieces(tensors):
            source = piece.numpy()
            copy(place[position : position + source.nbytes], source)
            digest.update(source.data)
            position += source.nbytes
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return digest.hexdigest(), num_bytes

    def _resize(self, num_bytes: int) -> None:
        """Have every page of the file there before it is written to, whatever became of the file meanwhile: a write to
        one that there is no room for would end the process.
        """
        if self._map is None or len(self._map) != num_bytes or os.fstat(self._fd).st_size != num_bytes:
            os.ftruncate(self._fd, num_bytes)
            os.posix_fallocate(self._fd, 0, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)

    def rename(self, path: Path) -> None:
        self.path.replace(path)
        self.path = path

    def remove(self) -> None:
        if _is_at(self.path, self._fd):
            self.path.unlink(missing_ok=True)
        self.close()


def _copy_for(num_bytes: int) -> Callable[[np.ndarray, np.ndarray], object]:
    """The faster way to copy the pieces of a file of that size. Past the caches it starts up for half a second."""
    if num_bytes < STREAM_BYTES:
        return lambda target, source: torch_view(target).copy_(torch_view(source))
    from pipeline.streaming import stream_copy

    return stream_copy


def weights_checksum(state_dict: "Mapping[str, Tensor]") -> str:
    """The checksum that a notice of these weights would carry."""
    header, tensors = file_parts(state_dict)
    digest = xxhash.xxh3_64(header)
    for piece in pieces(tensors):
        digest.update(piece.numpy().data)
    return digest.hexdigest()


# --- readers ---


class WeightsReader:
    """Reads versions one after the other. Files stay mapped, because a publisher writes over them and a new map costs
    as much as the copy: as many as take turns, so that those which have lost their name are soon let go.
    """

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}

    @contextlib.contextmanager
    def open(self, notice: WeightsNotice) -> "Iterator[WeightsStream]":
        """The announced file, to be read once. Raises WeightError when it is missing, cut short or no weights file;
        what is in it is known to be right when all of its parts have been read.
        """
        fd = _hold(Path(notice.path))
        try:
            yield WeightsStream(notice, self._map(notice, fd))
        finally:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_UN)  # the map has a copy of the descriptor, which would hold it
            os.close(fd)

    def _map(self, notice: WeightsNotice, fd: int) -> mmap.mmap:
        _check_size(notice, fd)
        stat = os.fstat(fd)
        key = stat.st_dev, stat.st_ino, stat.st_size
        self._maps[key] = self._maps.pop(key, None) or _mapped(fd)
        while len(self._maps) > NUM_FILES:
            self._maps.pop(next(iter(self._maps)))
        return self._maps[key]


class WeightsStream:
    """A weights file on its way through: each piece is given out, and hashed while it is in the cache."""

    def __init__(self, notice: WeightsNotice, view: mmap.mmap):
        self._notice = notice
        self._bytes = np.frombuffer(view, dtype=np.uint8)
        self._digest = xxhash.xxh3_64()
        self._position = 0
        header_bytes = int.from_bytes(self._hash(self._take(LENGTH_BYTES)), "little")
        if header_bytes > notice.num_bytes - LENGTH_BYTES:
            raise _damaged(notice)
        try:
            self.entries = read_entries(self._hash(self._take(header_bytes)), notice.num_bytes)
        except ValueError:
            raise _damaged(notice) from None

    def parts(self, multiple: int) -> "Iterator[tuple[str, int, Tensor]]":
        """Every tensor in parts of whole rows: its name, the number of the part's first row, the rows.

        The number of rows is a multiple of `multiple`, but for a tensor's last part. After the last one raises
        WeightError unless all of them together were the announced bytes.
        """
        import torch

        for entry in self.entries:
            size = entry.end - entry.begin
            num_rows = entry.shape[0] if entry.shape else 1
            step = max(1, PIECE_BYTES * num_rows // max(1, size * multiple)) * multiple
            for row in range(0, num_rows if size else 0, step):
                rows = min(step, num_rows - row)
                data = self._take(size // num_rows * rows)
                yield entry.name, row, torch_view(data).view(getattr(torch, entry.dtype)).view(rows, *entry.shape[1:])
                self._hash(data)
        self._compare()

    def copy(self, rows: "Tensor", target: "Tensor") -> None:
        """Copy a part, once it is out, to contiguous rows of its own shape and any float dtype."""
        import torch

        if rows.dtype != target.dtype or self._notice.num_bytes < STREAM_BYTES:
            target.copy_(rows)  # a view of bytes would take a small tensor longer than its copy
            return
        from pipeline.streaming import stream_copy

        stream_copy(*(t.view(torch.uint8).flatten().numpy() for t in (target, rows)))

    def check(self) -> None:
        """Read what is left; raises WeightError unless all of it was the announced bytes."""
        while left := self._notice.num_bytes - self._position:
            self._hash(self._take(min(left, PIECE_BYTES)))
        self._compare()

    def _take(self, count: int) -> np.ndarray:
        taken = self._bytes[self._position : self._position + count]
        self._position += count
        return taken

    def _hash(self, taken: np.ndarray) -> memoryview:
        self._digest.update(taken.data)
        return taken.data

    def _compare(self) -> None:
        if self._digest.hexdigest() != self._notice.checksum:
            raise _damaged(self._notice)


def map_weights(notice: WeightsNotice) -> mmap.mmap:
    """The announced bytes, which do not change as long as the map is open.

    Raises WeightError when the file is missing, cut short or not the announced bytes.
    """
    fd = _hold(Path(notice.path))
    try:
        _check_size(notice, fd)
        view = _mapped(fd)
    finally:
        os.close(fd)
    if xxhash.xxh3_64_hexdigest(view) != notice.checksum:
        raise _damaged(notice)
    return view


def open_weights(notice: WeightsNotice) -> tuple[mmap.mmap, list[TensorEntry]]:
    """The announced bytes, and the tensors in them in the order of their place, which leaves no gaps.

    Raises WeightError as `map_weights` does.
    """
    view = map_weights(notice)
    header_end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    try:
        return view, read_entries(view[LENGTH_BYTES:header_end], len(view))
    except ValueError:
        raise _damaged(notice) from None


def read_weights(notice: WeightsNotice) -> "dict[str, Tensor]":
    """The tensors of a notice, mapped without a copy (a write to one stays private to this process).

    Raises WeightError as `open_weights` does.
    """
    import torch

    view, entries = open_weights(notice)
    tensors = {}
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        if entry.begin == entry.end:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        count = (entry.end - entry.begin) // dtype.itemsize
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=entry.begin)
        tensors[entry.name] = flat.view(entry.shape)
    return tensors


def _hold(path: Path) -> int:
    """Open a file so that its publisher leaves its bytes alone until the descriptor is closed, and with it every map,
    which has a copy of the descriptor. Raises WeightError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise WeightError(
            f"{path}: cannot read the weights: {e.strerror}; a newer version may have replaced it"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_current = _is_at(path, fd)  # else it was taken between the opening and the lock
    except BlockingIOError:
        is_current = False
    except OSError:  # a file system without locks, where the publisher cannot take a file either
        is_current = True
    if not is_current:
        os.close(fd)
        raise WeightError(f"{path}: a newer version is replacing the weights")
    return fd


def _mapped(fd: int) -> mmap.mmap:
    """Copy-on-write, since torch refuses to view memory that it could not write to."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except OSError:
        return False


def _check_size(notice: WeightsNotice, fd: int) -> None:
    if (size := os.fstat(fd).st_size) != notice.num_bytes:
        raise WeightError(f"{notice.path}: {size} bytes, announced {notice.num_bytes}; publish the version again")


def _damaged(notice: WeightsNotice) -> WeightError:
    return WeightError(f"{notice.path}: its bytes do not match the announced checksum; publish the version again")
