"""From the rewards of chains to the advantages of their trained rollouts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeline.errors import ConfigError
from pipeline.learner_config import AdvantageConfig

# Rewards that went through float32 differ in their last digits; their float64 spread must still count as none.
ZERO_VARIANCE_TOLERANCE = 1e-6
# The prior of the predictable baseline: one success and one failure, as good as nothing after a few draws.
PRIOR_CORRECT, PRIOR_ATTEMPTS = 1.0, 2.0


class Chain(NamedTuple):
    """What an advantage may depend on.

    `rewards`: [N], every judged attempt of the chain in launch order; `draw_indices`: [K] integers, which of them are
    kept; `round_sizes`: how the N split into rounds, in order.
    """

    rewards: np.ndarray
    draw_indices: np.ndarray
    round_sizes: tuple[int, ...]


def has_zero_variance(rewards: np.ndarray) -> bool:
    """Whether raw `rewards`, shape [N], are all equal: their range, in float64, is within a relative 1e-6."""
    assert rewards.ndim == 1, f"rewards must have rank 1, got shape {rewards.shape}"
    if rewards.size < 2:
        return True
    exact = rewards.astype(np.float64)
    return float(np.ptp(exact)) <= ZERO_VARIANCE_TOLERANCE * max(1.0, float(np.abs(exact).max()))


def batch_advantages(chains: Sequence[Chain], config: AdvantageConfig) -> list[np.ndarray]:
    """Advantages of the kept rollouts of each chain, [K] float64 each, against baselines of their whole chains.

    First `chain_advantages`. Then two steps that see the whole batch: `batch_standardized` divides by the population
    standard deviation over the batch's kept rollouts (ScaleRL, arXiv 2510.13786); `count_ratio` divides the shares of
    kept rollouts by their mean over the chains, so that the batch as a whole is not scaled down. Last, |A_i| is
    bounded by `clip`, which outranks a zero sum.

    Raises ConfigError where `max_rl` meets a negative reward.
    """
    advantages = [chain_advantages(chain, config) for chain in chains]
    if config.rescale in ("ratio", "count_ratio"):
        shares = np.array([len(chain.draw_indices) / max(len(chain.rewards), 1) for chain in chains])
        mean_share = shares.mean() if config.rescale == "count_ratio" and shares.any() else 1.0
        advantages = [a * share / mean_share for a, share in zip(advantages, shares, strict=True)]
    if config.kind == "batch_standardized" and any(a.any() for a in advantages):
        scale = np.concatenate(advantages).std()
        advantages = [a / scale for a in advantages] if scale > 0 else advantages
    return [np.clip(a, -config.clip, config.clip) for a in advantages]


def chain_advantages(chain: Chain, config: AdvantageConfig) -> np.ndarray:
    """Advantages of one chain's kept rollouts before any step that needs the batch; [K] float64.

    r are the rewards, or with `credit = "best"` what `best_of_chain` makes of them. Means and deviations are over all N
    attempts, also those whose rollouts are not kept (leaving out failures would raise the baseline and weaken exactly
    the rare successes; Never Give Up, arXiv 2609.13443):

    - `centered`, `batch_standardized`: r_i - mean(r)
    - `standardized`: (r_i - mean(r)) / std(r), the population deviation (GRPO, arXiv 2402.03300)
    - `leave_one_out`: r_i - mean of the other N - 1 (RLOO, arXiv 2402.14740)
    - `max_rl`: (r_i - mean(r)) / mean(r), which weighs a problem by 1/p: the gradient of log p
    - `power`: see `power_advantages`

    All but `power` are 0 when the chain's rewards are all equal. `rescale = "anchor"` (the `anchor_pos` rule of Never
    Give Up) leaves advantages above 0 and multiplies the others by -(sum of those above 0)/(sum of the others), so
    that the kept group sums to 0 whatever was left out. The source fixes the rollouts at the maximum reward; fixing
    every A_i > 0 is the same rule for two-valued rewards, and for graded ones it keeps every sign. A group that lost
    one side entirely is left as it is.
    """
    assert chain.rewards.ndim == 1, f"rewards must have rank 1, got shape {chain.rewards.shape}"
    assert chain.draw_indices.ndim == 1, f"draw_indices must have rank 1, got shape {chain.draw_indices.shape}"
    rewards = chain.rewards.astype(np.float64)
    if config.kind == "power":
        return power_advantages(rewards, chain.round_sizes, config.alpha)[chain.draw_indices]
    if has_zero_variance(rewards):
        return np.zeros(chain.draw_indices.size)
    if config.credit == "best":
        rewards = best_of_chain(rewards)
    advantages = ((rewards - rewards.mean()) * _scale(rewards, config))[chain.draw_indices]
    return _anchored(advantages) if config.rescale == "anchor" else advantages


def best_of_chain(rewards: np.ndarray) -> np.ndarray:
    """1 where `rewards`, shape [N] float64 with variance, reach their maximum within a relative 1e-6, else 0.

    The best of a chain is what it was sampled for. Paid by the reward itself, a group of partial solutions pulls
    towards the easy part of a problem, and rollouts above the mean are reinforced beside a better one.
    """
    best = float(rewards.max())
    return (rewards >= best - ZERO_VARIANCE_TOLERANCE * max(1.0, float(np.abs(rewards).max()))).astype(np.float64)


def power_advantages(rewards: np.ndarray, round_sizes: Sequence[int], alpha: float) -> np.ndarray:
    """A_i = a(i) (r_i - b_i) for every draw i = 1..N of a chain, [N] float64.

    a(i) = Gamma(i - 1 + alpha) / (Gamma(alpha) Gamma(i)), the series of (1 - q)^-alpha. b_i = (1 + rewards of earlier
    rounds and of the other draws of the same round) / (2 + their number): it is known without r_i, and whether round
    t is drawn at all depends on earlier rounds only. So by optional stopping the expected gradient of a problem of
    pass rate p = 1 - q is E[sum of a(i) over the draws made] grad p; for rounds of one draw that is p^-alpha grad p,
    cut off at the cap on draws: alpha = 1 maximises log p, alpha = 0 learns from first draws only.

    Exact only if every draw is trained, including chains that end without a success and groups without variance.

    Args:
        rewards: [N] in [0, 1].
        round_sizes: sum N.
    """
    assert sum(round_sizes) == rewards.size, f"rounds {tuple(round_sizes)} do not make {rewards.size} attempts"
    draws = np.arange(1, rewards.size)
    coefficients = np.cumprod(np.concatenate([np.ones(min(rewards.size, 1)), (draws - 1 + alpha) / draws]))
    ends = np.repeat(np.cumsum(round_sizes, dtype=np.int64), round_sizes)
    totals = np.concatenate([np.zeros(1), np.cumsum(rewards)])
    baselines = (PRIOR_CORRECT + totals[ends] - rewards) / (PRIOR_ATTEMPTS + ends - 1)
    return coefficients * (rewards - baselines)


def _scale(rewards: np.ndarray, config: AdvantageConfig) -> float:
    match config.kind:
        case "standardized":
            return 1.0 / float(rewards.std())
        case "leave_one_out":
            return rewards.size / (rewards.size - 1)
        case "max_rl":
            if rewards.min() < 0:
                raise ConfigError(
                    f'learner.advantage.kind = "max_rl" divides by the mean reward, but a reward is {rewards.min():g}; '
                    'take another kind, such as "standardized"'
                )
            return 1.0 / float(rewards.mean())
    return 1.0


def _anchored(advantages: np.ndarray) -> np.ndarray:
    above = advantages > 0
    sum_above, sum_rest = advantages[above].sum(), advantages[~above].sum()
    if sum_above > 0 and sum_rest < 0:
        return np.where(above, advantages, advantages * -sum_above / sum_rest)
    return advantages
