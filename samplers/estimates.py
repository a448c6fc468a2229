"""What the next visit to a problem is likely to bring: its pass rate and length, from earlier visits and its level.

A run may visit a problem once or never again, and an endless stream never repeats one. So an estimate starts from the
problem's level (`Problem.level`; one level when the task has none) and moves to the problem's own record as it grows.
"""

from typing import Annotated

import msgspec

from samplers.base import Outcome, Problem
from samplers.rounds import Frac

# A level is the mean of about its last 64 visits: a rate with a standard error of a few percent, soon after the policy
# has changed.
LEVEL_DECAY = 63 / 64


class EstimateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A problem's counts are multiplied by `decay` at each visit, as the policy that earned them is gone (the rule is
    Reinforce-Ada's, the value ours). Its level weighs as much as `prior_strength` rollouts (ours).
    """

    decay: Frac = 0.5
    prior_strength: Annotated[float, msgspec.Meta(gt=0.0)] = 4.0


class Counts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Decayed sums: over rollouts for a problem, over visits (each a mean of its first round) for a level."""

    num: float = 0.0
    correct: float = 0.0
    tokens: float = 0.0

    def plus(self, decay: float, num: float, correct: float, tokens: float) -> "Counts":
        return Counts(decay * self.num + num, decay * self.correct + correct, decay * self.tokens + tokens)


class EstimatesState(msgspec.Struct):
    problems: dict[str, Counts]
    levels: dict[str, Counts]
    overall: Counts


NOTHING = Counts()


class Estimates:
    """Owned, saved and restored by one sampler. A stream without end leaves no record of its problems."""

    def __init__(self, config: EstimateConfig, num_problems: int | None):
        self._config = config
        self._remembers = num_problems is not None
        self._problems: dict[str, Counts] = {}
        self._levels: dict[str, Counts] = {}
        self._overall = NOTHING

    def observe(self, problem: Problem, outcome: Outcome) -> None:
        """Add a finished round with at least one judged rollout."""
        num, correct = len(outcome.correct), sum(outcome.correct)
        if outcome.round == 0:
            # One visit, one vote: hard problems may get more rollouts, and a pooled rate would lean towards them.
            rate, length = correct / num, outcome.num_tokens / num
            level = self._levels.get(problem.level, NOTHING)
            self._levels[problem.level] = level.plus(LEVEL_DECAY, 1, rate, length)
            self._overall = self._overall.plus(LEVEL_DECAY, 1, rate, length)
        if self._remembers:
            counts, decay = self._problems.get(problem.problem_id, NOTHING), self._config.decay
            self._problems[problem.problem_id] = counts.plus(
                decay if outcome.round == 0 else 1.0, num, correct, outcome.num_tokens
            )

    def pass_rate(self, problem: Problem) -> float:
        """Posterior mean, strictly between 0 and 1: Beta with the level's rate as its prior mean."""
        level = self._levels.get(problem.level, NOTHING)
        prior = (1.0 + level.correct) / (2.0 + level.num)
        own, strength = self._problems.get(problem.problem_id, NOTHING), self._config.prior_strength
        return (strength * prior + own.correct) / (strength + own.num)

    def mean_tokens(self, problem: Problem) -> float:
        """Expected completion length in tokens; that of all problems for a level not seen yet, 1 before any outcome."""
        level = self._levels.get(problem.level, self._overall)
        prior = level.tokens / level.num if level.num else 1.0
        own, strength = self._problems.get(problem.problem_id, NOTHING), self._config.prior_strength
        return (strength * prior + own.tokens) / (strength + own.num)

    def state(self) -> EstimatesState:
        return EstimatesState(dict(self._problems), dict(self._levels), self._overall)

    def restore(self, state: EstimatesState) -> None:
        self._problems, self._levels, self._overall = dict(state.problems), dict(state.levels), state.overall
