"""Problems from a reasoning-gym generator, by name."""

import dataclasses
import difflib
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from pipeline.errors import ConfigError
from pipeline.tasks.registry import ReasoningGymConfig
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Problem

_OURS = frozenset(("seed", "size"))
_NONSENSE = "no answer to anything"


class ReasoningGymTask:
    """Indices below `num_problems` are trained on, the `eval_size` after them are held out."""

    def __init__(self, config: ReasoningGymConfig, seed: int):
        if "{question}" not in config.prompt_template:
            raise ConfigError("task.prompt_template must contain {question}")
        self._config = config
        self._seed = seed
        self._dataset = make_dataset(config, seed)
        self._passes = ShuffledPasses(config.num_problems, seed)
        self.num_problems: int | None = config.num_problems
        self.hard_levels = ()
        self._problem(0)  # some parameters are refused only by the generator itself
        self._refuse_blind_scorer()

    def next_problem(self) -> Problem:
        return self._problem(self._passes.next_index())

    def eval_problems(self) -> list[Problem]:
        first = self._config.num_problems
        return [self._problem(index) for index in range(first, first + self._config.eval_size)]

    def level_weights(self) -> dict[str, float]:
        return {"": 1.0}

    def state(self) -> dict[str, object]:
        return self._passes.state()

    def restore(self, state: dict[str, object]) -> None:
        self._passes.restore(state)

    def _refuse_blind_scorer(self) -> None:
        """As that of game_of_life_halting in 0.1.25, which compares whether two texts are empty."""
        try:
            score = self._dataset.score_answer(_NONSENSE, self._dataset[0])
        except Exception:  # it wants another form
            return
        if score >= 1:
            raise ConfigError(f"task.name {self._config.name!r}: its scorer takes any answer; choose another")

    def _problem(self, index: int) -> Problem:
        try:
            entry = self._dataset[index]
        except Exception as e:
            raise ConfigError(f"task.name {self._config.name!r} cannot make problem {index}: {e}") from e
        return Problem(
            problem_id=f"{self._config.name}:{self._seed}:{index}",
            source="reasoning_gym",
            prompt=self._config.prompt_template.replace("{question}", entry["question"]),
            answer=str(entry["answer"] or ""),
        )


def parse_id(problem_id: str, name: str) -> tuple[int, int]:
    """Seed and index of a problem of generator `name`; raises ValueError for an id of another task."""
    found, seed, index = problem_id.split(":")
    if found != name:
        raise ValueError(f"{problem_id} is not a problem of {name}")
    return int(seed), int(index)


def make_dataset(config: ReasoningGymConfig, seed: int) -> Any:
    """The generator, ready to be indexed; raises ConfigError naming the nearest name for a wrong one."""
    if config.num_problems < 1 or config.eval_size < 0:
        raise ConfigError("task.num_problems must be at least 1 and task.eval_size at least 0")
    if config.name not in DATASETS:
        raise ConfigError(f"task.name: no reasoning-gym generator {config.name!r}; {_hint(config.name, DATASETS)}")
    known = {f.name for f in dataclasses.fields(DATASETS[config.name][1])} - _OURS
    for param in config.params:
        if param in _OURS:
            raise ConfigError(f"task.params.{param} is set by the run (seed, num_problems and eval_size); remove it")
        if param not in known:
            raise ConfigError(f"task.params: {config.name} has no {param!r}; {_hint(param, known)}")
    try:
        size = config.num_problems + config.eval_size
        return reasoning_gym.create_dataset(config.name, seed=seed, size=size, **config.params)
    except (AssertionError, ValueError, TypeError) as e:
        raise ConfigError(f"task.params: {config.name} refuses {dict(config.params)}: {e}") from None


def _hint(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}?" if near else "it takes none"
