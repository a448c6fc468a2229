"""The durable record of every attempt, from its launch to its one end, in SQLite.

Writes are gathered and committed once a turn of the coordinator's loop, before anything that depends on them is sent.
`launched = ended + open` holds in every committed state.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

from pipeline.messages import Rollout, Verdict, Work

Fate = Literal["trained", "filtered", "stale", "failed", "cancelled", "given_up"]
FATES: tuple[Fate, ...] = get_args(Fate)
_CODE = {fate: i for i, fate in enumerate(FATES, start=1)}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    attempt_id INTEGER PRIMARY KEY,
    chain_id INTEGER NOT NULL,
    round INTEGER NOT NULL,
    problem_id TEXT NOT NULL,
    level TEXT NOT NULL,
    fate INTEGER NOT NULL DEFAULT 0,
    launched_ns INTEGER NOT NULL,
    ended_ns INTEGER,
    outcome TEXT,
    reward REAL,
    num_tokens INTEGER,
    oldest_version INTEGER,
    newest_version INTEGER,
    step INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS open_attempts ON attempts (attempt_id) WHERE fate = 0;
CREATE TABLE IF NOT EXISTS fates (code INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT;
"""


class Ledger:
    """One writer, the coordinator; others may open the file read-only at any time (WAL)."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._db.executemany("INSERT OR IGNORE INTO fates VALUES (?, ?)", [(c, f) for f, c in _CODE.items()])
        self._launches: list[tuple] = []
        self._judgements: list[tuple] = []
        self._ends: list[tuple] = []
        self.counts: Counter[str] = Counter()
        self._count()

    def next_attempt_id(self) -> int:
        return (self._db.execute("SELECT max(attempt_id) FROM attempts").fetchone()[0] or 0) + 1

    def launch(self, work: Iterable[Work]) -> None:
        now = time.time_ns()
        for w in work:
            self._launches.append((w.attempt_id, w.chain_id, w.round, w.problem.problem_id, w.problem.level, now))
            self.counts["launched"] += 1

    def judge(self, rollout: Rollout, verdict: Verdict) -> None:
        versions = [s.policy_version for s in rollout.version_spans]
        self._judgements.append(
            (
                verdict.outcome,
                verdict.reward,
                rollout.num_tokens,
                min(versions, default=None),
                max(versions, default=None),
                rollout.attempt_id,
            )
        )

    def end(self, attempt_ids: Sequence[int], fate: Fate, step: int | None = None) -> None:
        """Close attempts; one that is already closed keeps its first fate."""
        now = time.time_ns()
        self._ends.extend((_CODE[fate], now, step, a) for a in attempt_ids)
        self.counts[fate] += len(attempt_ids)

    def commit(self) -> None:
        if not (self._launches or self._judgements or self._ends):
            return
        self._db.execute("BEGIN")
        self._db.executemany(
            "INSERT INTO attempts (attempt_id, chain_id, round, problem_id, level, launched_ns) VALUES (?,?,?,?,?,?)",
            self._launches,
        )
        self._db.executemany(
            "UPDATE attempts SET outcome=?, reward=?, num_tokens=?, oldest_version=?, newest_version=?"
            " WHERE attempt_id=?",
            self._judgements,
        )
        self._db.executemany("UPDATE attempts SET fate=?, ended_ns=?, step=? WHERE attempt_id=? AND fate=0", self._ends)
        self._db.execute("COMMIT")
        self._launches.clear()
        self._judgements.clear()
        self._ends.clear()

    def rewind(self, step: int, keep: Sequence[int]) -> None:
        """Go back to the checkpoint at `step`, whose open attempts were `keep`; everything else open is cancelled.

        Optimizer steps after the checkpoint are lost with the learner that made them: what they trained is open again
        if the checkpoint holds it, and cancelled if not.
        """
        self._db.execute("BEGIN")
        self._db.execute(
            "UPDATE attempts SET fate=?, ended_ns=? WHERE fate=0 OR step > ?",
            (_CODE["cancelled"], time.time_ns(), step),
        )
        self._db.executemany(
            "UPDATE attempts SET fate=0, ended_ns=NULL, step=NULL WHERE attempt_id=?", [(a,) for a in keep]
        )
        self._db.execute("COMMIT")
        self._count()

    def _count(self) -> None:
        self.counts.clear()
        for name, n in self.stored_counts().items():
            self.counts["launched"] += n
            if name != "open":
                self.counts[name] = n

    @property
    def num_open(self) -> int:
        return self.counts["launched"] - sum(self.counts[f] for f in FATES)

    def stored_counts(self) -> dict[str, int]:
        """Attempts by fate as committed on disk, with `open`."""
        names = ("open", *FATES)
        rows = self._db.execute("SELECT fate, count(*) FROM attempts GROUP BY fate").fetchall()
        return {names[code]: n for code, n in rows}

    def close(self) -> None:
        self.commit()
        self._db.close()
