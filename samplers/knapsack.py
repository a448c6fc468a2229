"""Knapsack RL (arXiv 2509.25849): each problem is an item whose value depends on the rollouts that it is given."""

from collections.abc import Sequence

from samplers.base import Launch
from samplers.planned import Gain, PlannedConfig, PlannedSampler


class KnapsackConfig(
    PlannedConfig, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="knapsack"
):
    """The rollouts of a window go where they most raise the value of groups with a gradient.

    N rollouts of a problem with pass rate p are worth (1 - p^N - (1-p)^N) p (1-p)^2: the probability that right and
    wrong both occur, times the paper's estimate of how much a step then raises p. `window` problems are drawn at a
    time and share window x `num_rollouts` rollouts, each from `min_rollouts` to `max_rollouts`. The value, 2 to 128 and
    the uniform total are quoted from the paper at second hand; window = 64 is ours. The paper gives what is left over
    to problems never solved; here an estimate (`[sampler.estimate]`) is never exactly 0, so they compete on theirs.
    Cost: `num_rollouts` a visit, exactly, on average over each window; planning takes O(rollouts x log window).
    """


class KnapsackSampler(PlannedSampler):
    def _gains(self, window: Sequence[Launch]) -> list[Gain]:
        return [knapsack_gain(self._estimates.pass_rate(launch.problem)) for launch in window]


def knapsack_gain(p: float) -> Gain:
    """What rollout n + 1 adds to the value of n: (p^n q + q^n p) p q^2 with q = 1 - p, which shrinks as n grows."""
    q = 1.0 - p
    worth = p * q * q
    return lambda n: (p**n * q + q**n * p) * worth
