"""Which rollouts share a forward pass, and the tensors of one such pass."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices 0..R-1 cut into micro-batches of rows x longest row <= `token_budget`, each index exactly once.

    Rows are sorted by length, so that little of a micro-batch is padding; the longest come first, so that a batch too
    big for the memory fails at once. A row longer than the budget gets a micro-batch of its own.
    """
    assert token_budget > 0
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or longest * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def shares(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices 0..R-1 split over ranks, each with nearly the same number of rows and of tokens.

    By falling length, in turns that change direction, so that no rank always gets the longer of two neighbours.
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, num_ranks)
        dealt[seat if turn % 2 == 0 else num_ranks - 1 - seat].append(index)
    return dealt


class TokenBatch(NamedTuple):
    """Rows for one forward pass and the places where completion tokens are predicted.

    `input_ids`: [B, L] int64, right-padded with 0; each row is prompt + completion without its last token, which
    predicts nothing. `positions`: [N] int64 into the flattened [B * L] rows, where the completions' chosen tokens are
    predicted. `targets`: [N] int64, those tokens, row after row.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor


def collate(
    prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], chosen: Sequence[np.ndarray] | None = None
) -> TokenBatch:
    """Right-pad B rows of prompt ids [P_i] and completion ids [T_i], P_i >= 1 and T_i >= 1.

    `chosen`, [T_i] bool, says which completion tokens are targets (None: all): those left out get no logits at all.
    Padding is on the right, where a causal model never looks back at it, so no attention mask is needed.
    """
    assert len(prompts) == len(completions) > 0
    widths = [p.size + c.size - 1 for p, c in zip(prompts, completions, strict=True)]
    width = max(widths)
    input_ids = np.zeros((len(prompts), width), dtype=np.int64)
    chosen = [np.ones(c.size, dtype=bool) for c in completions] if chosen is None else chosen
    positions = []
    for row, (prompt, completion, taken) in enumerate(zip(prompts, completions, chosen, strict=True)):
        assert prompt.ndim == completion.ndim == 1 and prompt.size and completion.size
        input_ids[row, : prompt.size] = prompt
        input_ids[row, prompt.size : widths[row]] = completion[:-1]
        positions.append(np.arange(prompt.size - 1, widths[row], dtype=np.int64)[taken] + row * width)
    targets = np.concatenate([c[taken] for c, taken in zip(completions, chosen, strict=True)]).astype(np.int64)
    return TokenBatch(*map(torch.from_numpy, (input_ids, np.concatenate(positions), targets)))
