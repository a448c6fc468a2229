"""Weights from the learner to the engines of one host: a safetensors file per version, announced by its notice.

A version names exact bytes. The file is complete before its final name exists, and a reader checks size and checksum
of the very bytes that it then maps, so neither a torn write nor a file replaced in between can be served.
"""

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from pipeline.errors import WeightError
from pipeline.messages import WeightsNotice, pack_ids, pack_logprobs

if TYPE_CHECKING:
    from torch import Tensor

# Two versions stay readable: the newest, and the one an engine may have been told of just before.
KEPT_VERSIONS = 2

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class WeightPublisher:
    """Writes versions into `directory` (best under /dev/shm), which it owns: made here, removed by `close`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise WeightError(f"{directory}: cannot make the weights directory: {e.strerror}") from None
        for leftover in directory.glob("*.safetensors*"):
            leftover.unlink()

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
        from safetensors.torch import save_file

        path = self.directory / f"{policy_version}.safetensors"
        partial = path.with_suffix(".safetensors.partial")
        try:
            save_file(_distinct(state_dict), partial)
            checksum, num_bytes = _checksum(partial)
            partial.rename(path)
        except Exception as e:  # safetensors has its own error types for a full disk
            partial.unlink(missing_ok=True)
            raise WeightError(f"{path}: cannot write the weights: {e}; free space or use another directory") from e
        self._files = [f for f in self._files if f != path] + [path]
        while len(self._files) > KEPT_VERSIONS:
            self._files.pop(0).unlink(missing_ok=True)
        return WeightsNotice(
            policy_version=policy_version,
            path=str(path),
            checksum=checksum,
            num_bytes=num_bytes,
            model_dir=str(model_dir),
            canary_ids=pack_ids(canary_ids),
            canary_logprobs=pack_logprobs(canary_logprobs),
        )

    def close(self) -> None:
        """Remove the directory; engines that still map a file keep their bytes."""
        for file in self.directory.glob("*.safetensors*"):
            file.unlink(missing_ok=True)
        if self.directory.exists():
            self.directory.rmdir()


def weights_checksum(state_dict: "Mapping[str, Tensor]") -> str:
    """The checksum that a notice of these weights would carry."""
    from safetensors.torch import save

    return xxhash.xxh3_64_hexdigest(save(_distinct(state_dict)))


class TensorEntry(NamedTuple):
    """Where one tensor lies in a weights file: bytes `begin` to `end`. `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def open_weights(notice: WeightsNotice) -> tuple[mmap.mmap, list[TensorEntry]]:
    """The announced bytes, mapped, and the tensors in them in the order of their place, which leaves no gaps.

    Raises WeightError when the file is missing, cut short or not the announced bytes.
    """
    view = _map(Path(notice.path))
    if len(view) != notice.num_bytes:
        raise WeightError(f"{notice.path}: {len(view)} bytes, announced {notice.num_bytes}; publish the version again")
    if xxhash.xxh3_64_hexdigest(view) != notice.checksum:
        raise WeightError(f"{notice.path}: its bytes do not match the announced checksum; publish the version again")
    header_bytes = int.from_bytes(view[:8], "little")
    header = json.loads(view[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    entries = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        entries.append(TensorEntry(name, _DTYPES[entry["dtype"]], entry["shape"], start + begin, start + end))
    return view, sorted(entries, key=lambda e: e.begin)


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


def _distinct(state_dict: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    kept, seen = {}, set()
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().contiguous()
    return kept


def _checksum(path: Path) -> tuple[str, int]:
    view = _map(path)
    return xxhash.xxh3_64_hexdigest(view), len(view)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise WeightError(f"{path}: the weights file is empty; publish the version again")
            # Copy-on-write, since torch refuses to view memory that it could not write to.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as e:
        raise WeightError(
            f"{path}: cannot read the weights: {e.strerror}; a newer version may have replaced it"
        ) from None
