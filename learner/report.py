"""What one optimizer step says about its batch: every figure of `StepReport`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.corrections import effective_sample_frac, importance_ratios, k3_divergence
from pipeline.messages import Group

# Mean min(rho, 1) over tokens of mu is 1 - TV(mu, pi): the share of probability on which engine and learner agree.
# Lag alone leaves it near 1; under a half the engine was sampling from something else (wrong weights, wrong logprobs).
MIN_OVERLAP = 0.5
MIN_OVERLAP_TOKENS = 256

_ON_POLICY = {
    "ess": 1.0,
    "ratio_mean": 1.0,
    "ratio_max": 1.0,
    "clipped_frac": 0.0,
    "kl": 0.0,
    "entropy": 0.0,
    "lag_mean": 0.0,
    "lag_max": 0.0,
}


@dataclass(frozen=True, slots=True)
class StepReport:
    """`policy_version` is the one after the step. `warning` is one line, or empty when the step was taken."""

    policy_version: int
    metrics: dict[str, float]
    warning: str = ""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Every trained token of a batch, in one order: float tensors on the CPU, all of shape [N]."""

    learner_logprobs: Tensor
    engine_logprobs: Tensor
    entropies: Tensor
    lags: Tensor
    engine_index: Tensor

    @property
    def ratios(self) -> Tensor:
        return importance_ratios(self.learner_logprobs, self.engine_logprobs)


def token_metrics(tokens: TrainedTokens, eps_max: float) -> dict[str, float]:
    """Staleness and spread over the trained tokens; a batch without any gives the figures of an on-policy one."""
    ratios = tokens.ratios
    n = ratios.numel()
    if n == 0:
        return dict(_ON_POLICY)
    return {
        "ess": effective_sample_frac(ratios),
        "ratio_mean": _mean(ratios),
        "ratio_max": float(ratios.max()),
        "clipped_frac": _mean(ratios > eps_max),
        "kl": _mean(k3_divergence(tokens.learner_logprobs, tokens.engine_logprobs)),
        "entropy": _mean(tokens.entropies),
        "lag_mean": _mean(tokens.lags),
        "lag_max": float(tokens.lags.max()),
    }


def group_metrics(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Sizes, rewards and lengths of the trained rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [group.chain_rewards[i] for group in groups for i in group.draw_indices]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    n = max(len(rollouts), 1)
    return {
        "num_groups": float(len(groups)),
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(num_tokens),
        "reward_mean": sum(rewards) / n,
        "completion_tokens_mean": num_tokens / n,
        "truncated_frac": sum(rollout.finish_reason == "length" for rollout in rollouts) / n,
        "positive_advantage_frac": sum(int((a > 0).sum()) for a in advantages) / n,
    }


def lost_engines(tokens: TrainedTokens, engine_ids: Sequence[str]) -> str:
    """Name the engines whose tokens the learner would hardly have sampled; empty when there are none."""
    agreement = tokens.ratios.clamp(max=1.0)
    lost = []
    for index, engine_id in enumerate(engine_ids):
        own = agreement[tokens.engine_index == index]
        if own.numel() >= MIN_OVERLAP_TOKENS and (overlap := _mean(own)) < MIN_OVERLAP:
            lost.append(f"{engine_id} ({overlap:.3f} over {own.numel()} tokens)")
    return ", ".join(lost)


def _mean(values: Tensor) -> float:
    return float(values.to(torch.float64).mean())
