"""Reads CSV and JSON-lines tables, with errors that name the file and the row."""

import csv
import math
from pathlib import Path
from typing import Any

import msgspec

from pipeline.errors import ConfigError

Row = dict[str, Any]


def read_table(path: Path) -> list[Row]:
    """The rows of a .csv (with a header) or .jsonl file; raises ConfigError when it is unreadable or empty."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not a readable text file: {e}") from None
    rows = _json_rows(path, text) if path.suffix in (".jsonl", ".json") else list(csv.DictReader(text.splitlines()))
    if not rows:
        raise ConfigError(f"{path}: no rows; a table has a header line and at least one row")
    return rows


def require_columns(path: Path, rows: list[Row], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in rows[0]]
    if missing:
        known = ", ".join(str(name) for name in rows[0])
        raise ConfigError(f"{path}: missing column {', '.join(missing)}; it has {known}")


def number(path: Path, index: int, row: Row, name: str) -> float:
    """A finite number; `index` counts data rows from 0."""
    raw = row.get(name)
    try:
        value = float(raw)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ConfigError(f"{path}, row {index + 1}: {name} is {raw!r}, not a number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{path}, row {index + 1}: {name} is {raw}; remove the row or repair it")
    return value


def integer(path: Path, index: int, row: Row, name: str) -> int:
    value = number(path, index, row, name)
    if value != int(value):
        raise ConfigError(f"{path}, row {index + 1}: {name} is {row[name]}, not a whole number")
    return int(value)


def _json_rows(path: Path, text: str) -> list[Row]:
    rows = []
    for index, line in enumerate(text.splitlines()):
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as e:
            raise ConfigError(f"{path}, line {index + 1}: not a JSON object ({e})") from None
    return rows
