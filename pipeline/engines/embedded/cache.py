"""Keys and values of the running rows, laid out so that attention reads them as one batched matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """`entries`: float32 [layer, 2 (keys, values), slot, kv_head, time, dim]; running rows are slots 0..n-1."""

    def __init__(self, num_layers: int, slots: int, num_kv_heads: int, head_dim: int, device: torch.device):
        # Zeros, not garbage: masked positions still meet a zero weight in the product, and 0 * nan is nan.
        self.entries = torch.zeros(num_layers, 2, slots, num_kv_heads, 0, head_dim, device=device)

    def reserve(self, num_positions: int) -> None:
        """Grow the time dimension to at least `num_positions`; contents stay."""
        missing = num_positions - self.entries.shape[4]
        if missing > 0:
            self.entries = torch.nn.functional.pad(self.entries, (0, 0, 0, missing))

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of some slots onto others, in all layers."""
        self.entries[:, :, targets, :, :num_positions] = self.entries[:, :, sources, :, :num_positions]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys_values: Tensor) -> None:
        """One position for each of `slots`: `keys_values` [rows, 2 * kv_head, dim], the keys before the values."""
        self.entries[layer][:, slots, :, positions] = keys_values.unflatten(1, (2, -1))

    def write_prompts(self, layer: int, slots: Sequence[int], keys_values: Tensor) -> None:
        """The first positions of `slots`: `keys_values` [rows, time, 2 * kv_head, dim]."""
        time = keys_values.shape[1]
        self.entries[layer][:, slots, :, :time] = keys_values.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)

    def read(self, layer: int, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Views [rows * kv_head, time, dim] of the keys and values of the first rows and positions."""
        keys, values = self.entries[layer, :, :num_rows].flatten(1, 2)[:, :, :num_positions]
        return keys, values
