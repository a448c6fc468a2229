"""Keys and values of the running rows, each in a slot of its own until it ends."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """`entries`: float32 [layer, 2 (keys, values), slot, kv_head, time, dim]."""

    def __init__(self, num_layers: int, slots: int, num_kv_heads: int, head_dim: int):
        self.entries = torch.empty(num_layers, 2, slots, num_kv_heads, 0, head_dim)
        self._free = list(reversed(range(slots)))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def num_positions(self) -> int:
        return self.entries.shape[4]

    def reserve(self, num_positions: int) -> None:
        """Grow the time dimension to at least `num_positions`; contents stay."""
        missing = num_positions - self.num_positions
        if missing > 0:
            self.entries = torch.nn.functional.pad(self.entries, (0, 0, 0, missing))

    def copy(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of a slot onto others, in all layers."""
        self.entries[:, :, targets, :, :num_positions] = self.entries[:, :, [source], :, :num_positions]

    def write_prompts(self, layer: int, slots: Sequence[int], keys_values: Tensor) -> None:
        """The first positions of `slots`: `keys_values` [rows, time, 2 * kv_head, dim]."""
        time = keys_values.shape[1]
        self.entries[layer][:, slots, :, :time] = keys_values.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)

    def of_layer(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [slot, kv_head, time, dim], to read and write."""
        keys, values = self.entries[layer]
        return keys.numpy(), values.numpy()
