"""GVM (GVM-RAFT, arXiv 2505.02391): the sizes that minimise the variance of the gradient for a given budget."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from samplers.base import Launch, ProblemStream
from samplers.planned import Gain, PlannedConfig, PlannedSampler
from samplers.rounds import AtLeast2


class GvmConfig(PlannedConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="gvm"):
    """n proportional to G / sqrt(p + alpha / p^(beta - 1)) over a window of problems.

    p is the estimated pass rate (`[sampler.estimate]`), G the norm of the gradient of a rollout's log-probability.
    Published: alpha = 1e-3 and beta = 2, with G measured by backward passes over pilot rollouts and n = 0 where none
    was right. A sampler has no gradients, so G is replaced by a proxy that is ours: (mean completion tokens) ^
    `length_power`. 0.5 is the norm of a sum of weakly correlated token scores, 1 that of aligned ones, 0 leaves length
    out (a loss averaged over tokens). In place of the pilot every problem gets at least `min_rollouts`.
    `window` problems are drawn at a time and share window x `num_rollouts` rollouts, at most `max_rollouts` each.
    Cost: `num_rollouts` a visit, exactly, on average over each window; planning takes O(rollouts x log window).
    """

    min_rollouts: AtLeast2 = 4
    max_rollouts: AtLeast2 = 64
    alpha: Annotated[float, msgspec.Meta(ge=0.0)] = 1e-3
    beta: Annotated[float, msgspec.Meta(ge=1.0)] = 2.0
    length_power: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5


class GvmSampler(PlannedSampler):
    def __init__(self, config: GvmConfig, stream: ProblemStream, seed: int):
        super().__init__(config, stream, seed)
        self._rule = config

    def _gains(self, window: Sequence[Launch]) -> list[Gain]:
        return [self._gain(launch) for launch in window]

    def _gain(self, launch: Launch) -> Gain:
        """The fall of G^2 / (p + alpha / p^(beta - 1)) / n from n to n + 1.

        Dividing a total so that the sum of s^2 / n is least is what makes n proportional to s; in whole numbers the
        falls s^2 / (n (n + 1)) do it one rollout at a time.
        """
        rule = self._rule
        p = self._estimates.pass_rate(launch.problem)
        norm = self._estimates.mean_tokens(launch.problem) ** rule.length_power
        square = norm * norm / (p + rule.alpha / p ** (rule.beta - 1.0))
        return lambda n: square / (n * (n + 1))
