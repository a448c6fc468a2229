"""Forward passes of the covered architectures, written for decoding many short rows on one core of a CPU.

The library multiplies matrices; what a step does in between is compiled (`kernels`). Prompts, with many queries a row,
attend through the library's fused kernel.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.engines.embedded import kernels
from pipeline.engines.embedded.cache import KVCache
from pipeline.engines.embedded.shape import ModelShape
from pipeline.engines.embedded.weights import Layer, Weights, rotations
from pipeline.messages import WeightsNotice
from pipeline.weights import WeightsReader

# The cache grows by so many positions at a time, as growing copies it.
_BLOCK = 16
# A prefill pass holds at most this many tokens, padding included, or one longer prompt. In a core's own cache a token
# takes three quarters of the time that it takes in passes of eight thousand.
_PREFILL_TOKENS = 1024


class EmbeddedDecoder:
    """The `Decoder` for llama, qwen2 and qwen3 models in float32."""

    device = torch.device("cpu")

    def __init__(self, config: Any, slots: int):
        self.shape = ModelShape.of(config)
        self.min_admit = max(1, slots // 8)  # a pass over one or two prompts takes as long as over several
        self.max_tokens = self.shape.max_tokens
        self._config = config
        self._norm_eps = np.float32(self.shape.norm_eps)
        self._rotations = np.empty((0, self.shape.head_dim // 2, 2), dtype=np.float32)
        self._cache = KVCache(self.shape.num_layers, slots, self.shape.num_kv_heads, self.shape.head_dim)
        self._scores = np.empty((self.shape.num_heads // self.shape.num_kv_heads, 0), dtype=np.float32)
        self._slots: list[int] = []
        self._positions: list[int] = []  # of each row's next token
        # What each row's cache begins with, or None where that was computed under earlier weights.
        self._prefixes: list[tuple[int, ...] | None] = []
        self._weights: Weights | None = None
        self._spare: Weights | None = None
        self._reader = WeightsReader()

    def load(self, notice: WeightsNotice) -> None:
        """Twice the weights' memory, for good: a version is checked only when it has been copied, and the one that
        serves must be whole until then.
        """
        spare = self._spare = self._spare or Weights(self.shape)
        with self._reader.open(notice) as weights:
            spare.load(weights)
        self._weights, self._spare = spare, self._weights
        self._prefixes = [None] * len(self._prefixes)

    def score(self, ids: Tensor) -> Tensor:
        hidden = self._forward_prompts(ids[None, :-1], [])
        logprobs = torch.log_softmax(self._logits(hidden), dim=-1)
        return logprobs.gather(1, ids[1:, None]).squeeze(1)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def admit(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> None:
        """The last prompt token is left to the first `decode`, which then samples from it like from any other.

        The rest is computed once however many rows share it, and not at all if a running row began with it.
        """
        self._reserve(max(max_tokens))
        running = {prefix: slot for prefix, slot in zip(self._prefixes, self._slots, strict=True) if prefix is not None}
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:
            prefix, slot = tuple(prompt[:-1]), self._cache.take()
            slots_of.setdefault(prefix, []).append(slot)
            self._slots.append(slot)
            self._positions.append(len(prefix))
            self._prefixes.append(prefix)
        for prefix in slots_of.keys() & running.keys():
            self._cache.copy(running[prefix], slots_of.pop(prefix), len(prefix))
        prefixes = sorted((p for p in slots_of if p), key=len)
        while prefixes:
            size = max(1, _PREFILL_TOKENS // len(prefixes[-1]))
            batch, prefixes = prefixes[-size:], prefixes[:-size]
            self._prefill(batch, [slots_of[p] for p in batch])

    def retire(self, rows: Collection[int]) -> list[int]:
        for row in rows:
            self._cache.give_back(self._slots[row])
        order = [row for row in range(len(self._slots)) if row not in rows]
        self._slots = [self._slots[row] for row in order]
        self._positions = [self._positions[row] for row in order]
        self._prefixes = [self._prefixes[row] for row in order]
        return order

    def _reserve(self, num_positions: int) -> None:
        if num_positions > self._cache.num_positions:
            self._cache.reserve(-(-num_positions // _BLOCK) * _BLOCK)
            self._scores = np.empty((len(self._scores), self._cache.num_positions), dtype=np.float32)

    # --- one token a row ----------------------------------------------------------------------------------------------

    def decode(self, tokens: Tensor) -> Tensor:
        assert self._weights is not None
        slots, positions = np.array(self._slots), np.array(self._positions)
        rotations = self._rotation(max(self._positions) + 1)
        x = self._weights.embedding[tokens]
        for layer, (keys, values) in zip(self._weights.layers, self._cache.layers, strict=True):
            heads = self._heads(layer, x, rotations, positions)
            attended = torch.empty(x.shape[0], self.shape.num_heads, self.shape.head_dim)
            kernels.attend(heads.numpy(), slots, positions, keys, values, self._scores, attended.numpy())
            x = layer.out.add_to(x, attended.flatten(1))
            x = self._mlp(layer, x)
        self._positions = [p + 1 for p in self._positions]
        return self._logits(x)

    # --- whole prompts ------------------------------------------------------------------------------------------------

    def _prefill(self, prefixes: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> None:
        """Fill the cache of `slots[i]` with `prefixes[i]`, each computed once, however many rows share it."""
        longest = max(map(len, prefixes))
        ids = torch.zeros(len(prefixes), longest, dtype=torch.long)
        for i, prefix in enumerate(prefixes):
            ids[i, : len(prefix)] = torch.tensor(prefix)
        self._forward_prompts(ids, slots)

    def _forward_prompts(self, ids: Tensor, slots: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [prompts * time, hidden] of right-padded `ids` [prompts, time]; fills the cache of `slots`.

        Padding needs no mask: under causal attention no token looks at what comes after it.
        """
        assert self._weights is not None
        num_prompts, length = ids.shape
        rotations, positions = self._rotation(length), np.tile(np.arange(length), num_prompts)
        flat = [slot for group in slots for slot in group]
        prompts = [i for i, group in enumerate(slots) for _ in group]
        x = self._weights.embedding[ids.flatten()]
        for index, layer in enumerate(self._weights.layers):
            heads = self._heads(layer, x, rotations, positions).unflatten(0, (num_prompts, length))
            if flat:
                self._cache.write_prompts(index, flat, heads[prompts, :, self.shape.num_heads :])
            kinds = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
            query, key, value = (t.transpose(1, 2) for t in heads.split(kinds, dim=2))
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = layer.out.add_to(x, attended.transpose(1, 2).reshape(x.shape[0], -1))
            x = self._mlp(layer, x)
        return x

    # --- shared by both -----------------------------------------------------------------------------------------------

    def _heads(self, layer: Layer, x: Tensor, rotations: np.ndarray, positions: np.ndarray) -> Tensor:
        """Queries, keys and values [tokens, heads + 2 * kv_heads, dim] of tokens at `positions`."""
        heads = layer.qkv(self._norm(x, layer.attention_norm)).view(x.shape[0], -1, self.shape.head_dim)
        array = heads.numpy()
        if layer.qk_norm is not None:
            kernels.norm_heads(array, layer.qk_norm, self._norm_eps)
        kernels.turn(array, self.shape.num_heads + self.shape.num_kv_heads, rotations, positions)
        return heads

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._norm(x, layer.mlp_norm)).numpy()
        gated = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=np.float32)
        kernels.gate(gate_up, gated)
        return layer.down.add_to(x, torch.from_numpy(gated))

    def _norm(self, x: Tensor, weight: np.ndarray) -> Tensor:
        normed = np.empty(x.shape, dtype=np.float32)
        kernels.rms_norm(x.numpy(), weight, self._norm_eps, normed)
        return torch.from_numpy(normed)

    def _logits(self, x: Tensor) -> Tensor:
        assert self._weights is not None
        return functional.linear(self._norm(x, self._weights.norm), self._weights.head)

    def _rotation(self, num_positions: int) -> np.ndarray:
        if len(self._rotations) < num_positions:  # twice as many, or every step of a longest row would compute all
            self._rotations = torch.view_as_real(rotations(self._config, 2 * num_positions)).numpy()
        return self._rotations
