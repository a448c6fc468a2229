"""The source of Manufactoria problems: a fixed catalogue, a fifth of every level held out, the rest to train on."""

import random
from collections import Counter
from functools import cache
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.tasks.manufactoria import acceptance, transforms
from pipeline.tasks.manufactoria.judge import Reward, Rubric, encode_rubric
from pipeline.tasks.manufactoria.ladder import Spec, build_ladder
from pipeline.tasks.registry import ManufactoriaConfig
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Problem

SOURCE = "manufactoria"
HELD_OUT_FRAC = 0.2
HARDEST_TIER = 3
ASSETS = Path(__file__).parents[2] / "assets" / SOURCE
# Written by the warm start: statements of training problems that the shipped model never solved.
UNSOLVED = ASSETS / "unsolved.txt"


@cache
def catalogue() -> tuple[Spec, ...]:
    """All 774 problems; statements are unique."""
    return (*acceptance.specs(), *transforms.specs())


@cache
def held_out() -> frozenset[str]:
    """Statements that no run trains on, a fifth of every level; runs with different seeds are compared on them."""
    by_level: dict[str, list[str]] = {}
    for spec in catalogue():
        by_level.setdefault(spec.level, []).append(spec.statement)
    chosen: set[str] = set()
    for level, statements in by_level.items():
        rng = random.Random(f"{SOURCE}/held_out/{level}")
        chosen.update(rng.sample(statements, round(HELD_OUT_FRAC * len(statements))))
    return frozenset(chosen)


def to_problem(spec: Spec, reward: Reward) -> Problem:
    return Problem(
        problem_id=f"{SOURCE}/{spec.statement}",
        source=SOURCE,
        prompt=spec.prompt,
        answer=encode_rubric(Rubric(reward, build_ladder(spec).tests)),
        level=spec.level,
    )


class Manufactoria:
    """A `TaskSource`; see `ManufactoriaConfig`. Levels are named by tier and family, such as "t3_starts_ends".

    Problems are made when they are first drawn: choosing a problem's tests runs its programs on hundreds of tapes.
    """

    def __init__(self, config: ManufactoriaConfig, seed: int):
        if config.eval_per_level < 0:
            raise ConfigError(f"task.eval_per_level is {config.eval_per_level}; give 0 (no evaluation) or more")
        specs = [s for s in catalogue() if config.families in ("all", s.kind)]
        self._config = config
        self._eval = _some_of_each_level([s for s in specs if s.statement in held_out()], config.eval_per_level)
        self._train = [s for s in specs if s.statement not in held_out()]
        if config.pool == "unsolved":
            unsolved = set(UNSOLVED.read_text().splitlines())
            self._train = [s for s in self._train if s.statement in unsolved]
        self.num_problems: int | None = len(self._train)
        self.hard_levels = tuple(sorted({s.level for s in specs if s.tier == HARDEST_TIER}))
        self._passes = ShuffledPasses(len(self._train), seed)

    def next_problem(self) -> Problem:
        return to_problem(self._train[self._passes.next_index()], self._config.reward)

    def eval_problems(self) -> list[Problem]:
        return [to_problem(spec, "per_test") for spec in self._eval]

    def level_weights(self) -> dict[str, float]:
        counts = Counter(spec.level for spec in self._train)
        return {level: count / len(self._train) for level, count in counts.items()}

    def state(self) -> dict[str, object]:
        return self._passes.state()

    def restore(self, state: dict[str, object]) -> None:
        self._passes.restore(state)


def _some_of_each_level(specs: list[Spec], number: int) -> list[Spec]:
    by_level: dict[str, list[Spec]] = {}
    for spec in specs:
        by_level.setdefault(spec.level, []).append(spec)
    rng = random.Random(f"{SOURCE}/eval")
    return [spec for of_level in by_level.values() for spec in rng.sample(of_level, min(number, len(of_level)))]
