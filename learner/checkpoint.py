"""The learner's part of a checkpoint: exact weights, optimizer, random state and counters, sealed by a manifest.

`DIR/model/` is an ordinary Hugging Face directory, so a checkpoint is also what `[model] path` can name. The manifest
is written last and names every file with its size and checksum, so a part that was torn at any byte is refused.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from learner.learner import Learner
from pipeline.errors import WeightError

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
COUNTERS = "learner.json"
MANIFEST = "learner.manifest"
_RNG = "rng"
_SEAL_BYTES = 17  # 16 hexadecimal digits and a line end


class Counters(msgspec.Struct, frozen=True):
    policy_version: int
    num_skipped: int
    num_skipped_in_a_row: int


def save_checkpoint(directory: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the learner's part into `directory`, replacing what an interrupted try left there."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory / MODEL, ignore_errors=True)
    learner.model.save_pretrained(directory / MODEL)
    tokenizer.save_pretrained(directory / MODEL)
    save_file(learner.optimizer_tensors() | {_RNG: torch.get_rng_state()}, directory / OPTIMIZER)
    counters = Counters(learner.policy_version, learner.num_skipped, learner.num_skipped_in_a_row)
    (directory / COUNTERS).write_bytes(msgspec.json.encode(counters))
    for path in _parts(directory):
        _sync(path)
    body = "".join(f"{_entry(directory, path)}\n" for path in _parts(directory)).encode()
    (directory / MANIFEST).write_bytes(body + _seal(body))
    _sync(directory / MANIFEST)
    _sync(directory / MODEL)
    _sync(directory)


def verify_checkpoint(directory: Path) -> None:
    """Raise WeightError unless every byte of the learner's part is the one that was written."""
    path = directory / MANIFEST
    try:
        written = path.read_bytes()
    except OSError:
        raise WeightError(f"{path}: missing, so the checkpoint is unfinished; resume from another one") from None
    body, seal = written[:-_SEAL_BYTES], written[-_SEAL_BYTES:]
    if _seal(body) != seal:
        raise WeightError(f"{path}: torn; resume from another checkpoint")
    for line in body.decode().splitlines():
        file = directory / line.split(" ", 2)[2]
        if not file.is_file() or _entry(directory, file) != line:
            raise WeightError(f"{file}: torn or missing; resume from another checkpoint")


def load_checkpoint(directory: Path, learner: Learner) -> None:
    """Give `learner`, whose model was loaded from `directory / MODEL`, the rest of its state back.

    Raises WeightError when the checkpoint is torn or its optimizer belongs to another model.
    """
    verify_checkpoint(directory)
    tensors = load_file(directory / OPTIMIZER)
    torch.set_rng_state(tensors.pop(_RNG))
    try:
        learner.load_optimizer_tensors(tensors)
    except KeyError as e:
        raise WeightError(f"{directory / OPTIMIZER}: the model has no parameter {e}; it is another model's") from None
    counters = msgspec.json.decode((directory / COUNTERS).read_bytes(), type=Counters)
    learner.policy_version = counters.policy_version
    learner.num_skipped = counters.num_skipped
    learner.num_skipped_in_a_row = counters.num_skipped_in_a_row


def _parts(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in (directory / MODEL).rglob("*") if path.is_file())
    yield directory / OPTIMIZER
    yield directory / COUNTERS


def _entry(directory: Path, path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return f"{digest.hexdigest()} {path.stat().st_size} {path.relative_to(directory)}"


def _seal(body: bytes) -> bytes:
    """The manifest's last line: the checksum of those before it."""
    return f"{xxhash.xxh3_64_hexdigest(body)}\n".encode()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
