"""What a decoding step does between its matrix products, compiled for the CPU at hand.

Rows of a batch are short and differ in length: as library calls, attention reads every row up to the longest, and each
small operation costs more to start than to do. Arrays are contiguous.
"""

from functools import partial
from math import sqrt

import numpy as np
from numba import njit

from pipeline.compiled import compiled

# Sums may be reordered, which is what lets them be vectors. No assumption that numbers are finite: weights that are not
# must show in the logprobs.
_REORDERED = {"reassoc", "contract", "arcp", "nsz"}
_f32 = np.float32
_LOWEST = _f32(-87)  # e^x below it is no normal float32; what attention weighs by it is 0 beside the largest weight, 1
_HIGHEST = _f32(89)  # its e^x is inf
_compiled = partial(compiled, fastmath=_REORDERED, error_model="numpy")


@njit(inline="always")
def _exp(x):
    """e^x to a few units of the last place for x in [-87, 89], where it is inf from 88.4 on: 2^n times a polynomial on
    half an octave either way, without a branch or a table, so that a loop of it becomes vectors.
    """
    n = np.floor(x * _f32(1.4426950408889634) + _f32(0.5))
    f = x - n * _f32(0.693359375) + n * _f32(2.12194440e-4)  # ln 2 in two parts (Cody and Waite)
    p = _f32(1 / 5040)
    p = p * f + _f32(1 / 720)
    p = p * f + _f32(1 / 120)
    p = p * f + _f32(1 / 24)
    p = p * f + _f32(1 / 6)
    p = p * f + _f32(0.5)
    p = p * f + _f32(1)
    p = p * f + _f32(1)
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@_compiled("void(f4[:, ::1], f4[::1], f4, f4[:, ::1])")
def rms_norm(x, weight, eps, out):
    """RMSNorm (arXiv:1910.07467, eq. 4): `x` and `out` [rows, dim], `weight` [dim]."""
    rows, dim = x.shape
    for r in range(rows):
        square = _f32(0)
        for i in range(dim):
            square += x[r, i] * x[r, i]
        scale = _f32(1) / np.sqrt(square / _f32(dim) + eps)
        for i in range(dim):
            out[r, i] = x[r, i] * scale * weight[i]


@_compiled("void(f4[:, :, ::1], f4[:, ::1], f4)")
def norm_heads(heads, weight, eps):
    """The same of each head apart, in place: of the first of `heads` [rows, heads, dim], as many as `weight` has
    [heads, dim].
    """
    dim = heads.shape[2]
    for r in range(heads.shape[0]):
        for h in range(weight.shape[0]):
            square = _f32(0)
            for i in range(dim):
                square += heads[r, h, i] * heads[r, h, i]
            scale = _f32(1) / np.sqrt(square / _f32(dim) + eps)
            for i in range(dim):
                heads[r, h, i] *= scale * weight[h, i]


@_compiled("void(f4[:, ::1], f4[:, ::1])")
def gate(gate_up, out):
    """SwiGLU's silu(gate) * up (arXiv:2002.05202): `gate_up` [rows, 2 * dim], `out` [rows, dim]."""
    rows, dim = out.shape
    for r in range(rows):
        for i in range(dim):
            x = gate_up[r, i]
            out[r, i] = x / (_f32(1) + _exp(min(max(-x, _LOWEST), _HIGHEST))) * gate_up[r, dim + i]


@_compiled("void(f4[:, :, ::1], i8, f4[:, :, ::1], i8[::1])")
def turn(heads, num_turned, rotations, positions):
    """RoPE (arXiv:2104.09864, eq. 34) in place: the first `num_turned` of `heads` [rows, heads, dim], whose numbers are
    pairs side by side, by `rotations` [position, dim / 2, 2 (cosine, sine)] at `positions` [rows].
    """
    half = heads.shape[2] // 2
    for r in range(heads.shape[0]):
        p = positions[r]
        for h in range(num_turned):
            for i in range(half):
                a, b = heads[r, h, 2 * i], heads[r, h, 2 * i + 1]
                c, s = rotations[p, i, 0], rotations[p, i, 1]
                heads[r, h, 2 * i] = a * c - b * s
                heads[r, h, 2 * i + 1] = a * s + b * c


