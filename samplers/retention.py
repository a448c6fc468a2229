"""Which rollouts of an accepted chain are trained."""

import math
from collections.abc import Sequence
from functools import cache


def kept_attempts(
    rewards: Sequence[float],
    round_sizes: Sequence[int],
    round_ages: Sequence[int],
    keep_failures: int,
    keep_versions: int,
) -> tuple[int, ...]:
    """Indices into the chain's `rewards` (launch order), ascending.

    A success is a rollout above the chain's mean reward, a failure any other. For two-valued rewards that is right and
    wrong; for graded ones it is the sign of the advantage (with `learner.advantage.credit = "best"` fewer are above 0,
    all of them successes), so what the gradient pushes up is always kept and the learner's anchored advantages (which
    fix the positives and rescale the rest) lose nothing that they would fix.

    - Rounds older than `keep_versions` policy versions are left out; the last round never is; -1 keeps all
      (`maintain_pending_ngu_age` of the `ngu` branch of allenai/open-instruct).
    - Of what remains, every success and the last `keep_failures` failures are kept; 0 keeps all failures.
    - If that leaves one side empty, its newest rollout is kept whatever its age: a group needs both to have a gradient.

    Args:
        rewards: [N] of the whole chain, not all equal.
        round_sizes: [R], summing to N.
        round_ages: [R], learner version now minus the oldest version of the round.
    """
    if keep_versions < 0:
        return kept_at_any_age(rewards, keep_failures)
    mean = math.fsum(rewards) / len(rewards)
    last_round = len(round_sizes) - 1
    successes: list[int] = []
    failures: list[int] = []
    aged_success: list[int] = []
    aged_failure: list[int] = []
    start = 0
    for round, (size, age) in enumerate(zip(round_sizes, round_ages, strict=True)):
        indices = range(start, start + size)
        start += size
        above = [i for i in indices if rewards[i] > mean]
        below = [i for i in indices if rewards[i] <= mean]
        if keep_versions >= 0 and age > keep_versions and round != last_round:
            aged_success, aged_failure = above[-1:] or aged_success, below[-1:] or aged_failure
        else:
            successes += above
            failures += below
    kept_failures = failures[-keep_failures:] if keep_failures else failures
    return tuple(sorted((successes or aged_success) + (kept_failures or aged_failure)))


def kept_at_any_age(rewards: Sequence[float], keep_failures: int) -> tuple[int, ...]:
    """The same where no round is too old: everything from the `keep_failures`-th last failure on, and the successes
    before it.
    """
    num = len(rewards)
    # Rewards that are not all equal hold a success, so there can be no failure too many among so few attempts.
    if not keep_failures or num <= keep_failures + 1:
        return all_indices(num)
    mean = math.fsum(rewards) / num
    start = num
    while keep_failures and start:
        start -= 1
        keep_failures -= rewards[start] <= mean
    return (*[i for i in range(start) if rewards[i] > mean], *range(start, num))


@cache
def all_indices(num: int) -> tuple[int, ...]:
    """0 to `num` - 1; most chains are short and trained whole."""
    return tuple(range(num))
