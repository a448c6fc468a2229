"""Losses over a flat list of tokens.

A batch is cut into micro-batches for memory only, so a loss here is a plain sum over the tokens it is given and every
token carries its own normaliser, computed once over the whole batch. The gradients of the parts then add up to that of
the whole, however the batch was cut.
"""

from typing import Literal

import numpy as np
from torch import Tensor

from learner.corrections import truncated_weights


def rollout_normalizers(
    num_tokens: np.ndarray, group_index: np.ndarray, aggregation: Literal["token", "sequence", "prompt"]
) -> np.ndarray:
    """The factor that multiplies each token's loss in a rollout, shape [R], float64.

    With R rollouts, G groups and |y_i| tokens in rollout i:
    `token`: 1 / sum_j |y_j| (DAPO, arXiv 2503.14476); `sequence`: 1 / (R |y_i|) (GRPO, arXiv 2402.03300);
    `prompt`: 1 / (G sum of |y_j| over the rollout's group) (ScaleRL, arXiv 2510.13786).
    An empty completion counts in R and its group in G: it adds 0 to the mean rather than leaving it.

    Args:
        num_tokens: [R] completion tokens of each rollout, of the whole batch.
        group_index: [R] integers 0..G-1, the group of each rollout.
    """
    assert num_tokens.ndim == 1, f"num_tokens must have rank 1, got shape {num_tokens.shape}"
    assert group_index.shape == num_tokens.shape, f"shapes {group_index.shape} and {num_tokens.shape} differ"
    if aggregation == "token":
        denominators = np.full(num_tokens.shape, num_tokens.sum(), dtype=np.float64)
    elif aggregation == "sequence":
        denominators = num_tokens.astype(np.float64) * num_tokens.size
    else:
        group_tokens = np.bincount(group_index, weights=num_tokens)
        denominators = group_tokens[group_index] * group_tokens.size
    return 1.0 / np.maximum(denominators, 1.0)


def cispo_loss(logprobs: Tensor, ratios: Tensor, advantages: Tensor, normalizers: Tensor, eps_max: float) -> Tensor:
    """L = -sum_t n_t sg(min(rho_t, eps_max)) A_t log pi(y_t): CISPO (MiniMax-M1, arXiv 2506.13585).

    The weight multiplies the gradient and is not differentiated, so a token whose ratio hits the cap still learns,
    unlike under PPO's clip, which drops it.

    Args:
        logprobs: [N] log pi(y_t) at the sampling temperature, with gradient.
        ratios: [N] rho_t, see `corrections.importance_ratios`.
        advantages: [N] that of the token's rollout.
        normalizers: [N] that of the token's rollout, see `rollout_normalizers`.
        eps_max: cap of the ratio.

    Returns:
        The scalar sum.
    """
    assert logprobs.ndim == 1, f"logprobs must have rank 1, got shape {tuple(logprobs.shape)}"
    for name, tensor in (("ratios", ratios), ("advantages", advantages), ("normalizers", normalizers)):
        assert tensor.shape == logprobs.shape, f"{name} has shape {tuple(tensor.shape)}, not {tuple(logprobs.shape)}"
    weights = truncated_weights(ratios.detach(), eps_max)
    return -(normalizers * weights * advantages * logprobs).sum()
