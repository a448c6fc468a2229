"""Problems from a JSON-lines file of questions and answers."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.tasks.base import level_shares
from pipeline.tasks.registry import JsonlConfig
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Problem

# The held-out problems are the same in every run on a file, whatever its seed, so that runs can be compared.
HOLD_OUT_SEED = 0


class JsonlTask:
    """Shuffled passes over the file's training problems; see `JsonlConfig` for what is held out."""

    def __init__(self, config: JsonlConfig, seed: int):
        if "{question}" not in config.prompt_template:
            raise ConfigError("task.prompt_template must contain {question}")
        problems = read_problems(config, config.path, "")
        if config.eval_path:
            self._eval = read_problems(config, config.eval_path, "eval/")
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


def read_problems(config: JsonlConfig, path: str, id_prefix: str) -> list[Problem]:
    """Every line of `path` as a problem `<stem>:<line>`; raises ConfigError naming the file, line and field."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; set task.path to a JSON-lines file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not a readable UTF-8 text file: {e}") from None
    stem = f"{id_prefix}{Path(path).stem}"
    problems = [
        _problem(config, line, f"{path}, line {number}", f"{stem}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not problems:
        raise ConfigError(f"{path}: empty; a task needs at least one problem")
    return problems


def _problem(config: JsonlConfig, line: str, where: str, problem_id: str) -> Problem:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as e:
        raise ConfigError(f"{where}: not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON {type(row).__name__}, not an object with fields")
    question = _field(row, config.question_field, "question_field", where)
    answer = _gold(_field(row, config.answer_field, "answer_field", where))
    if not answer:
        raise ConfigError(f"{where}: nothing follows #### in field {config.answer_field!r}")
    level = _field(row, config.level_field, "level_field", where) if config.level_field else ""
    # Not str.format: the template's \boxed{} is no placeholder, and neither is a brace in a question.
    prompt = config.prompt_template.replace("{question}", question)
    return Problem(problem_id=problem_id, source="jsonl", prompt=prompt, answer=answer, level=level)


def _field(row: dict[str, Any], name: str, option: str, where: str) -> str:
    if name not in row:
        present = ", ".join(sorted(map(repr, row))) or "none"
        raise ConfigError(f"{where}: no field {name!r} (fields present: {present}); set task.{option}")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ConfigError(f"{where}: field {name!r} must be a non-empty text or a number, not {value!r:.40}")
    return str(value).strip()


def _gold(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def _hold_out(problems: list[Problem], config: JsonlConfig) -> tuple[list[Problem], list[Problem]]:
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
