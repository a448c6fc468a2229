"""Keys and values of the running rows, each in a slot of its own until it ends."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """`layers` has the keys and the values of each, float32 [slot, kv_head, time, dim] both, to read and write."""

    def __init__(self, num_layers: int, slots: int, num_kv_heads: int, head_dim: int):
        self._entries = torch.empty(num_layers, 2, slots, num_kv_heads, 0, head_dim)
        self.layers: list[tuple[np.ndarray, np.ndarray]] = []
        self._free = list(reversed(range(slots)))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def num_positions(self) -> int:
        return self._entries.shape[4]

    def reserve(self, num_positions: int) -> None:
        """Grow the time dimension to at least `num_positions`; contents stay."""
        missing = num_positions - self.num_positions
        if missing > 0:
            self._entries = torch.nn.functional.pad(self._entries, (0, 0, 0, missing))
            self.layers = [(keys.numpy(), values.numpy()) for keys, values in self._entries]

    def copy(self, source: int, targets: Sequence[int], num_positions: int) -> None:
        """Copy the first positions of a slot onto others, in all layers."""
        self._entries[:, :, targets, :, :num_positions] = self._entries[:, :, [source], :, :num_positions]

    def write_prompts(self, layer: int, slots: Sequence[int], keys_values: Tensor) -> None:
        """The first positions of `slots`: `keys_values` [rows, time, 2 * kv_head, dim]."""
        time = keys_values.shape[1]
        self._entries[layer][:, slots, :, :time] = keys_values.unflatten(2, (2, -1)).permute(2, 0, 3, 1, 4)
