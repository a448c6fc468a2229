"""What is kept of an arm, and whether it survived. Pure data and rules."""

from collections.abc import Sequence
from typing import Literal

import msgspec

# An evaluation of the built-in job has a standard error of .02 to .03, and a loss that wanders by a few of those is
# not lost: what collapses falls much further.
MAX_DROP = 0.10
# An arm below this share of its best at two evaluations running is not trained further.
HOPELESS_FRAC = 0.5

Ending = Literal["finished", "collapsed", "failed"]


class Evaluated(msgspec.Struct, frozen=True):
    """Held-out pass@1 after `batches` batches: `overall` as training mixes levels, `hard` over the hard levels (None
    where the task has none), and every level's. `best_by_level` and `worst_by_level` are best@k and worst@k, k being
    the rollouts of a problem.
    """

    batches: int
    overall: float
    hard: float | None
    by_level: dict[str, float]
    best_by_level: dict[str, float] = {}
    worst_by_level: dict[str, float] = {}


class Stepped(msgspec.Struct, frozen=True):
    """One optimizer step. `reward` is the mean over everything generated for it, the rest is about trained tokens."""

    batch: int
    lag: float
    reward: float
    ess: float
    ratio_mean: float
    kl: float
    clipped_mass: float
    entropy: float
    grad_norm: float
    refused: bool


class Course(msgspec.Struct, frozen=True):
    """An arm from start to end.

    `evaluations` starts with the untrained policy. `ending`: `finished`; `collapsed`, which is hopeless and was cut
    short; `failed`, which could not go on for `reason`. `cpu_s` is the processor time of it all.
    """

    evaluations: list[Evaluated]
    steps: list[Stepped]
    ending: Ending
    reason: str
    cpu_s: float

    @property
    def start(self) -> Evaluated:
        return self.evaluations[0]

    @property
    def final(self) -> Evaluated:
        return self.evaluations[-1]


def survives(course: Course) -> bool:
    """Whether the arm went to its end and ends within `MAX_DROP` of the best evaluation it had, the start included."""
    best = max(e.overall for e in course.evaluations)
    return course.ending == "finished" and course.final.overall >= best - MAX_DROP


def is_hopeless(evaluations: Sequence[Evaluated]) -> bool:
    """Whether the last two evaluations are both below `HOPELESS_FRAC` of the best."""
    best = max(e.overall for e in evaluations)
    return len(evaluations) > 2 and all(e.overall < HOPELESS_FRAC * best for e in evaluations[-2:])
