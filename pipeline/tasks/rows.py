"""Reading data files (JSON lines, or a table): errors name the file, the line or row, and the field."""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError
from pipeline.tasks.tables import is_table, read_table
from pipeline.verifiers.extract import last_boxed

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Row(NamedTuple):
    """One line or row; `number` counts from 1, `where` names file and line in errors."""

    number: int
    where: str
    fields: dict[str, Any]

    def value(self, name: str, option: str) -> Any:
        """The field `name`, which the setting or flag `option` chose; raises ConfigError when it is absent."""
        if name not in self.fields:
            present = ", ".join(sorted(map(repr, self.fields))) or "none"
            raise ConfigError(f"{self.where}: no field {name!r} (fields present: {present}); set {option}")
        return self.fields[name]

    def text(self, name: str, option: str) -> str:
        """A text or number, stripped; raises ConfigError when the field is absent, empty or something else."""
        value = self.value(name, option)
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
            raise ConfigError(f"{self.where}: field {name!r} must be a non-empty text or a number, not {value!r:.40}")
        if isinstance(value, float) and not math.isfinite(value):  # a missing value, or an overflow
            raise ConfigError(f"{self.where}: field {name!r} must be a finite number, not {value}")
        return str(value).strip()

    def gold(self, name: str, option: str) -> str:
        r"""The right answer: of a worked solution what follows the last `####` or stands in its last `\boxed{}`."""
        text = self.text(name, option)
        gold = text.rpartition("####")[2].strip()
        if not gold:
            raise ConfigError(f"{self.where}: nothing follows #### in field {name!r}")
        return last_boxed(gold) or gold


def read_rows(path: str, remedy: str) -> list[Row]:
    """Every row of a table, or line that is not blank; raises ConfigError for none, or a line that is no JSON object.

    `remedy` says what to do about a missing file.
    """
    if is_table(Path(path)) and Path(path).exists():
        fields = enumerate(read_table(Path(path)), start=1)
        rows = [Row(number, f"{path}, row {number}", row) for number, row in fields]
    else:
        rows = _read_lines(path, remedy)
    if not rows:
        raise ConfigError(f"{path}: empty; it needs at least one line or row")
    return rows


def _read_lines(path: str, remedy: str) -> list[Row]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {remedy}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not a readable UTF-8 text file: {e}") from None
    return [
        Row(number, f"{path}, line {number}", _object(line, f"{path}, line {number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if _ESCAPED_SURROGATE.search(line):
            json.dumps(row, ensure_ascii=False).encode()  # half a character would fail later, on the wire
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where}: not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON {type(row).__name__}, not an object with fields")
    return row
