"""What is kept of an evaluation: a line of JSON for every judged rollout, from which every number can be recomputed."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from pipeline.at_k import Array, Ints
from pipeline.errors import ConfigError
from pipeline.rundir import write_atomic


class RolloutOutcome(msgspec.Struct, frozen=True):
    """One judged rollout. `strategy` is empty where the task does not tell its strategies apart."""

    problem_id: str
    level: str
    correct: bool
    reward: float
    num_tokens: int
    truncated: bool
    strategy: str = ""


class ProblemOutcomes(msgspec.Struct, frozen=True):
    """All judged rollouts of one problem, in order."""

    problem_id: str
    level: str
    rollouts: tuple[RolloutOutcome, ...]


def by_problem(outcomes: Iterable[RolloutOutcome]) -> list[ProblemOutcomes]:
    """Problems in the order of their first rollout."""
    grouped: dict[str, list[RolloutOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.problem_id, []).append(outcome)
    return [ProblemOutcomes(name, rows[0].level, tuple(rows)) for name, rows in grouped.items()]


def counts(problems: Sequence[ProblemOutcomes]) -> tuple[Ints, Ints]:
    """How many rollouts each problem has, [P], and how many of them are right, [P]."""
    n = np.array([len(p.rollouts) for p in problems], np.int64)
    return n, np.array([sum(r.correct for r in p.rollouts) for p in problems], np.int64)


def tables(problems: Sequence[ProblemOutcomes], names: Sequence[str]) -> tuple[Ints, Ints]:
    """How often each strategy of `names` was used on each problem, and how often it was right then, [P, Z] both.

    `names` must hold every label of the rollouts.
    """
    used = np.zeros((len(problems), len(names)), np.int64)
    right = np.zeros_like(used)
    column = {name: j for j, name in enumerate(names)}
    for i, problem in enumerate(problems):
        for rollout in problem.rollouts:
            used[i, column[rollout.strategy]] += 1
            right[i, column[rollout.strategy]] += rollout.correct
    return used, right


def rewards(problems: Sequence[ProblemOutcomes]) -> list[Array]:
    return [np.array([r.reward for r in p.rollouts]) for p in problems]


def read_outcomes(path: Path) -> list[RolloutOutcome]:
    """Raises ConfigError, naming file and line, for anything but lines that `write_outcomes` could have written."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `ngu eval MODEL --out {path}` writes one") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    outcomes = []
    decoder = msgspec.json.Decoder(RolloutOutcome)
    for number, line in enumerate(lines, start=1):
        try:
            outcomes.append(decoder.decode(line))
        except msgspec.DecodeError as e:
            raise ConfigError(f"{path}, line {number}: not the outcome of a rollout: {e}") from None
    if not outcomes:
        raise ConfigError(f"{path}: empty; `ngu eval MODEL --out {path}` writes the outcomes of rollouts")
    return outcomes


def write_outcomes(path: Path, outcomes: Iterable[RolloutOutcome]) -> None:
    """Raises ConfigError when the file cannot be written."""
    encode = msgspec.json.Encoder().encode
    try:
        write_atomic(path, b"".join(encode(outcome) + b"\n" for outcome in outcomes))
    except OSError as e:
        raise ConfigError(f"{path}: cannot write the outcomes: {e.strerror}") from None
