"""A copy past the processor's caches, for bytes that are more than the caches hold.

An ordinary store reads the line of memory that it changes; one past the cache just writes it, so that a copy moves two
bytes for each one instead of three. The C library's memcpy does so too, but only in calls of hundreds of MiB.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pipeline.compiled import compiled

_WIDTH = 32  # bytes of a store, which lies at a multiple of them
_LINES = 4 * _WIDTH


def _stream_code(typing: Any, target: Any, source: Any, at: Any) -> Any:
    """`_WIDTH` bytes of `source` from `at` on to the same place of `target`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.VectorType(ir.IntType(8), _WIDTH).as_pointer()
        write_to, read_from = (
            builder.bitcast(
                builder.gep(context.make_array(kind)(context, builder, array).data, [arguments[2]]), pointer
            )
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        )
        store = builder.store(builder.load(read_from, align=1), write_to, align=_WIDTH)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, source, types.int64), generate


def _fence_code(typing: Any) -> Any:
    """Nobody sees a later store before the streamed ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_stream: Any = intrinsic(_stream_code)
_fence: Any = intrinsic(_fence_code)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    num = len(source)
    head = min(-target.ctypes.data % _WIDTH, num)
    tail = head + (num - head) // _LINES * _LINES
    for i in range(head):
        target[i] = source[i]
    for i in range(head, tail, _LINES):
        _stream(target, source, i)
        _stream(target, source, i + _WIDTH)
        _stream(target, source, i + 2 * _WIDTH)
        _stream(target, source, i + 3 * _WIDTH)
    for i in range(tail, num):
        target[i] = source[i]
    _fence()


stream_copy = compiled("void(u1[::1], u1[::1])", nogil=True)(_copy)
"""Copy `source` to `target`, uint8 [n] both, contiguous and apart."""
