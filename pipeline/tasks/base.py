"""The `TaskSource` seam: where problems come from."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from samplers.base import Problem


class TaskSource(Protocol):
    """A resumable stream of training problems and a fixed evaluation set.

    A source is a `samplers.base.ProblemStream`. The same config and seed give the same problems in the same order;
    `restore(state())` continues exactly where `state` was taken. Problem ids are unique and stable. `hard_levels` are
    the levels whose mean is reported as hard pass@1; empty when the task does not say.
    """

    @property
    def num_problems(self) -> int | None: ...

    @property
    def hard_levels(self) -> tuple[str, ...]: ...

    def next_problem(self) -> Problem:
        """The next problem of an endless sequence: shuffled passes over the data, a new order each pass."""
        ...

    def eval_problems(self) -> list[Problem]:
        """The held-out problems, always the same; empty when the task has none."""
        ...

    def level_weights(self) -> dict[str, float]:
        """Share of each level in the training mixture: the weights of the mixed pass@1."""
        ...

    def state(self) -> dict[str, object]: ...

    def restore(self, state: dict[str, object]) -> None: ...


def level_shares(levels: Iterable[str]) -> dict[str, float]:
    """The share of each level, given the level of every problem."""
    counts = Counter(levels)
    return {level: n / counts.total() for level, n in counts.items()}
