"""Which rollouts share a forward pass, and the tensors of one such pass."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

# Rows share a block, whose width is that of its longest, while they are at least this part of it.
BLOCK_FILL = 0.8
# Of a token's memory, what one of a prompt takes in a rollout after the first: attention alone holds a query, a key, a
# value, what comes of them and in the backward pass their gradients. It is a tenth with few heads for keys and values,
# a quarter with as many as for queries or with heads that are wider than the model.
SHARED_COST = 0.25


def micro_batches(
    lengths: Sequence[int], token_budget: int, prompts: Sequence[np.ndarray] | None = None
) -> list[list[int]]:
    """Indices 0..R-1 cut into micro-batches, each index exactly once, each within `token_budget` unless it is one row.

    With `prompts`, of each row the ids [P_i], rows of one prompt lie together and share it: its tokens count whole in
    the first row of a micro-batch and `SHARED_COST` each in the others. Without, rows x longest row counts, and rows
    are sorted by length, so that little of a micro-batch is padding. The longest come first, so that a batch too big
    for the memory fails at once.
    """
    assert token_budget > 0
    keys = range(len(lengths)) if prompts is None else [prompt.tobytes() for prompt in prompts]
    longest: dict[int | bytes, int] = {}
    for key, length in zip(keys, lengths, strict=True):
        longest[key] = max(length, longest.get(key, 0))
    turn = {key: i for i, key in enumerate(sorted(longest, key=lambda key: -longest[key]))}
    batches: list[list[int]] = []
    free = 0.0
    for index in sorted(range(len(lengths)), key=lambda i: (turn[keys[i]], -lengths[i])):
        cost = float(lengths[index])
        if batches and prompts is None:
            cost = lengths[batches[-1][0]]
        elif batches and prompts is not None and keys[batches[-1][-1]] == keys[index]:
            cost -= (1 - SHARED_COST) * prompts[index].size
        if not batches or cost > free:
            batches.append([])
            free, cost = token_budget, lengths[index]
        batches[-1].append(index)
        free -= cost
    return batches


def shares(lengths: Sequence[int], prompts: Sequence[np.ndarray], num_ranks: int) -> list[list[int]]:
    """Indices 0..R-1 split over ranks: rows of one prompt one after the other, cut where each rank has its part of the
    lengths. So a rank is at most a row's length off its part, and few prompts are on two of them.
    """
    order = sorted(range(len(lengths)), key=lambda i: prompts[i].tobytes())
    ends = np.cumsum([lengths[i] for i in order])
    middles = ends - np.array([lengths[i] for i in order]) / 2
    ranks = (middles * num_ranks / max(ends[-1], 1)).astype(int) if order else []
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, rank in zip(order, ranks, strict=True):
        dealt[rank].append(index)
    return dealt


class Rows(NamedTuple):
    """Where the N tokens of a pass stand in its rollouts, for what looks from one token to another.

    Rollouts are the rows of blocks, right-padded to the longest of the block, where a causal model never looks back
    from. `shapes`: of each block (rows, width). `tokens`: [M] int64, which token stands at each place, row by row and
    block after block; 0 at padding. `places`: [N] int64, the first place of each token. `again`: [2, K] int64, further
    places and their tokens: those of prompts in all rollouts but the first.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor
    places: Tensor
    again: Tensor

    def blocks(self, x: Tensor) -> list[Tensor]:
        """[M, ...] of places as [rows, width, ...] of each block."""
        parts = x.split([num * width for num, width in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]


class TokenBatch(NamedTuple):
    """The tokens of one forward pass and the places where completion tokens are predicted.

    `input_ids`, `position_ids`: [N] int64, one rollout after the other without padding: a prompt, once however many of
    the rollouts begin with it, and completions without their last tokens, which predict nothing. `rows`: how these make
    up the rollouts. `positions`: [T] int64 into the N, where the completions' chosen tokens are predicted. `targets`:
    [T] int64, those tokens, rollout after rollout.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Rows
    positions: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Self:
        rows = Rows(self.rows.shapes, *(tensor.to(device) for tensor in self.rows[1:]))
        moved = {name: tensor.to(device) for name, tensor in self._asdict().items() if name != "rows"}
        return self._replace(rows=rows, **moved)


def collate(
    prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], chosen: Sequence[np.ndarray] | None = None
) -> TokenBatch:
    """Put together B rollouts of prompt ids [P_i] and completion ids [T_i], P_i >= 1 and T_i >= 1.

    `chosen`, [T_i] bool, says which completion tokens are targets (None: all): those left out get no logits at all.
    """
    assert len(prompts) == len(completions) > 0
    chosen = [np.ones(c.size, dtype=bool) for c in completions] if chosen is None else chosen
    shapes, begins = _blocks([p.size + c.size - 1 for p, c in zip(prompts, completions, strict=True)])
    tokens = np.zeros(sum(num * width for num, width in shapes), dtype=np.int64)
    known: dict[bytes, np.ndarray] = {}  # the tokens of each prompt
    ids, position_ids, places, again, positions = [], [], [], [], []
    num = 0
    for prompt, completion, taken, begin in zip(prompts, completions, chosen, begins, strict=True):
        assert prompt.ndim == completion.ndim == 1 and prompt.size and completion.size
        read = completion.size - 1
        head = np.arange(begin, begin + prompt.size)
        own = known.get(prompt.tobytes())
        if own is None:
            own = known[prompt.tobytes()] = np.arange(num, num + prompt.size)
            ids.append(prompt)
            position_ids.append(np.arange(prompt.size))
            places.append(head)
            num += prompt.size
        else:
            again.append(np.stack([head, own]))
        row = np.concatenate([own, np.arange(num, num + read)])
        tokens[begin : begin + row.size] = row
        ids.append(completion[:-1])
        position_ids.append(np.arange(prompt.size, row.size))
        places.append(np.arange(begin + prompt.size, begin + row.size))
        positions.append(row[prompt.size - 1 :][taken])
        num += read
    targets = [c[taken] for c, taken in zip(completions, chosen, strict=True)]
    ids, position_ids, places, positions, targets = (
        torch.from_numpy(np.concatenate(parts).astype(np.int64))
        for parts in (ids, position_ids, places, positions, targets)
    )
    further = np.concatenate(again, axis=1) if again else np.zeros((2, 0), dtype=np.int64)
    rows = Rows(shapes, torch.from_numpy(tokens), places, torch.from_numpy(further))
    return TokenBatch(ids, position_ids, rows, positions, targets)


def _blocks(widths: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], list[int]]:
    """The (rows, width) of blocks of rows of like width, and the place at which each row begins."""
    shapes: list[tuple[int, int]] = []
    begins = [0] * len(widths)
    end = 0
    for index in sorted(range(len(widths)), key=lambda i: -widths[i]):
        num, width = shapes[-1] if shapes else (0, 0)
        if widths[index] >= BLOCK_FILL * width > 0:
            shapes[-1] = (num + 1, width)
        else:
            width = widths[index]
            shapes.append((1, width))
        begins[index] = end
        end += width
    return tuple(shapes), begins
