"""Pure rules of staleness: how much may be launched, and what may still be trained when its turn comes.

Admission bounds the mean lag, not the maximum: a long rollout or a chain of many rounds can always turn up late. So
there is a rule at consumption too, and both are counted.
"""

from typing import Literal

import msgspec

from pipeline.messages import Group

Policy = Literal["correct", "pace", "drop"]


def room(max_lag: int, batch_size: int, num_waiting: int, num_in_flight: int) -> int:
    """How many more units (attempts, completions or groups, whatever `batch_size` counts) may be launched.

    AReaL's capacity rule (arXiv 2505.24298, section 5.1) rewritten in quantities that survive a restart: at most
    `max_lag` batches beyond the one being collected or trained exist at any time. `num_waiting` counts finished units
    that no completed optimizer step has consumed yet, the learner's current batch included.
    """
    return (max_lag + 1) * batch_size - num_waiting - num_in_flight


def group_lag(group: Group, policy_version: int) -> int:
    """Versions between the learner and the oldest token of the group; 0 for a group without tokens."""
    oldest = [v for r in group.rollouts if (v := r.oldest_version) is not None]
    return policy_version - min(oldest) if oldest else 0


def admit(group: Group, policy_version: int, max_lag: int, policy: Policy) -> Group | None:
    """What of a group may be trained at `policy_version`, or None.

    `correct` trains everything; `drop` the group whole or not at all; `pace` its rollouts up to `max_lag`, so that a
    chain of many rounds loses the rounds that no waiting could have kept young, and only those.
    """
    if policy == "correct" or group_lag(group, policy_version) <= max_lag:
        return group
    if policy == "drop":
        return None
    oldest = [r.oldest_version for r in group.rollouts]
    kept = [i for i, v in enumerate(oldest) if v is None or policy_version - v <= max_lag]
    if not kept:
        return None
    return msgspec.structs.replace(
        group,
        rollouts=tuple(group.rollouts[i] for i in kept),
        verdicts=tuple(group.verdicts[i] for i in kept),
        draw_indices=tuple(group.draw_indices[i] for i in kept),
    )
