"""Problems sorted by how hard a model finds them: the sets of IsoCompute (arXiv 2603.12151) and buckets of difficulty.

A problem gets 16 rollouts, and those that matter 128: avg@16 is the share of the first 16 that is right, pass@128
whether any of 128 is. Every finished problem is a line of `measured.jsonl`, so that a measurement can go on.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.evaluation.outcomes import RolloutOutcome, by_problem
from pipeline.errors import ConfigError
from pipeline.messages import Problem

NUM_FIRST, NUM_ALL = 16, 128
EASY = (0.3, 0.6)
HARD_MOST = 0.0625
MEASURED = "measured.jsonl"
# How many problems are measured between two writes of `measured.jsonl`.
CHUNK = 64

# Difficulty buckets: the largest pass rate that belongs to each. The numbers keep them in order in a report.
BUCKETS = (
    (0.0, "1 never solved"),
    (HARD_MOST, "2 hard"),
    (EASY[0], "3 middling"),
    (EASY[1], "4 easy"),
    (1.0, "5 easiest"),
)

# (problems, rollouts of each, what to call with the number just settled) -> judged rollouts
RollOut = Callable[[Sequence[Problem], int, Callable[[int], object]], list[RolloutOutcome]]


class Measured(msgspec.Struct, frozen=True):
    """A problem's judged rollouts of one stage, in order; fewer than `num_asked` where some could not be judged."""

    problem_id: str
    num_asked: int
    correct: tuple[bool, ...]


class Difficulty(msgspec.Struct, frozen=True):
    """What is known of a problem. `avg_at_16` is None if none of its first rollouts could be judged."""

    problem: Problem
    num_rollouts: int
    num_correct: int
    avg_at_16: float | None
    is_complete: bool

    @property
    def sets(self) -> list[str]:
        """Easy, Hard and Extremely Hard; the last is part of the second."""
        if self.avg_at_16 is None:
            return []
        names = ["easy"] if EASY[0] <= self.avg_at_16 <= EASY[1] else []
        names += ["hard"] if self.avg_at_16 <= HARD_MOST else []
        return names + (["extremely_hard"] if self.is_complete and not self.num_correct else [])

    @property
    def bucket(self) -> str:
        rate = self.num_correct / self.num_rollouts
        return next(name for most, name in BUCKETS if rate <= most)


class Measurement:
    """What is measured so far, kept in `directory`; raises ConfigError if that holds the measurement of something else.

    `identity` says what is measured.
    """

    def __init__(self, directory: Path, identity: dict[str, Any]):
        self._file = directory / MEASURED
        self.done: dict[tuple[str, int], Measured] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_bytes().splitlines(keepends=True) if self._file.exists() else []
        except OSError as e:
            raise ConfigError(f"{directory}: cannot be used: {e.strerror}; choose another --out") from None
        header = msgspec.json.encode(identity) + b"\n"
        if lines and lines[0] != header:
            raise ConfigError(f"{self._file} measured another model, task or settings; choose another --out")
        whole = [line for line in lines[1:] if line.endswith(b"\n")]  # a kill may have torn the last
        for number, line in enumerate(whole, start=2):
            try:
                self._take(msgspec.json.decode(line, type=Measured))
            except msgspec.DecodeError as e:
                raise ConfigError(f"{self._file}, line {number}: not a measured problem: {e}") from None
        self._file.write_bytes(b"".join([header, *whole]))

    def _take(self, measured: Measured) -> None:
        self.done[measured.problem_id, measured.num_asked] = measured

    def missing(self, problems: Iterable[Problem], num_asked: int) -> list[Problem]:
        return [p for p in problems if (p.problem_id, num_asked) not in self.done]

    def measure(self, problems: Sequence[Problem], num_asked: int, roll_out: RollOut, advance: Callable[[int], object]):
        """Roll out what is missing of a stage, chunk by chunk; each chunk is kept before the next begins."""
        todo = self.missing(problems, num_asked)
        for start in range(0, len(todo), CHUNK):
            chunk = todo[start : start + CHUNK]
            found = {p.problem_id: p.rollouts for p in by_problem(roll_out(chunk, num_asked, advance))}
            rows = [Measured(p.problem_id, num_asked, _correct(found.get(p.problem_id, ()))) for p in chunk]
            with self._file.open("ab") as out:
                out.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
            for row in rows:
                self._take(row)

    def difficulty(self, problem: Problem) -> Difficulty:
        first = self.done[problem.problem_id, NUM_FIRST].correct
        rest = self.done.get((problem.problem_id, NUM_ALL - NUM_FIRST))
        correct = first + (rest.correct if rest is not None else ())
        average = sum(first) / len(first) if first else None
        return Difficulty(problem, len(correct), sum(correct), average, is_complete=len(correct) == NUM_ALL)


def _correct(rollouts: Iterable[RolloutOutcome]) -> tuple[bool, ...]:
    return tuple(r.correct for r in rollouts)


def write_sets(directory: Path, difficulties: Sequence[Difficulty], fields: Callable[[Problem], dict[str, Any]]) -> Any:
    """Each set as JSON lines that `task.path` takes, `buckets.jsonl` with every problem that has all its rollouts, and
    `split.json`, which is returned: how many problems are in which.

    `fields` are those of a problem that its task reads; the bucket goes into `level`.
    """
    names = ("easy", "hard", "extremely_hard")
    files = {name: [d for d in difficulties if name in d.sets] for name in names}
    files["buckets"] = [d for d in difficulties if d.is_complete]
    for name, members in files.items():
        rows = (fields(d.problem) | _about(d) for d in members)
        (directory / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    summary = {
        "problems": len(difficulties),
        "sets": {name: len(files[name]) for name in names},
        "buckets": {name: sum(d.bucket == name for d in files["buckets"]) for _, name in BUCKETS},
        "unjudged": [d.problem.problem_id for d in difficulties if d.avg_at_16 is None],
    }
    (directory / "split.json").write_bytes(msgspec.json.encode(summary) + b"\n")
    return summary


def _about(d: Difficulty) -> dict[str, Any]:
    known = {"problem_id": d.problem.problem_id, "avg_at_16": d.avg_at_16}
    known |= {"num_rollouts": d.num_rollouts, "num_correct": d.num_correct}
    return known | ({"level": d.bucket} if d.is_complete else {"level": ""})
