"""Pilot-Commit (arXiv 2605.26606): a pilot estimates what a problem can teach, then the rest is committed to it."""

from typing import Annotated

import msgspec

from samplers.base import ProblemStream
from samplers.history import HistoryConfig
from samplers.rounds import AtLeast1, AtLeast2, Frac
from samplers.two_phase import TwoPhaseSampler


class PilotCommitHistoryConfig(HistoryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = HistoryConfig.__doc__

    retire_at: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = 1.0


class PilotCommitConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="pilot_commit"
):
    """`pilot` rollouts; a pass rate above `too_easy` skips the problem, one below `too_hard` defers it to the stream's
    next offer, and anything between commits `commit` more.

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


class PilotCommitSampler(TwoPhaseSampler):
    def __init__(self, config: PilotCommitConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream, config.pilot, config.commit, config.too_hard, config.too_easy)
