"""What a recorded run's ledger says of each problem."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError

# Attempts that failed or were cancelled have no outcome: they count as launched and say nothing of the problem.
_QUERY = """
SELECT problem_id,
       min(level),
       count(*),
       sum(outcome IS NOT NULL),
       sum(coalesce(outcome = 'correct', 0)),
       sum(outcome IS NOT NULL AND round = 0),
       sum(coalesce(outcome = 'correct' AND round = 0, 0)),
       sum(fates.name IS 'trained'),
       coalesce(avg(num_tokens), 0)
FROM attempts LEFT JOIN fates ON fates.code = attempts.fate
GROUP BY problem_id
ORDER BY min(attempt_id)
"""


class Record(msgspec.Struct, frozen=True):
    """All attempts of one problem; `first_*` count those of first rounds only, whose rate no stopping rule biases."""

    problem_id: str
    level: str
    launched: int
    judged: int
    correct: int
    first_judged: int
    first_correct: int
    trained: int
    mean_tokens: float


def read_ledger(run: Path) -> list[Record]:
    """One record a problem with at least one judged attempt, in the order they were first launched.

    Raises ConfigError when `run` has no ledger or an empty one.
    """
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise ConfigError(f"{run}: no ledger.sqlite there; give the directory of a run")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            rows = db.execute(_QUERY).fetchall()
    except sqlite3.Error as e:
        raise ConfigError(f"{path}: cannot be read as a ledger: {e}") from None
    records = [record for row in rows if (record := Record(*row)).judged]
    if not records:
        raise ConfigError(f"{path}: no judged attempt; let the run go on for a while first")
    return records
