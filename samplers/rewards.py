"""Comparing raw rewards: equal, above, within the rounding that float32 verifiers leave behind."""

from collections.abc import Sequence

from samplers.base import Outcome, Reason

# float32 keeps about seven digits, so rewards computed in it differ by up to ~1e-7 where they mean the same. The
# learner's zero-variance rule has the same tolerance: a group trained here must not have advantage zero there.
REWARD_TOLERANCE = 1e-6


def exceeds(reward: float, bar: float) -> bool:
    """Whether `reward` is above `bar` by more than a relative 1e-6 (absolute for rewards below 1)."""
    gap = reward - bar
    if reward <= 1.0 and bar >= -1.0:
        return gap > REWARD_TOLERANCE
    return gap > REWARD_TOLERANCE * max(1.0, reward, -bar)


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether non-empty `rewards` have no variance, decided on their range in float64: a standard deviation of equal
    float32 numbers comes out above 0.
    """
    return not exceeds(max(rewards), min(rewards))


def no_variance_reason(outcome: Outcome) -> Reason:
    """Why a round of equal rewards teaches nothing: all right, all wrong, or all at the same partial reward."""
    if all(outcome.correct):
        return "solved"
    return "zero_variance" if any(outcome.correct) or max(outcome.rewards) > 0 else "all_wrong"
