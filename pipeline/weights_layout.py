"""The bytes of a weights file: safetensors, tensors of wide elements first, then in the order of their names.

Written and read piece by piece, so that a byte that is hashed is in the processor's cache, where the copy has just
brought it. The other way round takes a tenth longer: the copy writes to memory while it reads, and a hash only reads.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from pipeline.errors import WeightError

if TYPE_CHECKING:
    from torch import Tensor

# Well within a processor's last cache; the calls for smaller ones cost more than a nearer cache saves.
PIECE_BYTES = 1 << 20
LENGTH_BYTES = 8  # of the header's length, little-endian, at the beginning of the file


class _Kind(NamedTuple):
    dtype: str
    itemsize: int


_KINDS = {
    "F64": _Kind("float64", 8),
    "F32": _Kind("float32", 4),
    "F16": _Kind("float16", 2),
    "BF16": _Kind("bfloat16", 2),
    "I64": _Kind("int64", 8),
    "I32": _Kind("int32", 4),
    "I16": _Kind("int16", 2),
    "I8": _Kind("int8", 1),
    "U8": _Kind("uint8", 1),
    "BOOL": _Kind("bool", 1),
}
_CODES = {kind.dtype: code for code, kind in _KINDS.items()}


class TensorEntry(NamedTuple):
    """Where one tensor lies in a weights file: bytes `begin` to `end`. `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


class _Place(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_place = msgspec.json.Decoder(_Place).decode


def file_parts(state_dict: "Mapping[str, Tensor]") -> "tuple[bytes, list[Tensor]]":
    """A weights file's header, and the tensors that follow it.

    Tied weights (one storage, several names) are there once, under the first name. Raises WeightError for a tensor of a
    kind that safetensors does not have.
    """
    tensors = sorted(_distinct(state_dict).items(), key=lambda item: (-item[1].element_size(), item[0]))
    return _header(tensors), [tensor for _, tensor in tensors]


def pieces(tensors: "Sequence[Tensor]") -> "Iterator[Tensor]":
    """The bytes of the tensors, one after the other, at most PIECE_BYTES at a time, in this machine's memory."""
    import torch

    for tensor in tensors:
        if tensor.numel():
            yield from tensor.cpu().reshape(-1).view(torch.uint8).split(PIECE_BYTES)


def torch_view(data: np.ndarray) -> "Tensor":
    """The same bytes. They are copied by torch: the C library's memcpy is several times slower on some processors where
    source and target lie at nearly the same place of their pages, and numpy's is that.
    """
    import torch

    return torch.from_numpy(data)


def read_entries(header: bytes | memoryview, num_bytes: int) -> list[TensorEntry]:
    """The tensors of a file of `num_bytes`, whose header this is, in the order of their place, which leaves no gaps.

    Raises ValueError for a header that describes no such file.
    """
    position = LENGTH_BYTES + len(header)
    try:
        found = _decode(header)
        found.pop("__metadata__", None)  # other writers' word on their file
        places = sorted(
            ((name, _decode_place(place)) for name, place in found.items()), key=lambda item: item[1].data_offsets
        )
    except msgspec.MsgspecError as e:
        raise ValueError(str(e)) from None
    start, entries = position, []
    for name, place in places:
        kind, (begin, end) = _KINDS.get(place.dtype), place.data_offsets
        if kind is None or start + begin != position or min(place.shape, default=0) < 0:
            raise ValueError(name)
        position += math.prod(place.shape) * kind.itemsize
        if start + end != position:
            raise ValueError(name)
        entries.append(TensorEntry(name, kind.dtype, place.shape, start + begin, start + end))
    if position != num_bytes:
        raise ValueError("bytes beyond the last tensor")
    return entries


def _header(tensors: "list[tuple[str, Tensor]]") -> bytes:
    places, begin = {}, 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _CODES:
            raise WeightError(f"tensor {name}: weights in {dtype} cannot be published; use one of {', '.join(_CODES)}")
        end = begin + tensor.numel() * tensor.element_size()
        places[name] = {"dtype": _CODES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(places, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the tensors' bytes are aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _distinct(state_dict: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    kept, seen = {}, set()
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach()
    return kept
