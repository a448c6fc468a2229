"""From the rewards of a chain to the advantages of its trained rollouts."""

from typing import Literal

import numpy as np

# Rewards that went through float32 differ in their last digits; their float64 spread must still count as none.
ZERO_VARIANCE_TOLERANCE = 1e-6


def has_zero_variance(rewards: np.ndarray) -> bool:
    """Whether raw `rewards`, shape [N], are all equal: their range, in float64, is within a relative 1e-6."""
    assert rewards.ndim == 1, f"rewards must have rank 1, got shape {rewards.shape}"
    if rewards.size < 2:
        return True
    exact = rewards.astype(np.float64)
    return float(np.ptp(exact)) <= ZERO_VARIANCE_TOLERANCE * max(1.0, float(np.abs(exact).max()))


def chain_advantages(
    chain_rewards: np.ndarray,
    draw_indices: np.ndarray,
    *,
    kind: Literal["centered", "standardized"],
    anchor: bool,
    clip: float,
) -> np.ndarray:
    """Advantages of the kept rollouts against the baseline of their whole chain.

    A_i = r_i - mean(r), divided by the population standard deviation of r when `standardized` (GRPO, arXiv
    2402.03300). Both moments are over all N attempts of the chain, also those whose rollouts are not kept: leaving out
    failures would raise the baseline and so weaken exactly the rare successes (Never Give Up, arXiv 2609.13443).

    With `anchor` (the `anchor_pos` rule of the same source) advantages above 0 stay and the others are multiplied by
    -(sum of those above 0)/(sum of the others), so that the kept group sums to 0 whatever was left out. The source
    fixes the rollouts at the maximum reward; fixing every A_i > 0 is the same rule for two-valued rewards, and for
    graded ones it keeps every sign. A group that lost one side entirely is left as it is. Last, |A_i| is bounded by
    `clip`, which outranks the zero sum.

    Args:
        chain_rewards: [N], every judged attempt of the chain in launch order.
        draw_indices: [K] integers, which of them are kept.

    Returns:
        [K] float64; all 0 when the chain's rewards are all equal.
    """
    assert chain_rewards.ndim == 1, f"chain_rewards must have rank 1, got shape {chain_rewards.shape}"
    assert draw_indices.ndim == 1, f"draw_indices must have rank 1, got shape {draw_indices.shape}"
    if has_zero_variance(chain_rewards):
        return np.zeros(draw_indices.size)
    rewards = chain_rewards.astype(np.float64)
    scale = rewards.std() if kind == "standardized" else 1.0
    advantages = ((rewards - rewards.mean()) / scale)[draw_indices]
    if anchor:
        above = advantages > 0
        sum_above, sum_rest = advantages[above].sum(), advantages[~above].sum()
        if sum_above > 0 and sum_rest < 0:
            advantages[~above] *= -sum_above / sum_rest
    return np.clip(advantages, -clip, clip)
