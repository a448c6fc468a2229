"""`ngu ledger`: ask the record of attempts, of a running run or an ended one."""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from pipeline import rundir
from pipeline.errors import ConfigError, NguError
from pipeline.ledger import Fate
from pipeline.ledger_export import export as export_attempts

Outcome = Literal["correct", "incorrect"]
COLUMNS = ("attempt", "chain", "round", "problem", "level", "fate", "step", "outcome", "reward", "tokens", "versions")
_WIDTHS = (9, 8, 5, 26, 10, 9, 6, 9, 6, 6, 8)
_QUERY = """
SELECT attempt_id, chain_id, round, problem_id, level, coalesce(fates.name, 'open'), step, outcome, reward, num_tokens,
       oldest_version || CASE WHEN newest_version > oldest_version THEN '..' || newest_version ELSE '' END
FROM attempts LEFT JOIN fates ON fates.code = attempts.fate
"""
_TRAINED = "(SELECT code FROM fates WHERE name = 'trained')"
_ONE = "SELECT count(*), min(attempt_id) FROM attempts WHERE"
# Each finds what must not exist: the words that say so, and a query for (number of offences, one of them).
_CHECKS = (
    (
        "attempts were launched and are neither open nor ended",
        "SELECT abs((SELECT launched FROM books) - (SELECT count(*) FROM attempts)"
        " - (SELECT total(attempts) FROM pruned)), NULL",
    ),
    ("open attempts have an end", f"{_ONE} fate = 0 AND ended_ns IS NOT NULL"),
    ("ended attempts have no end", f"{_ONE} fate > 0 AND ended_ns IS NULL"),
    ("attempts ended in a way that has no name", f"{_ONE} fate > 0 AND fate NOT IN (SELECT code FROM fates)"),
    (
        "trained attempts have no step, or were never judged",
        f"{_ONE} fate = {_TRAINED} AND (step IS NULL OR step < 1 OR outcome IS NULL)",
    ),
    (
        "attempts were trained by a step before the policy that sampled them",
        f"{_ONE} fate = {_TRAINED} AND newest_version >= step",
    ),
    (
        "chains were trained by two steps",
        "SELECT count(*), min(id) FROM (SELECT min(attempt_id) AS id FROM attempts"
        f" WHERE fate = {_TRAINED} GROUP BY chain_id HAVING count(DISTINCT step) > 1)",
    ),
)


def ledger(
    run: Annotated[Path, Parameter(help="The directory of a run.")],
    /,
    *,
    problem: Annotated[str | None, Parameter(help="Attempts at this problem.")] = None,
    chain: Annotated[int | None, Parameter(help="Attempts of this chain.")] = None,
    fate: Annotated[Fate | None, Parameter(help="Attempts that ended so.")] = None,
    outcome: Annotated[Outcome | None, Parameter(help="Attempts that were judged so.")] = None,
    step: Annotated[int | None, Parameter(help="Attempts that ended at, or were trained by, this step.")] = None,
    json: Annotated[bool, Parameter(negative="", help="One JSON object a line.")] = False,
    verify: Annotated[bool, Parameter(negative="", help="Check that the books balance; exit 1 if not.")] = False,
    export: Annotated[Path | None, Parameter(help="Write the attempts to this .parquet file instead.")] = None,
) -> int:
    """List the attempts of a run, from launch to end, export them, or check that the books balance."""
    path = rundir.find(run) / "ledger.sqlite"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the run has not launched anything yet")
    wanted = {"problem_id": problem, "chain_id": chain, "fates.name": fate, "outcome": outcome, "step": step}
    wanted = {column: value for column, value in wanted.items() if value is not None}
    if verify and (wanted or json or export):
        raise ConfigError("--verify checks the whole ledger: it goes with no filter and no other output")
    if export is not None and json:
        raise ConfigError("--export writes a Parquet file and --json prints lines: choose one")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            if verify:
                return _verify(db)
            if export is not None:
                print(f"{export_attempts(db, _where(wanted), tuple(wanted.values()), export)} attempts in {export}")
            else:
                with closing(_attempts(db, wanted)) as rows:  # before the database, also when the reader leaves
                    _print(rows, json)
    except sqlite3.DatabaseError as e:
        raise NguError(f"{path}: not a readable ledger ({e})") from None
    return 0


def _attempts(db: sqlite3.Connection, wanted: dict[str, Any]) -> Generator[tuple[Any, ...], None, None]:
    yield from db.execute(f"{_QUERY} {_where(wanted)} ORDER BY attempt_id", tuple(wanted.values()))


def _where(wanted: dict[str, Any]) -> str:
    return f"WHERE {' AND '.join(f'{column} = ?' for column in wanted)}" if wanted else ""


def _print(rows: Iterator[tuple[Any, ...]], json: bool) -> None:
    if json:
        for row in rows:
            print(msgspec.json.encode(dict(zip(COLUMNS, row, strict=True))).decode())
        return
    print(_line(COLUMNS))
    for row in rows:
        print(_line(["-" if value is None else str(value) for value in row]))


def _line(values: Any) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, _WIDTHS, strict=True)).rstrip()


def _verify(db: sqlite3.Connection) -> int:
    db.execute("BEGIN")  # one moment for all the questions, whatever a running coordinator commits meanwhile
    faults = []
    for words, query in _CHECKS:
        count, example = db.execute(query).fetchone()
        if count:
            faults.append(f"{int(count)} {words}" + (f", such as attempt {example}" if example is not None else ""))
    launched, num_open, pruned = db.execute(
        "SELECT launched, (SELECT count(*) FROM attempts WHERE fate = 0), (SELECT total(attempts) FROM pruned)"
        " FROM books"
    ).fetchone()
    for fault in faults:
        print(f"fault: {fault}")
    state = "the books do not balance" if faults else "the books balance"
    print(f"{state}: {launched} launched = {launched - num_open} ended ({pruned:.0f} of them pruned) + {num_open} open")
    return 1 if faults else 0
