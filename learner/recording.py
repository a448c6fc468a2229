"""What the learner was given at each step, kept so that `ngu replay` can take the step again.

`RUN/steps/000012.msgpack` is step 12, which made policy version 12: a checksum of 8 bytes, then the record. The newest
are kept, as many as fit into `daemon.replay_gib`.
"""

from pathlib import Path

import msgspec
import xxhash

from pipeline.errors import NguError
from pipeline.learner_config import LearnerConfig
from pipeline.messages import Batch
from pipeline.rundir import write_atomic

DIGEST_BYTES = 8
REFUSED_KEPT = 8  # after so many in a row the run ends


class StepRecord(msgspec.Struct, frozen=True):
    """One optimizer step: its batch as it came over the wire, the config in force, and the weights that it gave.

    `checksum` is the `WeightsNotice.checksum` of the policy version that the step made.
    """

    step: int
    batch: Batch
    config: LearnerConfig
    checksum: str


class Recorder:
    """Writes the steps of a learner that stands at `policy_version`, and forgets the oldest beyond `limit_gib`.

    Steps after that version were taken by a learner that died; the same ones will be taken, and recorded, again.
    """

    def __init__(self, run_dir: Path, limit_gib: float, policy_version: int):
        self._directory = run_dir / "steps"
        self._limit_bytes = int(limit_gib * 2**30)
        for step, path in _files(run_dir).items():
            if step > policy_version:
                path.unlink()

    def write(self, record: StepRecord) -> None:
        if not self._limit_bytes:
            return
        self._directory.mkdir(exist_ok=True)
        data = msgspec.msgpack.encode(record)
        write_atomic(self._directory / f"{record.step:06d}.msgpack", xxhash.xxh3_64_digest(data) + data)
        self._prune()

    def _prune(self) -> None:
        kept_bytes = 0
        for path in reversed(_files(self._directory.parent).values()):
            kept_bytes += path.stat().st_size
            if kept_bytes > self._limit_bytes:
                path.unlink()


def keep_refused(run_dir: Path, step: int, batch: Batch) -> Path:
    """A batch that could not be trained on is evidence: keep it as it came over the wire, and some before it."""
    path = run_dir / "refused" / f"batch_{step:06d}.msgpack"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(batch))
    for old in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-REFUSED_KEPT]:
        old.unlink()
    return path


def recorded_steps(run_dir: Path) -> list[int]:
    """The steps of which a record is kept, ascending."""
    return list(_files(run_dir))


def read_record(run_dir: Path, step: int) -> StepRecord:
    """Raises NguError when the record is missing or torn."""
    path = run_dir / "steps" / f"{step:06d}.msgpack"
    try:
        raw = path.read_bytes()
        if xxhash.xxh3_64_digest(raw[DIGEST_BYTES:]) != raw[:DIGEST_BYTES]:
            raise ValueError("checksum mismatch")
        return msgspec.msgpack.decode(raw[DIGEST_BYTES:], type=StepRecord)
    except (OSError, ValueError, msgspec.DecodeError) as e:
        raise NguError(f"{path}: unusable record of step {step} ({e}); replay steps that do not need it") from None


def _files(run_dir: Path) -> dict[int, Path]:
    return dict(sorted((int(path.stem), path) for path in (run_dir / "steps").glob("[0-9]*.msgpack")))
