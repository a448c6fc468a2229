"""A stream and outcomes for the sampler tests."""

from collections.abc import Sequence

from samplers.base import Launch, Outcome, Problem


class CyclingStream:
    """Problems "0" to "n-1" again and again in that order; endless and never repeating when `num_problems` is None."""

    def __init__(self, num_problems: int | None):
        self.num_problems = num_problems
        self.num_drawn = 0

    def next_problem(self) -> Problem:
        index = self.num_drawn if self.num_problems is None else self.num_drawn % self.num_problems
        self.num_drawn += 1
        return Problem(str(index), "test", f"prompt {index}", "answer")


def outcome(
    launch: Launch, rewards: Sequence[float], learner_version: int = 0, oldest_version: int | None = None
) -> Outcome:
    """What `launch` came back with; a reward of 1 or more is a correct answer."""
    return Outcome(
        chain_id=launch.chain_id,
        round=launch.round,
        rewards=tuple(rewards),
        correct=tuple(r >= 1 for r in rewards),
        truncated=(False,) * len(rewards),
        num_tokens=10 * len(rewards),
        oldest_version=learner_version if oldest_version is None else oldest_version,
        learner_version=learner_version,
    )
