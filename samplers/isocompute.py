"""IsoCompute (arXiv 2603.12151): the number of rollouts a problem grows with the compute spent."""

import math
from typing import Annotated, Any

import msgspec

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.history import HistoryConfig
from samplers.rounds import Chain, RoundsSampler, train_if_mixed


class IsoComputeConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="isocompute"
):
    """log2 n = a + (b - a) / (1 + exp(-k (log10 C - log10_c0))), C the rollouts launched so far.

    The paper finds the best n for a compute budget to grow with it and to saturate, as a sigmoid in log compute. It
    prescribes one n for a whole run; here n follows the budget as it is spent. `a` is log2 of the smallest n, `b` of
    the one it saturates at, `log10_c0` the budget halfway and `k` the steepness per decade. The paper's parameters
    are not published in numbers: these defaults (8 to 64, halfway at 10,000 rollouts) are ours. Fit your own with
    `ngu fit isocompute`.
    Cost: n(C) a visit. Groups without variance are dropped.
    """

    a: Annotated[float, msgspec.Meta(ge=1.0, le=16.0)] = 3.0
    b: Annotated[float, msgspec.Meta(ge=1.0, le=16.0)] = 6.0
    k: Annotated[float, msgspec.Meta(gt=0.0)] = 2.0
    log10_c0: Annotated[float, msgspec.Meta(ge=0.0)] = 4.0
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)

    def __post_init__(self):
        if self.a > self.b:
            raise ValueError("a must not be above b: n grows with compute")


class IsoComputeSampler(RoundsSampler):
    def __init__(self, config: IsoComputeConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream)
        self._config = config
        self._spent = 0

    def _size(self, problem: Problem) -> int:
        n = isocompute_rollouts(self._config, self._spent)
        self._spent += n
        return n

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision:
        return train_if_mixed(chain, outcome)

    def _gauges(self) -> dict[str, float]:
        return {"num_rollouts": float(isocompute_rollouts(self._config, self._spent))}

    def _rule_state(self) -> Any:
        return self._spent

    def _restore_rule(self, state: Any) -> None:
        self._spent = state


def isocompute_rollouts(config: IsoComputeConfig, spent: int) -> int:
    """n after `spent` rollouts, at least 2; the logistic is written with tanh, which cannot overflow."""
    x = config.k * (math.log10(max(spent, 1)) - config.log10_c0)
    return round(2.0 ** (config.a + (config.b - config.a) * 0.5 * (1.0 + math.tanh(x / 2.0))))