# All queries of a key-value head meet four positions before the next four: what they share is read from memory once,
# and what one has of its own a quarter as often. Lengths and places are passed because a slice counts its references.


@_compiled("void(f4[:, ::1], i8, f4[:, ::1], i8, f4, f4[:, ::1])")
def _score(queries, first, keys, num, scale, out):
    group, dim = len(out), queries.shape[1]
    fours = num // 4 * 4
    for t in range(0, fours, 4):
        for j in range(group):
            a, b, c, d = _f32(0), _f32(0), _f32(0), _f32(0)
            for i in range(dim):
                x = queries[first + j, i]
                a += x * keys[t, i]
                b += x * keys[t + 1, i]
                c += x * keys[t + 2, i]
                d += x * keys[t + 3, i]
            out[j, t], out[j, t + 1], out[j, t + 2], out[j, t + 3] = a * scale, b * scale, c * scale, d * scale
    for t in range(fours, num):
        for j in range(group):
            a = _f32(0)
            for i in range(dim):
                a += queries[first + j, i] * keys[t, i]
            out[j, t] = a * scale


@_compiled("void(f4[:, ::1], i8)")
def _softmax(x, num):
    for j in range(len(x)):
        top = x[j, 0]
        for t in range(1, num):
            top = max(top, x[j, t])
        total = _f32(0)
        for t in range(num):
            e = _exp(max(x[j, t] - top, _LOWEST))
            x[j, t] = e
            total += e
        scale = _f32(1) / total
        for t in range(num):
            x[j, t] *= scale


@_compiled("void(f4[:, ::1], f4[:, ::1], i8, f4[:, ::1], i8)")
def _weigh(weights, rows, num, out, first):
    group, dim = len(weights), out.shape[1]
    fours = num // 4 * 4
    for j in range(group):
        for i in range(dim):
            out[first + j, i] = _f32(0)
    for t in range(0, fours, 4):
        for j in range(group):
            a, b, c, d = weights[j, t], weights[j, t + 1], weights[j, t + 2], weights[j, t + 3]
            for i in range(dim):
                out[first + j, i] += a * rows[t, i] + b * rows[t + 1, i] + c * rows[t + 2, i] + d * rows[t + 3, i]
    for t in range(fours, num):
        for j in range(group):
            a = weights[j, t]
            for i in range(dim):
                out[first + j, i] += a * rows[t, i]


@_compiled("void(f4[:, :, ::1], i8[::1], i8[::1], f4[:, :, :, ::1], f4[:, :, :, ::1], f4[:, ::1], f4[:, :, ::1])")
def attend(heads, slots, positions, keys, values, scores, out):
    """One query a row and head against its own slot's positions 0..p, after writing position p.

    `heads` [rows, queries + 2 * kv_heads, dim]: queries, then keys, then values; `keys` and `values` [slot, kv_head,
    time, dim]; `scores` [queries a kv head, time] is scratch; `out` [rows, queries, dim]. The queries of a kv head lie
    together, as everywhere with grouped queries (arXiv:2305.13245).
    """
    rows, num_queries, dim = out.shape
    num_kv, group = keys.shape[1], len(scores)
    scale = _f32(1 / sqrt(dim))
    for r in range(rows):
        slot, last = slots[r], positions[r]
        for k in range(num_kv):
            for i in range(dim):
                keys[slot, k, last, i] = heads[r, num_queries + k, i]
                values[slot, k, last, i] = heads[r, num_queries + num_kv + k, i]
            _score(heads[r], k * group, keys[slot, k], last + 1, scale, scores)
            _softmax(scores, last + 1)
            _weigh(scores, values[slot, k], last + 1, out[r], k * group)
