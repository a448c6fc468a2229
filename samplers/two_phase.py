"""Screen a problem with a few rollouts, then spend the rest on it only if they say that it is worth it.

Two published rules that differ in their names, sizes and bounds: Pilot-Commit and SPEED.
"""

from typing import Annotated

import msgspec

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.history import HistoryConfig
from samplers.rewards import all_equal, no_variance_reason
from samplers.rounds import AtLeast1, AtLeast2, Chain, Frac, RoundsSampler, train_if_mixed


class PilotCommitHistoryConfig(HistoryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = HistoryConfig.__doc__

    retire_at: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = 1.0


class PilotCommitConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="pilot_commit"
):
    """Pilot-Commit (arXiv 2605.26606): `pilot` rollouts; a pass rate above `too_easy` skips the problem, one below
    `too_hard` defers it to the stream's next offer, and anything between commits `commit` more.

    Published (the authors' scripts): pilot 16, commit 48, 0.75 and 0.125, three times as many candidates as a batch
    trains (here generation simply goes on, with learner.batch_by = "groups"), and a problem whose pilot is all right
    is never drawn again. The last is [sampler.history] with retire_at = 1.0: it spares a problem that ever failed.
    Cost of a visit: pilot + commit x P(too_hard <= share of right ones <= too_easy); pilots that are not committed to
    are lost.
    """

    pilot: AtLeast2 = 16
    commit: AtLeast1 = 48
    too_easy: Frac = 0.75
    too_hard: Frac = 0.125
    history: PilotCommitHistoryConfig = msgspec.field(default_factory=PilotCommitHistoryConfig)

    def __post_init__(self):
        if self.too_hard > self.too_easy:
            raise ValueError("too_hard must not be above too_easy")


class SpeedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="speed"):
    """SPEED (SPEED-RL, arXiv 2506.09016): `screen` rollouts, and `more` if they are neither all right nor all wrong.

    The reason: with N rollouts the signal-to-noise ratio of the gradient is at most 4 N p (1-p), which vanishes at
    both ends. `low`..`high` is the band of screened pass rates that go on. The rule is published, the sizes and the
    band are ours. Set learner.batch_by = "completions" to refill the batch as the paper does.
    Cost of a visit: screen + more (1 - p^screen - (1-p)^screen); the screening of what is dropped is lost.
    """

    screen: AtLeast2 = 8
    more: AtLeast1 = 16
    low: Frac = 0.0
    high: Frac = 1.0
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low must not be above high")


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
