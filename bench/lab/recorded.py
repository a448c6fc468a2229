"""What a recorded run's ledger says of each problem."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from pipeline.errors import ConfigError

# Attempts that failed or were cancelled may have no outcome: they count as launched and say nothing of the problem.
_ATTEMPTS = """
SELECT problem_id, level, 1 AS launched, outcome IS NOT NULL AS judged, outcome IS 'correct' AS correct,
       outcome IS NOT NULL AND round = 0 AS first_judged, outcome IS 'correct' AND round = 0 AS first_correct,
       fates.name IS 'trained' AS trained, iif(outcome IS NULL, 0, coalesce(num_tokens, 0)) AS tokens
FROM attempts LEFT JOIN fates ON fates.code = attempts.fate
"""
# Of what a long run has folded into sums, the rounds are lost; these fates come to judged attempts only.
_PRUNED = """
UNION ALL
SELECT problem_id, level, attempts, attempts * is_judged, correct * is_judged, 0, 0,
       attempts * (name = 'trained'), num_tokens * is_judged
FROM (SELECT *, name IN ('trained', 'filtered', 'given_up', 'stale') AS is_judged
      FROM pruned JOIN fates ON fates.code = pruned.fate)
"""
_SUMS = """
SELECT problem_id, min(level), sum(launched), sum(judged), sum(correct), sum(first_judged), sum(first_correct),
       sum(trained), 1.0 * sum(tokens) / max(sum(judged), 1)
FROM ({}) GROUP BY problem_id ORDER BY problem_id
"""


class Record(msgspec.Struct, frozen=True):
    """All attempts of one problem; `first_*` count those that are known to be of first rounds, whose rate no stopping
    rule biases.
    """

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
    """One record a problem with at least one judged attempt.

    Raises ConfigError when `run` has no ledger or an empty one.
    """
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise ConfigError(f"{run}: no ledger.sqlite there; give the directory of a run")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            is_pruned = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'pruned'").fetchone()
            rows = db.execute(_SUMS.format(_ATTEMPTS + (_PRUNED if is_pruned else ""))).fetchall()
    except sqlite3.Error as e:
        raise ConfigError(f"{path}: cannot be read as a ledger: {e}") from None
    records = [record for row in rows if (record := Record(*row)).judged]
    if not records:
        raise ConfigError(f"{path}: no judged attempt; let the run go on for a while first")
    return records
