"""SPEED (SPEED-RL, arXiv 2506.09016): screen, then continue on problems of intermediate difficulty."""

import msgspec

from samplers.base import ProblemStream
from samplers.history import HistoryConfig
from samplers.rounds import AtLeast1, AtLeast2, Frac
from samplers.two_phase import TwoPhaseSampler


class SpeedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="speed"):
    """`screen` rollouts, and `more` if they are neither all right nor all wrong.

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


class SpeedSampler(TwoPhaseSampler):
    def __init__(self, config: SpeedConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream, config.screen, config.more, config.low, config.high)
