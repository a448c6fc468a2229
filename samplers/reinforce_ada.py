"""Reinforce-Ada (arXiv 2510.04996): rollouts by estimated difficulty, or rounds until there is enough of a signal."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.estimates import EstimateConfig, Estimates, EstimatesState
from samplers.history import HistoryConfig
from samplers.rewards import all_equal, no_variance_reason
from samplers.rounds import AtLeast1, AtLeast2, Chain, RoundsSampler, train_if_mixed


class ReinforceAdaConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="reinforce_ada"
):
    """Three rules of one paper.

    "est": one round of `scale`/sqrt(p) rollouts, clipped to `min_rollouts`..`max_rollouts`, p the problem's estimated
    pass rate (`[sampler.estimate]`). "seq_pos": rounds of `round_size` until one rollout is right, at most
    `max_rounds`. "seq_balance": until half of `keep` are right and half are wrong.
    Of a sequential chain `keep` rollouts are trained (0 = all), half of them right where there are enough, the newest
    of each side; the baseline stays that of the whole chain, so set learner.advantage.kind = "centered".
    Published: round_size 8, max_rounds 4, keep 4; `scale` is ours.
    Cost of a visit: "est" scale/sqrt(p) within its limits; "seq_pos" round_size (1 - Q^max_rounds)/(1 - Q) with
    Q = (1-p)^round_size; "seq_balance" the same for the rarer side and more.
    """

    rule: Literal["est", "seq_pos", "seq_balance"] = "seq_balance"
    scale: Annotated[float, msgspec.Meta(gt=0.0)] = 4.0
    min_rollouts: AtLeast2 = 4
    max_rollouts: AtLeast2 = 32
    round_size: AtLeast1 = 8
    max_rounds: AtLeast1 = 4
    keep: Annotated[int, msgspec.Meta(ge=0)] = 4
    estimate: EstimateConfig = msgspec.field(default_factory=EstimateConfig)
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)

    def __post_init__(self):
        if self.max_rollouts < self.min_rollouts:
            raise ValueError("max_rollouts must be at least min_rollouts")
        if self.rule != "est" and (self.keep == 1 or (self.keep == 0 and self.rule == "seq_balance")):
            raise ValueError("keep must be at least 2, one right and one wrong (0 keeps all, with seq_pos only)")
        if self.rule != "est" and self.round_size * self.max_rounds < 2:
            raise ValueError("round_size x max_rounds must be at least 2, or no chain could hold right and wrong")


class ReinforceAdaSampler(RoundsSampler):
    def __init__(self, config: ReinforceAdaConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream)
        self._config = config
        self._estimates = Estimates(config.estimate, stream.num_problems)

    def _size(self, problem: Problem) -> int:
        config = self._config
        if config.rule != "est":
            return config.round_size
        wanted = round(config.scale / self._estimates.pass_rate(problem) ** 0.5)
        return min(max(wanted, config.min_rollouts), config.max_rollouts)

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision | int:
        config = self._config
        if config.rule == "est":
            self._estimates.observe(chain.problem, outcome)
            return train_if_mixed(chain, outcome)
        if not self._has_enough(chain) and chain.round + 1 < config.max_rounds:
            return config.round_size
        if all_equal(chain.rewards):
            return Decision(chain.chain_id, "drop", no_variance_reason(outcome))
        keep = balanced(chain.rewards, config.keep) if config.keep else tuple(range(len(chain.rewards)))
        return Decision(chain.chain_id, "train", "mixed", keep)

    def _has_enough(self, chain: Chain) -> bool:
        num_right = sum(chain.correct)
        if self._config.rule == "seq_pos":
            return num_right >= 1
        half = self._config.keep // 2
        return num_right >= half and len(chain.correct) - num_right >= self._config.keep - half

    def _rule_state(self) -> Any:
        return self._estimates.state()

    def _restore_rule(self, state: Any) -> None:
        self._estimates.restore(msgspec.convert(state, EstimatesState))


def balanced(rewards: Sequence[float], keep: int) -> tuple[int, ...]:
    """Indices, ascending, of `keep` rollouts (all if there are fewer): half above the mean reward, half not.

    A side that has too few is made up for by the other. Of each side the newest are kept, as they are the least stale;
    which ones they are does not depend on their rewards. `rewards`: [N], not all equal; `keep` at least 2.
    """
    mean = math.fsum(rewards) / len(rewards)
    above = [i for i, r in enumerate(rewards) if r > mean]
    below = [i for i, r in enumerate(rewards) if r <= mean]
    num_above = min(len(above), max(keep // 2, keep - len(below)))
    num_below = min(len(below), keep - num_above)
    return tuple(sorted(above[-num_above:] + below[-num_below:]))
