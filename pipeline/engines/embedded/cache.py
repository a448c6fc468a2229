"""Keys and values of the running rows, laid out so that attention reads them as one batched matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """`keys`, `values`: float32 [layer, slot, kv_head, time, dim]; running rows are slots 0..n-1."""

    def __init__(self, num_layers: int, slots: int, num_kv_heads: int, head_dim: int, device: torch.device):
        # Zeros, not garbage: masked positions still meet a zero weight in the product, and 0 * nan is nan.
        self.keys = torch.zeros(num_layers, slots, num_kv_heads, 0, head_dim, device=device)
        self.values = torch.zeros_like(self.keys)

    def reserve(self, num_positions: int) -> None:
        """Grow the time dimension to at least `num_positions`; contents stay."""
        missing = num_positions - self.keys.shape[3]
        if missing > 0:
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, missing))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, missing))

    def copy(self, sources: Sequence[int], targets: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of some slots onto others, in all layers."""
        for tensor in (self.keys, self.values):
            tensor[:, targets, :, :num_positions] = tensor[:, sources, :, :num_positions]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position for each of `slots`: `keys`, `values` [rows, kv_head, dim]."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def write_prompts(self, layer: int, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """The first positions of `slots`: `keys`, `values` [rows, kv_head, time, dim]."""
        self.keys[layer, slots, :, : keys.shape[2]] = keys
        self.values[layer, slots, :, : values.shape[2]] = values

    def read(self, layer: int, num_rows: int, num_positions: int) -> tuple[Tensor, Tensor]:
        """Views [rows * kv_head, time, dim] of the first rows and positions."""
        return (
            self.keys[layer, :num_rows].flatten(0, 1)[:, :num_positions],
            self.values[layer, :num_rows].flatten(0, 1)[:, :num_positions],
        )
