"""Forward passes of the covered architectures, written for decoding many short rows on one core.

Measured against scaled_dot_product_attention, two plain matrix products over the used part of the cache are twice as
fast for one query a row; prompts, with many queries a row, go through the fused kernel.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.engines.embedded.cache import KVCache
from pipeline.engines.embedded.shape import ModelShape
from pipeline.engines.embedded.weights import Layer, Weights, rotations
from pipeline.messages import WeightsNotice
from pipeline.weights import WeightsReader

# Attention reads the cache up to a multiple of this, so that matrix sizes repeat and rows stay aligned.
_BLOCK = 16
# A prefill pass holds at most this many tokens, padding included, or one longer prompt. In a core's own cache a token
# takes three quarters of the time that it takes in passes of eight thousand.
_PREFILL_TOKENS = 1024


class EmbeddedDecoder:
    """The `Decoder` for llama, qwen2 and qwen3 models in float32."""

    def __init__(self, config: Any, slots: int, device: torch.device):
        self.shape = ModelShape.of(config)
        self.min_admit = max(1, slots // 8)  # a pass over one or two prompts takes as long as over several
        self.max_tokens = self.shape.max_tokens
        self.device = device
        self._config = config
        self._norm_eps = torch.tensor(self.shape.norm_eps, device=device)
        self._rotations = torch.empty(0, self.shape.head_dim // 2, dtype=torch.complex64, device=device)
        self._cache = KVCache(self.shape.num_layers, slots, self.shape.num_kv_heads, self.shape.head_dim, device)
        self._slots = torch.arange(slots, device=device)
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
        spare = self._spare = self._spare or Weights(self.shape, self.device)
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
        self._cache.reserve(_rounded(max(max_tokens)))
        running = {prefix: row for row, prefix in enumerate(self._prefixes) if prefix is not None}
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:
            prefix = tuple(prompt[:-1])
            rows_of.setdefault(prefix, []).append(len(self._positions))
            self._positions.append(len(prefix))
            self._prefixes.append(prefix)
        for prefix in rows_of.keys() & running.keys():
            rows = rows_of.pop(prefix)
            self._cache.copy([running[prefix]] * len(rows), rows, len(prefix))
        prefixes = sorted((p for p in rows_of if p), key=len)
        while prefixes:
            size = max(1, _PREFILL_TOKENS // len(prefixes[-1]))
            batch, prefixes = prefixes[-size:], prefixes[:-size]
            self._prefill(batch, [rows_of[p] for p in batch])

    def retire(self, rows: Collection[int]) -> list[int]:
        """Rows from the end move into the holes, so the rest stay contiguous at the price of one copy each."""
        num_kept = len(self._positions) - len(rows)
        holes = [row for row in sorted(rows) if row < num_kept]
        movers = [row for row in range(num_kept, len(self._positions)) if row not in rows]
        order = list(range(num_kept))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if movers:
            self._cache.copy(movers, holes, max(self._positions[row] for row in movers))
        self._positions = [self._positions[row] for row in order]
        self._prefixes = [self._prefixes[row] for row in order]
        return order

    # --- one token a row ----------------------------------------------------------------------------------------------

    def decode(self, tokens: Tensor) -> Tensor:
        assert self._weights is not None
        num_rows = len(self._positions)
        num_positions = _rounded(max(self._positions) + 1)
        positions = torch.tensor(self._positions, device=self.device)
        rotation = self._rotation(num_positions)[positions][:, None]
        mask = self._mask(positions, num_positions)
        x = self._weights.embedding[tokens]
        for index, layer in enumerate(self._weights.layers):
            query, key_value = self._qkv(layer, x, rotation)
            self._cache.write(index, self._slots[:num_rows], positions, key_value)
            keys, values = self._cache.read(index, num_rows, num_positions)
            # [rows * kv_head, queries of that head, dim] x [rows * kv_head, dim, time]
            query = query.reshape(len(keys), -1, self.shape.head_dim)
            scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self.shape.head_dim**-0.5)
            attended = torch.bmm(torch.softmax(scores, dim=-1), values)
            x = layer.out.add_to(x, attended.view(num_rows, -1))
            x = self._mlp(layer, x)
        self._positions = [p + 1 for p in self._positions]
        return self._logits(x)

    def _mask(self, positions: Tensor, num_positions: int) -> Tensor:
        """0 where a row may look and -inf beyond its position: [rows * kv_head, 1, time]."""
        # Row i of all windows on 0 … 0 -inf … -inf is the mask of one position: a gather instead of comparisons.
        edge = torch.zeros(2 * num_positions - 1, device=self.device)
        edge[num_positions:] = float("-inf")
        windows = edge.unfold(0, num_positions, 1)
        return windows[(num_positions - 1 - positions).repeat_interleave(self.shape.num_kv_heads)][:, None]

    # --- whole prompts ------------------------------------------------------------------------------------------------

    def _prefill(self, prefixes: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> None:
        """Fill the cache of `rows[i]` with `prefixes[i]`, each computed once, however many rows share it."""
        longest = max(map(len, prefixes))
        ids = torch.zeros(len(prefixes), longest, dtype=torch.long)
        for i, prefix in enumerate(prefixes):
            ids[i, : len(prefix)] = torch.tensor(prefix)
        self._forward_prompts(ids.to(self.device), rows)

    def _forward_prompts(self, ids: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [prompts * time, hidden] of right-padded `ids` [prompts, time]; fills the cache of `rows`.

        Padding needs no mask: under causal attention no token looks at what comes after it.
        """
        assert self._weights is not None
        num_prompts, length = ids.shape
        rotation = self._rotation(length)[:length, None].repeat(num_prompts, 1, 1)
        slots = [row for group in rows for row in group]
        prompts = [i for i, group in enumerate(rows) for _ in group]
        x = self._weights.embedding[ids.flatten()]
        for index, layer in enumerate(self._weights.layers):
            query, key_value = (t.unflatten(0, (num_prompts, length)) for t in self._qkv(layer, x, rotation))
            if slots:
                self._cache.write_prompts(index, slots, key_value[prompts])
            query, key, value = (t.transpose(1, 2) for t in (query, *key_value.chunk(2, dim=2)))
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = layer.out.add_to(x, attended.transpose(1, 2).reshape(len(x), -1))
            x = self._mlp(layer, x)
        return x

    # --- shared by both -----------------------------------------------------------------------------------------------

    def _qkv(self, layer: Layer, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Query [tokens, heads, dim], key and value [tokens, 2 * kv_heads, dim]; `rotation` is [tokens, 1, dim / 2]."""
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        fused = layer.qkv(self._norm(x, layer.attention_norm)).view(len(x), -1, dim)
        query_key = fused[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            query_key.copy_(self._norm(query_key, layer.qk_norm))
        torch.view_as_complex(query_key.unflatten(-1, (dim // 2, 2))).mul_(rotation)
        return fused[:, :heads], fused[:, heads:]

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return layer.down.add_to(x, functional.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """By the root mean square (arXiv:1910.07467); the library's takes twice as long on these sizes."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._norm_eps, length, length, value=1 / x.shape[-1])
        return (x * mean_square.rsqrt_()).mul_(weight)

    def _logits(self, x: Tensor) -> Tensor:
        assert self._weights is not None
        return functional.linear(self._norm(x, self._weights.norm), self._weights.head)

    def _rotation(self, num_positions: int) -> Tensor:
        if len(self._rotations) < num_positions:
            self._rotations = rotations(self._config, num_positions, self.device)
        return self._rotations


def _rounded(num_positions: int) -> int:
    return -(-num_positions // _BLOCK) * _BLOCK
