"""The compiled part of a decoding step against float64, at sizes of real models and numbers of broken ones."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core import caching, config
from torch.nn import functional

from pipeline.engines.embedded import kernels

f32 = np.float32


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(f32)


def attended(heads, slots, positions, keys, values) -> np.ndarray:
    """[rows, queries, dim] from the kernel, which writes each row's newest key and value into the cache."""
    num_kv = keys.shape[1]
    out = np.empty((len(heads), heads.shape[1] - 2 * num_kv, heads.shape[2]), dtype=f32)
    scores = np.full((out.shape[1] // keys.shape[1], keys.shape[2]), np.nan, dtype=f32)
    kernels.attend(heads, np.array(slots), np.array(positions), keys, values, scores, out)
    return out


def exact(heads, slots, positions, keys, values) -> np.ndarray:
    """The same in float64, from a cache that has been written to."""
    num_kv, dim = keys.shape[1], heads.shape[2]
    out = np.empty((len(heads), heads.shape[1] - 2 * num_kv, dim))
    for row, (slot, last) in enumerate(zip(slots, positions, strict=True)):
        for head in range(out.shape[1]):
            kv = head * num_kv // out.shape[1]
            score = keys[slot, kv, : last + 1].astype(float) @ heads[row, head].astype(float) / np.sqrt(dim)
            weight = np.exp(score - score.max())
            out[row, head] = weight @ values[slot, kv, : last + 1] / weight.sum()
    return out


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("queries", "num_kv"), [(1, 1), (8, 1), (9, 3), (6, 2), (4, 4)])
def test_attention_is_that_of_float64(dim, queries, num_kv):
    positions, slots, num_slots = [0, 1, 2, 3, 4, 37], [5, 0, 3, 1, 6, 2], 7
    heads = drawn(len(slots), queries + 2 * num_kv, dim)
    keys, values = drawn(num_slots, num_kv, 40, dim, seed=1), drawn(num_slots, num_kv, 40, dim, seed=2)
    for slot, position in zip(slots, positions, strict=True):  # what an earlier row has left must never be read
        keys[slot, :, position:] = values[slot, :, position:] = np.nan
    untouched = keys.copy()
    out = attended(heads, slots, positions, keys, values)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        np.testing.assert_array_equal(keys[slot, :, position], heads[row, queries : queries + num_kv])
        np.testing.assert_array_equal(values[slot, :, position], heads[row, queries + num_kv :])
        untouched[slot, :, position] = keys[slot, :, position]
    np.testing.assert_array_equal(keys, untouched)
    np.testing.assert_allclose(out, exact(heads, slots, positions, keys, values), rtol=0, atol=3e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 3000.0])
def test_long_rows_and_scores_far_apart_stay_close_to_float64(scale):
    """No farther from it than torch is; at the larger scales scores differ by far more than e^x can in float32."""
    heads, last = drawn(1, 6, 64, scale=scale), 4095
    keys, values = drawn(1, 2, last + 1, 64, seed=1), drawn(1, 2, last + 1, 64, seed=2)
    out = attended(heads, [0], [last], keys, values)
    wanted = exact(heads, [0], [last], keys, values)
    query, key, value = (torch.from_numpy(a)[None] for a in (heads[0, :2, None], keys[0], values[0]))
    theirs = functional.scaled_dot_product_attention(query, key, value)[0, :, 0].numpy()
    assert np.abs(out[0] - wanted[0]).max() <= 2 * np.abs(theirs - wanted[0]).max() + 1e-6


