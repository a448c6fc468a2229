"""Attempts of a ledger as a Parquet file, for tools that read tables. Needs pyarrow."""

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError

ROWS_AT_ONCE = 1 << 16
# SQL of a column, its name, and its type as pyarrow spells it.
COLUMNS = (
    ("attempt_id", "attempt", "int64"),
    ("chain_id", "chain", "int64"),
    ("round", "round", "int32"),
    ("problem_id", "problem", "string"),
    ("level", "level", "string"),
    ("coalesce(fates.name, 'open')", "fate", "string"),
    ("step", "step", "int64"),
    ("outcome", "outcome", "string"),
    ("reward", "reward", "float64"),
    ("num_tokens", "tokens", "int64"),
    ("oldest_version", "oldest_version", "int64"),
    ("newest_version", "newest_version", "int64"),
    ("launched_ns", "launched", "timestamp"),
    ("ended_ns", "ended", "timestamp"),
)


def export(db: sqlite3.Connection, where: str, values: Sequence[object], path: Path) -> int:
    """Write the attempts that `where` chooses, in the order of their launch; the number of them.

    `path` is replaced only when everything is written. Raises ConfigError without pyarrow or where it cannot write.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("--export needs pyarrow: pip install pyarrow, or pip install 'ngu-rl[data]'") from None
    types = {"timestamp": pa.timestamp("ns", tz="UTC")}
    schema = pa.schema([(name, types.get(kind) or getattr(pa, kind)()) for _, name, kind in COLUMNS])
    columns = ", ".join(sql for sql, _, _ in COLUMNS)
    join = "attempts LEFT JOIN fates ON fates.code = attempts.fate"
    rows = db.execute(f"SELECT {columns} FROM {join} {where} ORDER BY attempt_id", values)
    partial, num_rows = path.with_name(f".{path.name}.{os.getpid()}.partial"), 0
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            while batch := rows.fetchmany(ROWS_AT_ONCE):
                by_column = zip(zip(*batch, strict=True), schema, strict=True)
                arrays = [pa.array(column, field.type) for column, field in by_column]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                num_rows += len(batch)
        partial.replace(path)
    except OSError as e:
        raise ConfigError(f"{path}: cannot write it: {e.strerror or e}") from None
    finally:
        partial.unlink(missing_ok=True)
    return num_rows
