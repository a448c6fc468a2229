"""What changed the books since the last checkpoint, in order, so that a crash loses no finished rollout.

The coordinator is deterministic: a checkpoint and the entries after it give the same sampler, chains and batches again.
An entry is durable against the death of the process before anything it led to leaves the process (it is written before
the ledger's commit, which comes before the sends).

Entries lie in segments `RUN/journal/000003`, in frames `length | xxh3_64 | msgpack` of a turn's entries: a frame for
each would cost more than the entry. A checkpoint names the segment that follows it, and a new segment starts with each
checkpoint, so an older checkpoint is followed by several.

A write is safe from the death of the process at once, and from a power loss once the system has written it back, or the
next checkpoint holds what came of it. A power loss costs the judged rollouts of that time: they are launched again.
"""

import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipeline.coordinator.book import Result
from pipeline.errors import OtherVersion

NUM_KEPT = 2  # the checkpoints; the oldest of them needs its own segment and those of the newer ones
# A run that saves no checkpoints would else write every rollout of its life here, and repeat them all after a crash.
MAX_SEGMENT_BYTES = 1 << 30
FRAME_ITEMS = 256  # entries, or results in them; a longer result counts as one for each `_ITEM_BYTES` of its ids
# So a frame has some 200 KiB at most: the buffer that it is made, summed and written from stays in a core's cache.
_ITEM_BYTES = 384
_HEADER = struct.Struct("<IQ")


class Configured(msgspec.Struct, frozen=True, array_like=True, tag="configured"):
    """The run's config from here on; also the first entry of every segment."""

    config: dict[str, Any]


class Proposed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="proposed"):
    """The sampler was asked for a launch; the `num_attempts` it gave are numbered from `first_id`."""

    first_id: int
    num_attempts: int


class Judged(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="judged"):
    """Attempts were judged, in this order."""

    results: list[Result]


class Emptied(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="emptied"):
    """An attempt's place gets no result."""

    attempt_id: int


class Replaced(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="replaced"):
    attempt_id: int
    new_id: int


class Taken(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="taken"):
    """A batch was cut for the learner."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stepped"):
    """A batch was trained; `holds` when its ESS was so low that launches wait."""

    policy_version: int
    holds: bool = False
    ratio_mean: float = 1.0
    lag_mean: float = 0.0


Entry = Configured | Proposed | Judged | Emptied | Replaced | Taken | Stepped

_encode_into = msgspec.msgpack.Encoder().encode_into
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


class Journal:
    """Appends to segment `serial`. One writer, the coordinator."""

    def __init__(self, directory: Path):
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._entries: list[Entry] = []
        self._frame = bytearray()
        self._file: tuple[weakref.finalize, int] | None = None  # what closes the present segment, and its descriptor
        self.serial = 0
        self._num_bytes = 0  # of the present segment
        self._followed = [0]  # the segments that follow the newest checkpoints

    def write(self, entry: Entry) -> None:
        """Durable after the next `flush`."""
        self._entries.append(entry)

    def flush(self) -> None:
        if not self._entries:
            return
        if self._file is None:  # it stays open: to open it costs more than to write a turn
            fd = os.open(self._path(self.serial), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._file = weakref.finalize(self, os.close, fd), fd
        _, fd = self._file
        frame, size = [], 0
        for entry in self._entries:
            for part, num_items in _parts(entry):
                frame.append(part)
                size += num_items
                if size >= FRAME_ITEMS:
                    self._write_frame(fd, frame)
                    frame, size = [], 0
        if frame:
            self._write_frame(fd, frame)
        self._num_bytes = os.lseek(fd, 0, os.SEEK_CUR)
        self._entries.clear()

    def _write_frame(self, fd: int, entries: list[Entry]) -> None:
        _encode_into(entries, self._frame, _HEADER.size)
        with memoryview(self._frame) as frame, frame[_HEADER.size :] as payload:
            _HEADER.pack_into(frame, 0, len(payload), xxhash.xxh3_64_intdigest(payload))
            num_written = 0
            while num_written < len(frame):
                num_written += os.write(fd, frame[num_written:])

    @property
    def is_long(self) -> bool:
        """Whether it is time for a checkpoint, after which this starts again."""
        return self._num_bytes > MAX_SEGMENT_BYTES

    def begin_segment(self) -> None:
        """Go on in the next segment, which follows the checkpoint that is begun now."""
        self.flush()
        if self._file is not None:
            close, _ = self._file
            close()
        self.serial, self._num_bytes, self._file = self.serial + 1, 0, None

    def drop_before(self, serial: int, is_again: bool = False) -> None:
        """The checkpoint that segment `serial` follows is published, in the place of the one before it if `is_again`:
        delete what no checkpoint needs that is kept.
        """
        kept = self._followed[:-1] if is_again else self._followed
        self._followed = [*kept[1 - NUM_KEPT :], serial]
        for path in self._segments():
            if int(path.name) < self._followed[0]:
                path.unlink()

    def replay(self, serial: int) -> Iterator[Entry]:
        """The entries that follow a checkpoint naming segment `serial`; then appends after the last of them.

        What follows a torn or missing entry cannot be reached from the checkpoint any more and is removed. Raises
        OtherVersion for whole entries that this version does not know.
        """
        self.serial, expected = serial, serial
        segments = self._segments()
        self._followed = [*(int(path.name) for path in segments[:1] if int(path.name) < serial), serial]
        for path in segments:
            if int(path.name) < serial:
                continue
            if int(path.name) != expected:
                path.unlink()
                continue
            self.serial, expected = expected, expected + 1
            data, offset = path.read_bytes(), 0
            while (end := _entry_end(data, offset)) is not None:
                yield from _entries(path, data[offset + _HEADER.size : end])
                offset = end
            if offset < len(data):
                with path.open("r+b") as file:
                    file.truncate(offset)
                expected = -1

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob("[0-9]*"))

    def _path(self, serial: int) -> Path:
        return self._directory / f"{serial:06d}"


def _parts(entry: Entry) -> Iterator[tuple[Entry, int]]:
    """What amounts to the same in entries of about a frame at most, each with what it counts for in one."""
    if not isinstance(entry, Judged):
        yield entry, 1
        return
    some: list[Result] = []
    num_items = 0
    for result in entry.results:
        some.append(result)
        num_items += 1 + len(result.rollout.completion_ids) // _ITEM_BYTES
        if num_items >= FRAME_ITEMS:
            yield Judged(some), num_items
            some, num_items = [], 0
    if some:
        yield Judged(some), num_items


def _entries(path: Path, frame: bytes) -> list[Entry]:
    try:
        return _decode(frame)
    except msgspec.DecodeError as e:
        raise OtherVersion(
            f"{path}: of another version of this package ({e}); resume with that version, or delete {path.parent} to "
            "go on from the checkpoint alone"
        ) from None


def _entry_end(data: bytes, offset: int) -> int | None:
    """Where the entry at `offset` ends; None if there is no whole, intact one."""
    if len(data) < offset + _HEADER.size:
        return None
    length, digest = _HEADER.unpack_from(data, offset)
    end = offset + _HEADER.size + length
    if len(data) < end or xxhash.xxh3_64_intdigest(data[offset + _HEADER.size : end]) != digest:
        return None
    return end
