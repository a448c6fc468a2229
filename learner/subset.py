"""A decoupled baseline: every rollout of a chain counts in the baseline, fewer of them in the gradient."""

from collections.abc import Sequence

import msgspec
import numpy as np

from pipeline.learner_config import SubsetConfig
from pipeline.messages import Group


def train_subsets(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], num_attempts: int, config: SubsetConfig
) -> tuple[list[Group], list[np.ndarray], int]:
    """The groups with the rollouts that `config` chooses, their advantages, and `num_attempts` cut by the same share.

    The last keeps the aggregation "launched" a mean: with choices at random its expectation is that of all rollouts.
    Which are chosen depends on the group alone, so a repeated step repeats it.

    Args:
        advantages: [K] of each group's rollouts, with the baseline of the whole chain.
    """
    if not config.num_rollouts:
        return list(groups), list(advantages), num_attempts
    chosen = [
        choose(a, config.num_rollouts, config.choose, np.random.default_rng(group.chain_id))
        for group, a in zip(groups, advantages, strict=True)
    ]
    subsets = [_part(group, indices) for group, indices in zip(groups, chosen, strict=True)]
    before, after = (sum(len(group.rollouts) for group in some) for some in (groups, subsets))
    kept_advantages = [a[indices] for a, indices in zip(advantages, chosen, strict=True)]
    return subsets, kept_advantages, round(num_attempts * after / before) if before else num_attempts


def choose(advantages: np.ndarray, m: int, rule: str, rng: np.random.Generator) -> np.ndarray:
    """Ascending indices of `m` of the K `advantages`, or of all if they are no more.

    - random: every subset alike, so the mean over the chosen is an unbiased estimate of the mean over all
    - max_variance: the m whose variance is largest (arXiv 2504.13818), which are always some of the smallest and some
      of the largest; a biased choice with a larger gradient. Among equal advantages it takes any.
    """
    assert advantages.ndim == 1, f"advantages must have rank 1, got shape {advantages.shape}"
    if advantages.size <= m:
        return np.arange(advantages.size)
    shuffled = rng.permutation(advantages.size)
    if rule == "random":
        return np.sort(shuffled[:m])
    order = shuffled[np.argsort(advantages[shuffled], kind="stable")]
    candidates = [np.concatenate([order[:low], order[order.size - (m - low) :]]) for low in range(m + 1)]
    return np.sort(max(candidates, key=lambda indices: advantages[indices].var()))


def _part(group: Group, indices: np.ndarray) -> Group:
    return msgspec.structs.replace(
        group,
        rollouts=tuple(group.rollouts[i] for i in indices),
        verdicts=tuple(group.verdicts[i] for i in indices),
        draw_indices=tuple(group.draw_indices[i] for i in indices),
    )
