"""A forward pass in which rollouts share the tokens of their prompt.

A causal model computes the same for a prompt whatever follows it, so a prompt of n rollouts is worth one row of hidden
states, not n, and rows of different lengths need no padding: all that looks from one token to another is attention.
There alone each rollout's keys and values are put together (PrefixGrouper, arXiv 2506.05433, has the same idea with
two calls of attention).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learner.packing import Rows, TokenBatch

SHARED_PROMPTS = "ngu_shared_prompts"


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether passes of `model` are those of this module."""
    return model.config._attn_implementation == SHARED_PROMPTS


def may_share(model: PreTrainedModel) -> bool:
    """Whether nothing in its config speaks against it: every layer has to see a rollout whole, by an attention that can
    be exchanged. Recurrent layers see tokens in the order in which they lie, windows and chunks count places there.
    """
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return bool(model._supports_attention_backend) and kinds == {"full_attention"} and not any(windows)


def last_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """[N, H] hidden states of the N tokens; the model must share prompts."""
    ids = batch.input_ids[None]
    # Nothing is padding. Without a mask the library would see from the positions that there are several rows in one,
    # and build an [N, N] mask to keep them apart.
    everything = torch.ones_like(ids, dtype=torch.bool)
    positions = batch.position_ids[None]
    passed: dict[str, Any] = {"attention_mask": everything, "position_ids": positions, "rows_of_tokens": batch.rows}
    return model.base_model(input_ids=ids, use_cache=False, **passed).last_hidden_state[0]


class _Spread(torch.autograd.Function):
    """[N, F] of tokens -> [M, F] of places. `again`, [2, K]: places besides the first and their tokens; without them
    only the first place of a token counts in the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, again: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, again)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (places, again) = grads, ctx.saved_tensors
        first = grad.index_select(0, places)
        if again is None or not again.numel():
            return first, None, None, None
        # Sums over as many rollouts as a prompt has: not in the eight bits of bfloat16.
        total = first.to(torch.promote_types(grad.dtype, torch.float32))
        total.index_add_(0, again[1], grad.index_select(0, again[0]).to(total.dtype))
        return total.to(grad.dtype), None, None, None


class _Gather(torch.autograd.Function):
    """[M, F] of places -> [N, F] of tokens, each from its first place; other places have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,), (places,) = grads, ctx.saved_tensors
        return grad.new_zeros(ctx.num_places, grad.shape[1]).index_copy_(0, places, grad), None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rows_of_tokens: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot product attention of each rollout by itself; `query`, `key`, `value`: [1, heads, N, dim]."""
    if rows_of_tokens is None:  # the model is used as any other
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = rows_of_tokens
    assert attention_mask is None, "a mask of N x N tokens knows nothing of rollouts"
    # What a prompt's tokens look at is the same in each rollout, so what comes of that is taken from the first alone.
    queries, keys, values = _spread(query, rows), _spread(key, rows, rows.again), _spread(value, rows, rows.again)
    out = [
        sdpa_attention_forward(module, *block, None, is_causal=True, **kwargs)[0].flatten(0, 1)
        for block in zip(queries, keys, values, strict=True)
    ]
    seen: Any = _Gather.apply(torch.cat(out).flatten(1), rows.places)
    return seen.view(1, -1, *out[0].shape[1:]), None


def _spread(x: Tensor, rows: Rows, again: Tensor | None = None) -> list[Tensor]:
    """[1, heads, N, dim] of tokens -> for each block [rows, heads, width, dim]."""
    spread: Any = _Spread.apply(x[0].transpose(0, 1).flatten(1), rows.tokens, rows.places, again)
    return [block.unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2) for block in rows.blocks(spread)]


AttentionInterface.register(SHARED_PROMPTS, _attention)
AttentionMaskInterface.register(SHARED_PROMPTS, sdpa_mask)
