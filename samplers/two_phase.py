"""Screen a problem with a few rollouts, then spend the rest on it only if they say that it is worth it."""

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.history import HistoryConfig
from samplers.rewards import all_equal, no_variance_reason
from samplers.rounds import Chain, RoundsSampler, train_if_mixed


class TwoPhaseSampler(RoundsSampler):
    """`screen` rollouts; `more` if the share of right ones lies in `low`..`high` and the rewards differ, else dropped.

    All rollouts of a chain that went on are trained, those of the first round too.
    """

    def __init__(self, history: HistoryConfig, stream: ProblemStream, screen: int, more: int, low: float, high: float):
        super().__init__(history, stream)
        self._screen, self._more, self._low, self._high = screen, more, low, high

    def _size(self, problem: Problem) -> int:
        return self._screen

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision | int:
        if chain.round > 0:
            return train_if_mixed(chain, outcome)
        if all_equal(chain.rewards):
            return Decision(chain.chain_id, "drop", no_variance_reason(outcome))
        rate = sum(chain.correct) / len(chain.correct)
        if rate > self._high:
            return Decision(chain.chain_id, "drop", "too_easy")
        if rate < self._low:
            return Decision(chain.chain_id, "drop", "too_hard")
        return self._more
