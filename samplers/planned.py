"""A budget divided over a window of problems: the allocation rules that weigh problems against each other."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from samplers.base import Decision, Launch, Outcome, ProblemStream
from samplers.estimates import EstimateConfig, Estimates, EstimatesState
from samplers.history import HistoryConfig
from samplers.rounds import AtLeast1, AtLeast2, Chain, RoundsSampler, train_if_mixed

Gain = Callable[[int], float]


class PlannedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the samplers that plan: `window` problems are drawn at a time and share window x `num_rollouts` rollouts,
    each from `min_rollouts` to `max_rollouts`.
    """

    num_rollouts: AtLeast2 = 8
    min_rollouts: AtLeast2 = 2
    max_rollouts: AtLeast2 = 128
    window: AtLeast1 = 64
    estimate: EstimateConfig = msgspec.field(default_factory=EstimateConfig)
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)

    def __post_init__(self):
        if not self.min_rollouts <= self.num_rollouts <= self.max_rollouts:
            raise ValueError("num_rollouts, the mean, must lie between min_rollouts and max_rollouts")


class PlannedState(msgspec.Struct):
    planned: list[Launch]
    estimates: EstimatesState


class PlannedSampler(RoundsSampler):
    """One round a visit, its size from the plan of its window; a subclass says what a rollout more is worth."""

    def __init__(self, config: PlannedConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        super().__init__(config.history, stream)
        self._config = config
        self._estimates = Estimates(config.estimate, stream.num_problems)
        self._planned: deque[Launch] = deque()

    def _gains(self, window: Sequence[Launch]) -> list[Gain]:
        """For each problem of the window: what rollout n + 1 adds to n. Must not grow with n."""
        raise NotImplementedError

    def _fresh(self, budget: int) -> list[Launch]:
        launches = self._take(budget)
        budget -= sum(launch.num_rollouts for launch in launches)
        if budget > 0:
            # One plan, and so one search of the stream, covers the whole budget however large it is.
            self._plan(max(self._config.window, -(-budget // self._config.num_rollouts)))
            launches += self._take(budget)
        return launches

    def _take(self, budget: int) -> list[Launch]:
        launches: list[Launch] = []
        while budget > 0 and self._planned:
            launches.append(self._planned.popleft())
            budget -= launches[-1].num_rollouts
        return launches

    def _plan(self, num_problems: int) -> None:
        """Draw up to so many problems and divide their rollouts."""
        config = self._config
        window = self._intake.open_chains(num_problems, lambda _: 1)
        total = config.num_rollouts * len(window)
        sizes = allocate(self._gains(window), total, config.min_rollouts, config.max_rollouts)
        self._planned.extend(
            msgspec.structs.replace(launch, num_rollouts=size) for launch, size in zip(window, sizes, strict=True)
        )

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision:
        self._estimates.observe(chain.problem, outcome)
        return train_if_mixed(chain, outcome)

    def _gauges(self) -> dict[str, float]:
        return {"planned": float(len(self._planned))}

    def _rule_state(self) -> Any:
        return PlannedState(list(self._planned), self._estimates.state())

    def _restore_rule(self, state: Any) -> None:
        saved = msgspec.convert(state, PlannedState)
        self._planned = deque(saved.planned)
        self._intake.hold(launch.problem.problem_id for launch in saved.planned)
        self._estimates.restore(saved.estimates)


def allocate(gains: Sequence[Gain], total: int, low: int, high: int) -> list[int]:
    """Whole numbers of rollouts that sum to `total` and maximise the summed gains, each in `low`..`high`.

    One rollout at a time goes where it adds most; with gains that shrink as n grows that is optimal, not only greedy.
    Of equal gains the smaller n is served first, so a window nobody can tell apart is shared evenly.

    Args:
        gains: for each problem a function of n, what rollout n + 1 adds; non-increasing in n.
        total: in len(gains) x `low`..`high`.
    """
    sizes = [low] * len(gains)
    heap = [(-gain(low), low, i) for i, gain in enumerate(gains)]
    heapq.heapify(heap)
    for _ in range(total - low * len(gains)):
        _, size, i = heap[0]
        sizes[i] = size + 1
        if sizes[i] < high:
            heapq.heapreplace(heap, (-gains[i](sizes[i]), sizes[i], i))
        else:
            heapq.heappop(heap)
    return sizes
