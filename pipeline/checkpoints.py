"""Checkpoints as the coordinator sees them: a directory with the learner's part and its own, published by one rename.

`RUN/checkpoints/step_000010/` holds what the learner wrote and `coordinator.msgpack`. A directory whose name starts
with a dot is unfinished and never read.
"""

import shutil
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipeline.coordinator.batcher import BatcherState
from pipeline.coordinator.book import BookState
from pipeline.coordinator.starvation import StarvationState
from pipeline.errors import NguError, OtherVersion
from pipeline.manifest import sync, verify_manifest
from pipeline.messages import Group

NUM_KEPT = 2
_FILE = "coordinator.msgpack"
# The thread that encodes a checkpoint keeps the interpreter from the loop for no longer than this at a time, and then
# leaves it to the loop. What is encoded at once has so many items at most.
ENCODE_S, REST_S = 0.0002, 0.001
ENCODE_ITEMS = 16


class Snapshot(msgspec.Struct):
    """Everything but the learner's part that the run needs to go on from `policy_version`. What happens after it was
    taken changes nothing in it.
    """

    policy_version: int
    counters: dict[str, int]
    levels: dict[str, list[int]]
    wall_s: float
    sampler: dict[str, object]
    task: dict[str, object]
    book: BookState
    batcher: BatcherState
    pending: list[list[Group]]  # batches cut before a crash that the learner, which is older, has yet to train again
    journal: int  # the segment of the journal that follows
    is_holding: bool = False
    starvation: StarvationState = msgspec.field(default_factory=StarvationState)


def partial_dir(run_dir: Path, step: int) -> Path:
    """Where the parts of the checkpoint at `step` are written before it is published."""
    return run_dir / "checkpoints" / f".step_{step:06d}.partial"


def pieces(value: Any) -> Iterator[bytes]:
    """The bytes of `msgspec.msgpack.encode(value)`, in pieces that take microseconds each however much there is."""
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        yield _map_header(len(value))
        if len(value) <= ENCODE_ITEMS:  # few of whatever size; many are small
            for key, item in value.items():
                yield _encode(key)
                yield from pieces(item)
            return
        items = iter(value.items())
        while some := dict(islice(items, ENCODE_ITEMS)):
            yield _encode(some)[len(_map_header(len(some))) :]
    elif isinstance(value, list) and len(value) > ENCODE_ITEMS:
        yield _list_header(len(value))
        for first in range(0, len(value), ENCODE_ITEMS):
            some = value[first : first + ENCODE_ITEMS]
            yield _encode(some)[len(_list_header(len(some))) :]
    else:
        yield _encode(value)


_encode = msgspec.msgpack.Encoder().encode


def _map_header(num: int) -> bytes:
    return _header(num, 0x80, b"\xde", b"\xdf")


def _list_header(num: int) -> bytes:
    return _header(num, 0x90, b"\xdc", b"\xdd")


def _header(num: int, few: int, many: bytes, most: bytes) -> bytes:
    """How msgpack begins a map or a list of `num` items."""
    if num < 16:
        return bytes([few | num])
    return many + num.to_bytes(2, "big") if num < 1 << 16 else most + num.to_bytes(4, "big")


def publish(run_dir: Path, directory: Path, snapshot: Snapshot) -> Path:
    """Add the coordinator's part to the learner's in `directory` and make the checkpoint visible, once all of it is on
    the disk; keeps the newest `NUM_KEPT`.
    """
    _write(directory / _FILE, snapshot)
    for path in (*directory.rglob("*"), directory):
        sync(path)
    final = run_dir / "checkpoints" / f"step_{snapshot.policy_version:06d}"
    if final.exists():  # the last periodic checkpoint and the closing one can fall on the same step
        shutil.rmtree(final)
    directory.rename(final)
    sync(final.parent)
    for old in published(run_dir)[:-NUM_KEPT]:
        shutil.rmtree(old)
    return final


def _write(path: Path, snapshot: Snapshot) -> None:
    digest, began = xxhash.xxh3_64(), time.perf_counter()
    with path.open("wb") as file:
        file.write(digest.digest())  # its place
        for piece in pieces(snapshot):
            digest.update(piece)
            file.write(piece)
            if time.perf_counter() - began > ENCODE_S:
                time.sleep(REST_S)
                began = time.perf_counter()
        file.seek(0)
        file.write(digest.digest())


def load(path: Path) -> Snapshot:
    """Raises NguError when the coordinator's part is missing or torn, OtherVersion when it holds something else."""
    try:
        raw = (path / _FILE).read_bytes()
        digest, data = raw[:8], raw[8:]
        if xxhash.xxh3_64_digest(data) != digest:
            raise ValueError("checksum mismatch")
    except (OSError, ValueError) as e:
        raise NguError(
            f"{path / _FILE}: unusable checkpoint ({e}); delete the directory to resume from the one before"
        ) from None
    try:
        return msgspec.msgpack.decode(data, type=Snapshot)
    except msgspec.DecodeError as e:
        raise OtherVersion(
            f"{path / _FILE}: of another version of this package ({e}); resume with that version, or begin a new run "
            f"from the weights: `ngu train {path.parent.parent}/config.toml model.path={path}/model`"
        ) from None


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint of which every byte is intact, or None. Raises OtherVersion, as `load` does: to go on from
    nothing would lose the run.
    """
    for path in reversed(published(run_dir)):
        try:
            verify_manifest(path)
            load(path)
        except OtherVersion:
            raise
        except (NguError, OSError):  # torn; or replaced while it was read, by a coordinator that goes on
            continue
        return path
    return None


def take_over(partial: Path) -> Path:
    """The learner's part is whole: put it out of reach of `remove_partial`; returns where it is."""
    whole = partial.with_suffix(".whole")
    shutil.rmtree(whole, ignore_errors=True)  # a crash may have left one behind
    return partial.rename(whole)


def remove_partial(run_dir: Path) -> None:
    """Delete what a learner left half written; only while none writes."""
    _remove(run_dir, ".step_*.partial")


def remove_unfinished(run_dir: Path) -> None:
    """Delete what was not published; only while no process of the run lives."""
    _remove(run_dir, ".step_*")


def _remove(run_dir: Path, pattern: str) -> None:
    for directory in (run_dir / "checkpoints").glob(pattern):
        shutil.rmtree(directory)


def oldest_step(run_dir: Path) -> int:
    """The earliest step that the run could go back to; 0 if there is no checkpoint."""
    kept = published(run_dir)
    return step_of(kept[0]) if kept else 0


def published(run_dir: Path) -> list[Path]:
    """What was published and is kept, intact or not, the newest last; by number, as the millionth step has a longer
    name than the others.
    """
    return sorted((run_dir / "checkpoints").glob("step_*"), key=step_of)


def newest_bytes(run_dir: Path) -> int:
    """What the newest checkpoint takes of the disk; 0 if there is none, or it is being replaced."""
    try:
        return sum(path.stat().st_size for path in published(run_dir)[-1].rglob("*"))
    except (IndexError, FileNotFoundError):
        return 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))
