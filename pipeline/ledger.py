"""The durable record of every attempt, from its launch to its one end, in SQLite.

Writes are gathered and committed once a turn of the coordinator's loop, before anything that depends on them is sent.
`launched = ended + open` holds in every committed state; launches are counted apart from the attempts themselves, so
that a lost row shows. A verdict is written with the end of its attempt: before that it is in the checkpoint or in the
journal, and a row that is changed once instead of twice costs a third less. What ends is kept as it came until its turn
to be written: a batch ends all at once, and to make its rows would hold one turn of the loop up.
"""

import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pipeline.errors import NguError
from pipeline.messages import Rollout, Verdict, Work

Fate = Literal["trained", "filtered", "stale", "failed", "cancelled", "given_up", "continued"]
FATES: tuple[Fate, ...] = get_args(Fate)
_CODE = {fate: i for i, fate in enumerate(FATES, start=1)}

CHECKPOINT_S = 0.5
MAX_WAL_PAGES = 1 << 14  # 64 MiB
TURN_ENDS, TURN_SHARE = 64, 32  # of the ends that wait, a turn writes at least so many and one in so many
# Attempts that a turn looks at to see whether they are old: at least so many, and so many for each that it launches.
TURN_SEEN, SEEN_PER_LAUNCH = 128, 3

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
CREATE TABLE IF NOT EXISTS pruned (
    problem_id TEXT NOT NULL,
    fate INTEGER NOT NULL,
    level TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    correct INTEGER NOT NULL,
    reward REAL NOT NULL,
    num_tokens INTEGER NOT NULL,
    PRIMARY KEY (problem_id, fate)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS books (launched INTEGER NOT NULL, last_attempt_id INTEGER NOT NULL) STRICT;
INSERT INTO books SELECT count(*), coalesce(max(attempt_id), 0) FROM attempts WHERE NOT EXISTS (SELECT 1 FROM books);
DROP TRIGGER IF EXISTS count_launch; -- a ledger that has it would count launches twice
CREATE TABLE IF NOT EXISTS fates (code INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT;
"""

_VERDICT = "outcome=?, reward=?, num_tokens=?, oldest_version=?, newest_version=?"
_END = "fate=?, ended_ns=?, step=?"
_REOPEN = "UPDATE attempts SET fate=0, ended_ns=NULL, step=NULL WHERE attempt_id=?"


class _Ended(NamedTuple):
    """A few attempts that ended alike, by their ids or, where they were judged, by their rollouts."""

    ids: Sequence[int]
    rollouts: Sequence[Rollout]
    verdicts: Sequence[Verdict]
    how: tuple[int, int, int | None]  # fate, time, step


class Ledger:
    """One writer, the coordinator; others may open the file read-only at any time (WAL)."""

    def __init__(self, path: Path):
        """Raises NguError when what lies at `path` is damaged."""
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._open()
        except sqlite3.DatabaseError as e:
            self._db.close()
            raise NguError(_damaged(path, str(e))) from None
        self._launches: list[tuple] = []
        self._ends: deque[_Ended] = deque()  # not written yet
        self._num_ended = self._num_written = 0  # ends since this process began, and those of them on disk
        self._prune_before, self._prune_from = 0, -1  # the step, and the first attempt to look at; -1: nothing to do
        self.counts: Counter[str] = Counter()
        self._checkpointer: threading.Thread | None = None
        self._closing = threading.Event()
        self.recount()

    def checkpoint_in_background(self) -> None:
        """Move commits from the write-ahead log into the file in a thread, until `close`; a commit that has to do it
        itself takes tens of milliseconds.
        """
        self._db.execute(f"PRAGMA wal_autocheckpoint = {MAX_WAL_PAGES}")  # should the thread never catch up
        self._checkpointer = threading.Thread(target=self._checkpoint, name="ledger-checkpoints", daemon=True)
        self._checkpointer.start()

    def _checkpoint(self) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None)) as db:
            while not self._closing.wait(CHECKPOINT_S):
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _open(self) -> None:
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)
        self._db.executemany("INSERT OR IGNORE INTO fates VALUES (?, ?)", [(c, f) for f, c in _CODE.items()])

    def next_attempt_id(self) -> int:
        return self._db.execute("SELECT last_attempt_id FROM books").fetchone()[0] + 1

    def launch(self, work: Iterable[Work]) -> None:
        """Open attempts; one that a recovery launches again is opened again."""
        now = time.time_ns()
        rows = [(w.attempt_id, w.chain_id, w.round, w.problem.problem_id, w.problem.level, now) for w in work]
        self._launches += rows
        self.counts["launched"] += len(rows)

    def end(self, attempt_ids: Sequence[int], fate: Fate, step: int | None = None) -> None:
        """Close attempts without a verdict; one that is already closed keeps its first fate.

        `step` is the learner's policy version then: of a trained attempt, the step that trained it.
        """
        how = _CODE[fate], time.time_ns(), step
        for first in range(0, len(attempt_ids), TURN_ENDS):
            self._ends.append(_Ended(attempt_ids[first : first + TURN_ENDS], (), (), how))
        self._count_ends(len(attempt_ids), fate)

    def end_judged(
        self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], fate: Fate, step: int | None = None
    ) -> None:
        """The same for attempts that have verdicts, which go on record with their ends."""
        how = _CODE[fate], time.time_ns(), step
        for first in range(0, len(rollouts), TURN_ENDS):
            some = slice(first, first + TURN_ENDS)
            self._ends.append(_Ended((), rollouts[some], verdicts[some], how))
        self._count_ends(len(rollouts), fate)

    def _count_ends(self, num: int, fate: Fate) -> None:
        self._num_ended += num
        self.counts[fate] += num

    def commit_turn(self) -> None:
        """Commit all that was launched, and about as much of what ended: a batch ends all at once, and would hold one
        turn of the loop up. Nothing that leaves this process waits for an end to be written.
        """
        num_waiting = self._num_ended - self._num_written
        self._commit(max(TURN_ENDS, len(self._launches), num_waiting // TURN_SHARE))

    def commit(self) -> None:
        """Commit everything but verdicts of attempts that have not ended."""
        self._commit(self._num_ended - self._num_written)

    def _commit(self, num_ends: int) -> None:
        if not (self._launches or self._ends or self._prune_from >= 0):
            return
        self._db.execute("BEGIN")
        if self._launches:
            self._open_attempts()
        self._num_written += self._write_ends(num_ends)
        if self._prune_from >= 0:
            self._prune_some(max(TURN_SEEN, SEEN_PER_LAUNCH * len(self._launches)))
        self._db.execute("COMMIT")
        self._launches.clear()

    @property
    def num_ended(self) -> int:
        """Ends since this process began."""
        return self._num_ended

    def has_written(self, num_ended: int) -> bool:
        """Whether the first `num_ended` ends since this process began are committed."""
        return self._num_written >= num_ended

    @property
    def log_path(self) -> Path:
        """What has to be synced for all that is committed to survive a power loss: the write-ahead log."""
        return self._path.with_name(f"{self._path.name}-wal")

    def _write_ends(self, num_ends: int) -> int:
        """Of what waits longest, `num_ends` or a few more; how many."""
        judged: list[tuple] = []
        others: list[tuple] = []
        while self._ends and len(judged) + len(others) < num_ends:
            ids, rollouts, verdicts, how = self._ends.popleft()
            others += [(*how, attempt_id) for attempt_id in ids]
            judged += _verdict_rows(rollouts, verdicts, how)
        for columns, rows in ((f"{_VERDICT}, {_END}", judged), (_END, others)):
            if rows:
                self._db.executemany(f"UPDATE attempts SET {columns} WHERE attempt_id=? AND fate=0", rows)
        return len(judged) + len(others)

    def _open_attempts(self) -> None:
        inserted = self._db.executemany(
            "INSERT INTO attempts (attempt_id, chain_id, round, problem_id, level, launched_ns) VALUES (?,?,?,?,?,?)"
            " ON CONFLICT DO NOTHING",
            self._launches,
        ).rowcount
        ids = [(row[0],) for row in self._launches]
        if inserted < len(ids):  # a recovery launches again what is here
            self._db.executemany(_REOPEN, ids)
        # Once a commit: a trigger that counts every row costs a third of its insertion.
        self._db.execute(
            "UPDATE books SET launched = launched + ?, last_attempt_id = max(last_attempt_id, ?)", (inserted, *max(ids))
        )

    def judge(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> None:
        """Put verdicts of open attempts on record, for whoever reads the ledger while nothing runs; commits all."""
        self.commit()
        self._db.execute("BEGIN")
        self._db.executemany(
            f"UPDATE attempts SET {_VERDICT} WHERE attempt_id=? AND fate=0", _verdict_rows(rollouts, verdicts)
        )
        self._db.execute("COMMIT")

    def check_holds(self, num_launched: int) -> None:
        """Raises NguError unless at least so many attempts are on record, as a checkpoint says."""
        if self.counts["launched"] < num_launched:
            missing = f"{num_launched - self.counts['launched']} attempts of the checkpoint are missing"
            raise NguError(_damaged(self._path, missing))

    def rewind(self, step: int, keep: Sequence[int]) -> None:
        """Go back to the checkpoint at `step`, whose open attempts were `keep`; everything else open is cancelled.

        Optimizer steps after the checkpoint are lost with the learner that made them: what they trained is open again
        if the checkpoint holds it, and cancelled if not. Repeating the journal then opens what was launched since.
        """
        self._db.execute("BEGIN")
        self._db.execute(
            "UPDATE attempts SET fate=?, ended_ns=?, step=? WHERE fate=0 OR (fate=? AND step > ?)",
            (_CODE["cancelled"], time.time_ns(), step, _CODE["trained"], step),
        )
        self._db.executemany(_REOPEN, [(a,) for a in keep])
        self._db.execute("COMMIT")
        self.recount()

    def prune(self, before_step: int) -> None:
        """Fold attempts that ended before the learner reached `before_step` into sums by problem and fate: some of them
        with each commit that follows, until all were looked at; while that is under way it only goes further.

        Nothing that a checkpoint still in use holds open may have ended so early.
        """
        self._prune_before = before_step
        self._prune_from = max(self._prune_from, 0)

    def _prune_some(self, num_seen: int) -> None:
        rows = "SELECT attempt_id FROM attempts WHERE attempt_id >= ? ORDER BY attempt_id LIMIT ?"
        first = self._prune_from
        last, num = self._db.execute(f"SELECT max(attempt_id), count(*) FROM ({rows})", (first, num_seen)).fetchone()
        self._prune_from = last + 1 if num == num_seen else -1
        old, bounds = "attempt_id BETWEEN ? AND ? AND fate > 0 AND step < ?", (first, last, self._prune_before)
        self._db.execute(
            "INSERT INTO pruned SELECT problem_id, fate, min(level), count(*), sum(outcome IS 'correct'),"
            f" total(reward), coalesce(sum(num_tokens), 0) FROM attempts WHERE {old} GROUP BY problem_id, fate"
            " ON CONFLICT DO UPDATE SET attempts = attempts + excluded.attempts, correct = correct + excluded.correct,"
            " reward = reward + excluded.reward, num_tokens = num_tokens + excluded.num_tokens",
            bounds,
        )
        self._db.execute(f"DELETE FROM attempts WHERE {old}", bounds)

    def recount(self) -> None:
        """Set `counts` to what is stored."""
        self.counts.clear()
        for name, n in self.stored_counts().items():
            self.counts["launched"] += n
            if name != "open":
                self.counts[name] = n

    @property
    def num_open(self) -> int:
        return self.counts["launched"] - sum(self.counts[f] for f in FATES)

    def stored_counts(self) -> dict[str, int]:
        """Attempts by fate as committed on disk, with `open`; pruned ones count."""
        names = ("open", *FATES)
        rows = self._db.execute(
            "SELECT fate, sum(n) FROM (SELECT fate, count(*) AS n FROM attempts GROUP BY fate"
            " UNION ALL SELECT fate, attempts FROM pruned) GROUP BY fate"
        ).fetchall()
        return {names[code]: n for code, n in rows}

    def close(self) -> None:
        self.commit()
        self._closing.set()
        if self._checkpointer is not None:
            self._checkpointer.join()
        self._db.close()


def _verdict_rows(rollouts: Sequence[Rollout], verdicts: Sequence[Verdict], how: tuple = ()) -> list[tuple]:
    """For `_VERDICT`, then `how`, then the attempt's id."""
    rows = []
    for rollout, verdict in zip(rollouts, verdicts, strict=True):
        spans = rollout.version_spans
        if len(spans) == 1:
            oldest = newest = spans[0].policy_version
        else:
            oldest, newest = rollout.oldest_version, rollout.newest_version
        num_tokens = len(rollout.completion_ids) // 4
        rows.append((verdict.outcome, verdict.reward, num_tokens, oldest, newest, *how, rollout.attempt_id))
    return rows


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path}: damaged ({what}); put a copy of it back, or begin a new run at the last checkpoint: `ngu train "
        f"{path.parent}/config.toml model.path={path.parent}/checkpoints/step_N/model`"
    )
