"""Checkpoints as the coordinator sees them: a directory with the learner's part and its own, published by one rename.

`RUN/checkpoints/step_000010/` holds what the learner wrote and `coordinator.msgpack`. A directory whose name starts
with a dot is unfinished and never read.
"""

import os
import shutil
from pathlib import Path

import msgspec
import xxhash

from pipeline.coordinator.batcher import BatcherState
from pipeline.coordinator.book import BookState
from pipeline.coordinator.starvation import StarvationState
from pipeline.errors import NguError
from pipeline.ledger import VerdictRow
from pipeline.manifest import sync, verify_manifest
from pipeline.messages import Group

NUM_KEPT = 2
_FILE = "coordinator.msgpack"


class Snapshot(msgspec.Struct):
    """Everything but the learner's part that the run needs to go on from `policy_version`."""

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
    verdicts: dict[int, VerdictRow] = msgspec.field(default_factory=dict)  # of open attempts, which the ledger lacks


def partial_dir(run_dir: Path, step: int) -> Path:
    """Where the parts of the checkpoint at `step` are written before it is published."""
    return run_dir / "checkpoints" / f".step_{step:06d}.partial"


def encode(snapshot: Snapshot) -> bytes:
    return msgspec.msgpack.encode(snapshot)


def publish(run_dir: Path, directory: Path, policy_version: int, data: bytes) -> Path:
    """Add the coordinator's part, an encoded snapshot, to the learner's in `directory` and make the checkpoint visible;
    keeps the newest `NUM_KEPT`.
    """
    with (directory / _FILE).open("wb") as file:
        file.write(xxhash.xxh3_64_digest(data))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    final = run_dir / "checkpoints" / f"step_{policy_version:06d}"
    if final.exists():  # the last periodic checkpoint and the closing one can fall on the same step
        shutil.rmtree(final)
    directory.rename(final)
    sync(final.parent)
    for old in _complete(run_dir)[:-NUM_KEPT]:
        shutil.rmtree(old)
    return final


def load(path: Path) -> Snapshot:
    """Raises NguError when the coordinator's part is missing or torn."""
    try:
        raw = (path / _FILE).read_bytes()
        digest, data = raw[:8], raw[8:]
        if xxhash.xxh3_64_digest(data) != digest:
            raise ValueError("checksum mismatch")
        return msgspec.msgpack.decode(data, type=Snapshot)
    except (OSError, ValueError, msgspec.DecodeError) as e:
        raise NguError(
            f"{path / _FILE}: unusable checkpoint ({e}); delete the directory to resume from the one before"
        ) from None


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint of which every byte is intact, or None."""
    for path in reversed(_complete(run_dir)):
        try:
            verify_manifest(path)
            load(path)
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
    complete = _complete(run_dir)
    return int(complete[0].name.removeprefix("step_")) if complete else 0


def _complete(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))
