"""What one optimizer step says about its batch: every figure of `StepReport`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.corrections import effective_sample_frac, k3_divergence
from learner.staleness import TrainedTokens, bucket_metrics, clipped_mass, mean_of
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
    "clipped_mass": 0.0,
    "masked_frac": 0.0,
    "kl": 0.0,
    "kl_ref": 0.0,
    "entropy": 0.0,
    "lag_mean": 0.0,
    "lag_max": 0.0,
}


@dataclass(frozen=True, slots=True)
class StepReport:
    """`policy_version` is the one after the step. `warning` is one line, or empty when the step was taken; `alarm` is
    one line about a step that was taken on figures that cannot be right.
    """

    policy_version: int
    metrics: dict[str, float]
    warning: str = ""
    alarm: str = ""


def token_metrics(tokens: TrainedTokens, mask_names: Sequence[str]) -> dict[str, float]:
    """Staleness and spread over the trained tokens; a batch without any gives the figures of an on-policy one."""
    masks = {f"masked_frac/{name}": 0.0 for name in mask_names}
    ratios = tokens.ratios
    n = ratios.numel()
    if n == 0:
        return _ON_POLICY | masks
    masks = {name: mean_of(tokens.masked[:, column]) for column, name in enumerate(masks)}
    return {
        "ess": effective_sample_frac(ratios),
        "ratio_mean": mean_of(ratios),
        "ratio_max": float(ratios.max()),
        "clipped_frac": mean_of(tokens.clipped),
        "clipped_mass": clipped_mass(tokens),
        "masked_frac": mean_of(tokens.masked.any(1)),
        "kl": mean_of(k3_divergence(tokens.learner_logprobs, tokens.engine_logprobs)),
        "kl_ref": mean_of(tokens.ref_kl),
        "entropy": mean_of(tokens.entropies),
        "lag_mean": mean_of(tokens.lags),
        "lag_max": float(tokens.lags.max()),
        **masks,
        **bucket_metrics(tokens),
    }


def group_metrics(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Sizes, rewards and lengths of the trained rollouts; `num_tokens` counts what is trained, not what is forced."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [group.chain_rewards[i] for group in groups for i in group.draw_indices]
    lengths = [rollout.num_tokens for rollout in rollouts]
    n = max(len(rollouts), 1)
    return {
        "num_groups": float(len(groups)),
        "num_rollouts": float(len(rollouts)),
        "num_tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        "reward_mean": sum(rewards) / n,
        "completion_tokens_mean": sum(lengths) / n,
        "truncated_frac": sum(rollout.finish_reason == "length" for rollout in rollouts) / n,
        "interrupted_frac": sum(bool(rollout.forced_spans) for rollout in rollouts) / n,
        "positive_advantage_frac": sum(int((a > 0).sum()) for a in advantages) / n,
    }


def lost_engines(tokens: TrainedTokens, engine_ids: Sequence[str]) -> str:
    """Name the engines whose tokens the learner would hardly have sampled; empty when there are none."""
    agreement = tokens.ratios.clamp(max=1.0)
    lost = []
    for index, engine_id in enumerate(engine_ids):
        own = agreement[tokens.engine_index == index]
        if own.numel() >= MIN_OVERLAP_TOKENS and (overlap := mean_of(own)) < MIN_OVERLAP:
            lost.append(f"{engine_id} ({overlap:.3f} over {own.numel()} tokens)")
    return ", ".join(lost)
