"""A fixed number of rollouts a problem: GRPO's group (arXiv 2402.03300), the baseline for every other sampler."""

import msgspec

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.history import HistoryConfig
from samplers.rewards import all_equal, no_variance_reason
from samplers.rounds import AtLeast2, Chain, RoundsSampler, train_if_mixed


class FixedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """`num_rollouts` for each visit to a problem.

    Groups whose rewards are all equal have no gradient and are dropped; with `drop_zero_variance = false` they are
    trained, where they only dilute the mean of the loss. Whether a dropped group is replaced is the batch's affair:
    with learner.batch_by = "attempts" it is not (ScaleRL, arXiv 2510.13786), with "completions" or "groups" generation
    goes on until the batch is full (DAPO's dynamic sampling, arXiv 2503.14476).
    Cost: `num_rollouts` a visit, of which a share p^n + (1-p)^n falls on groups without variance.
    """

    num_rollouts: AtLeast2 = 8
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)
    drop_zero_variance: bool = True


class FixedSampler(RoundsSampler):
    def __init__(self, config: FixedConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream)
        self._config = config

    def _size(self, problem: Problem) -> int:
        return self._config.num_rollouts

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision:
        if not self._config.drop_zero_variance and len(chain.rewards) > 1 and all_equal(chain.rewards):
            keep = tuple(range(len(chain.rewards)))
            return Decision(chain.chain_id, "train", no_variance_reason(outcome), keep)
        return train_if_mixed(chain, outcome)
