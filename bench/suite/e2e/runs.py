"""One training run of any side, and what is measured of it; the same for all, so that figures can be compared.

While a run trains, its weights are put aside every few steps; afterwards they are all judged alike, by the same engine
on the same problems. So no side pays for evaluation while its clock runs, and no side judges itself.
"""

import os
import shutil
from pathlib import Path

import msgspec


class Mark(msgspec.Struct, frozen=True):
    """What training had cost after a step: seconds since it began, rollouts, tokens, and processor seconds."""

    step: int
    seconds: float
    rollouts: int
    tokens: int
    core_s: float


class Trained(msgspec.Struct, frozen=True):
    """A run that has ended. `models` are the weights put aside, by step.

    `startup_s`: everything before and after training. Idle shares are of the time of training.
    """

    marks: list[Mark]
    models: dict[int, Path]
    startup_s: float
    engine_idle: float
    learner_idle: float


class Run(msgspec.Struct, frozen=True):
    """A run with its pass@1 on held-out problems: `hard` by step, `final_hard` and `final_overall` at the end from
    more rollouts.
    """

    key: str
    arm: str
    seed: int
    marks: list[Mark]
    hard: dict[int, float]
    final_hard: float
    final_overall: float
    startup_s: float
    engine_idle: float
    learner_idle: float

    @property
    def end(self) -> Mark:
        return self.marks[-1]

    def cost_at(self, step: int) -> Mark:
        return next(mark for mark in self.marks if mark.step == step)


def put_aside(model: Path, to: Path) -> bool:
    """Keep a model directory that its run may remove at any time; False when it was just being removed."""
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(model, partial, copy_function=os.link)
    except (FileNotFoundError, shutil.Error):
        return False
    partial.rename(to)
    return True