def test_what_is_no_number_stays_none():
    """Weights that overflowed must show in the logprobs; comparisons with NaN must not lose it on the way."""
    for bad in (np.nan, np.inf, -np.inf):
        for row in range(5):
            keys = drawn(1, 1, 8, 16)
            keys[0, 0, row] = bad
            heads = np.abs(drawn(1, 3, 16))
            out = attended(heads, [0], [6], keys, drawn(1, 1, 8, 16, seed=1))
            if bad == -np.inf:  # weighs nothing
                assert np.isfinite(out).all()
            else:
                assert np.isnan(out).all(), (bad, row)
        for up in (1.0, bad):
            out = np.zeros((1, 1), dtype=f32)
            kernels.gate(np.array([[bad, up]], dtype=f32), out)
            assert not np.isfinite(out).all(), (bad, up)
        x = drawn(1, 24)
        x[0, 5] = bad
        out = np.zeros_like(x)
        kernels.rms_norm(x, np.ones(24, dtype=f32), f32(1e-6), out)
        assert np.isnan(out).any()
        heads = x.reshape(1, 3, 8)
        kernels.norm_heads(heads, np.ones((2, 8), dtype=f32), f32(1e-6))
        assert np.isnan(heads[0, 0]).any() and np.isfinite(heads[0, 1:]).all()


def test_the_gate_is_that_of_float64_over_all_of_float32():
    # Everything near 0, where silu is x / 2, to beyond what e^x can hold.
    x = np.concatenate([sign * np.logspace(-45, 38, 4000) for sign in (-1, 1)] + [np.linspace(-100, 100, 8001)])
    x = np.concatenate([x.astype(f32), [f32(0), f32(-0.0)]])
    out = np.empty((1, len(x)), dtype=f32)
    kernels.gate(np.concatenate([x, np.ones_like(x)])[None], out)
    with np.errstate(over="ignore"):
        wanted = x.astype(float) / (1 + np.exp(-x.astype(float)))
    np.testing.assert_allclose(out[0], wanted, rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("dim", [1, 7, 24, 576])
def test_norms_are_those_of_float64(dim):
    for scale in (1e-12, 1.0, 1e15):
        x, weight = drawn(3, dim, scale=scale), drawn(dim, seed=1)
        out = np.empty_like(x)
        kernels.rms_norm(x, weight, f32(1e-6), out)
        square = (x.astype(float) ** 2).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(out, x / np.sqrt(square + 1e-6) * weight, rtol=2e-6)
        heads = np.stack([x, x, x], axis=1)
        kernels.norm_heads(heads, np.stack([weight, 2 * weight]), f32(1e-6))
        np.testing.assert_allclose(heads[:, 0], out, rtol=2e-6)
        np.testing.assert_allclose(heads[:, 1], 2 * out, rtol=2e-6)
        np.testing.assert_array_equal(heads[:, 2], x)


def test_only_the_first_heads_are_turned():
    heads = drawn(4, 5, 6)
    before, positions = heads.copy(), np.array([0, 3, 3, 9])
    angles = np.arange(10)[:, None] * np.array([1.0, 0.1, 0.01])
    kernels.turn(heads, 3, np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(f32), positions)
    pairs = before.reshape(4, 5, 3, 2) @ np.array([1, 1j])
    pairs[:, :3] *= np.exp(1j * angles)[positions][:, None]
    np.testing.assert_allclose(heads.reshape(4, 5, 3, 2) @ np.array([1, 1j]), pairs, atol=1e-6)
    np.testing.assert_array_equal(heads[:, 3:], before[:, 3:])


# --- what is kept between processes ---


def count(x):
    x[0] += 1


def compiled_and_run() -> bool:
    """Whether it was taken from the cache."""
    made = kernels._compiled("void(f4[::1])")(count)
    x = np.zeros(1, dtype=f32)
    made(x)
    assert x[0] == 1
    return bool(made.stats.cache_hits)  # pyright: ignore[reportFunctionMemberAccess]


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [caching.UserProvidedCacheLocator])
    return tmp_path / "kept"


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data))]
)
def test_a_damaged_cache_is_made_anew(kept, suffix, damage):
    assert [compiled_and_run(), compiled_and_run()] == [False, True]
    (file,) = kept.glob(f"*/*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    assert [compiled_and_run(), compiled_and_run()] == [False, True]


def test_without_a_folder_or_room_in_it_every_process_compiles(kept, monkeypatch):
    kept.write_text("a file where the folder would be")
    assert [compiled_and_run(), compiled_and_run()] == [False, False]
    kept.unlink()

    def full(self, name, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert [compiled_and_run(), compiled_and_run()] == [False, False]
