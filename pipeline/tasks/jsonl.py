"""Problems from a data file: of questions and answers, or (`pipeline.tasks.code`) of questions and tests."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ConfigError
from pipeline.messages import Verdict
from pipeline.tasks.base import level_shares
from pipeline.tasks.registry import FileConfig, JsonlConfig
from pipeline.tasks.rows import Row, read_rows
from pipeline.tasks.shuffle import ShuffledPasses
from pipeline.verifiers.golds import triage_gold
from samplers.base import Problem

# The held-out problems are the same in every run on a file, whatever its seed, so that runs can be compared.
HOLD_OUT_SEED = 0


class SetAside(NamedTuple):
    """A problem that is never given to a policy, because no answer to it could be right."""

    problem_id: str
    gold: str
    why: str


class FileTask:
    """Shuffled passes over a file's training problems; see `JsonlConfig` for what is held out.

    `answer_of` gives `Problem.answer` of a line. `refuse` says why no answer could match it, or None; such problems
    are not served but listed in `set_aside`.
    """

    def __init__(
        self,
        config: FileConfig,
        seed: int,
        source: str,
        answer_of: Callable[[Row], str],
        refuse: Callable[[str], str | None],
    ):
        if "{question}" not in config.prompt_template:
            raise ConfigError("task.prompt_template must contain {question}")
        self._config, self._source = config, source
        self._answer_of, self._refuse = answer_of, refuse
        self.set_aside: list[SetAside] = []
        problems = self._read(config.path, "")
        if config.eval_path:
            self._eval = self._read(config.eval_path, "eval/")
            self._train = problems
        else:
            self._train, self._eval = _hold_out(problems, config)
        self.num_problems: int | None = len(self._train)
        self.hard_levels = ()
        self._passes = ShuffledPasses(len(self._train), seed)
        self._digest = _digest(self._train)

    def next_problem(self) -> Problem:
        return self._train[self._passes.next_index()]

    def eval_problems(self) -> list[Problem]:
        return list(self._eval)

    def level_weights(self) -> dict[str, float]:
        return level_shares(p.level for p in self._train)

    def state(self) -> dict[str, object]:
        return {**self._passes.state(), "digest": self._digest}

    def restore(self, state: dict[str, object]) -> None:
        if state["digest"] != self._digest:
            raise ConfigError("the task's data or template changed since the checkpoint: restore it or start a new run")
        self._passes.restore(state)

    def _read(self, path: str, id_prefix: str) -> list[Problem]:
        """Every line that can be answered as a problem `<stem>:<line>`; raises ConfigError naming line and field."""
        problems = []
        for row in read_rows(path, "set task.path to a JSON-lines or Parquet file"):
            problem = self._problem(row, f"{id_prefix}{Path(path).stem}:{row.number}")
            if why := self._refuse(problem.answer):
                self.set_aside.append(SetAside(problem.problem_id, problem.answer, why))
            else:
                problems.append(problem)
        if not problems:
            raise ConfigError(f"{path}: no problem can be answered ({self.set_aside[0].why}); correct its golds")
        return problems

    def _problem(self, row: Row, problem_id: str) -> Problem:
        config = self._config
        question = row.text(config.question_field, "task.question_field")
        level = row.text(config.level_field, "task.level_field") if config.level_field else ""
        # Not str.format: the template's \boxed{} is no placeholder, and neither is a brace in a question.
        prompt = config.prompt_template.replace("{question}", question)
        return Problem(problem_id, self._source, prompt, self._answer_of(row), level)


class JsonlTask(FileTask):
    """Questions with one right answer each; a gold that does not verify against itself is set aside."""

    def __init__(self, config: JsonlConfig, seed: int):
        super().__init__(
            config, seed, "jsonl", lambda row: row.gold(config.answer_field, "task.answer_field"), _bad_gold
        )


def _bad_gold(gold: str) -> str | None:
    found = triage_gold(gold)
    return found.detail if isinstance(found, Verdict) and found.outcome != "correct" else None


def _hold_out(problems: list[Problem], config: FileConfig) -> tuple[list[Problem], list[Problem]]:
    if config.eval_size >= len(problems):
        raise ConfigError(
            f"{config.path}: {len(problems)} problems, of which task.eval_size would hold out {config.eval_size}; "
            "lower it or set task.eval_path"
        )
    held_out = set(random.Random(HOLD_OUT_SEED).sample(range(len(problems)), config.eval_size))
    train = [p for i, p in enumerate(problems) if i not in held_out]
    return train, [problems[i] for i in sorted(held_out)]


def _digest(problems: list[Problem]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for problem in problems:
        digest.update(f"{problem.problem_id}\0{problem.prompt}\0{problem.answer}\0".encode())
    return digest.hexdigest()
