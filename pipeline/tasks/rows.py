"""Reading JSON-lines files: one object a line, and errors that name the file, the line and the field."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError


class Row(NamedTuple):
    """One line; `number` counts from 1, `where` names file and line in errors."""

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
        return str(value).strip()

    def gold(self, name: str, option: str) -> str:
        """The right answer; of the GSM8K form (`working #### 42`) what follows `####`."""
        gold = self.text(name, option).rpartition("####")[2].strip()
        if not gold:
            raise ConfigError(f"{self.where}: nothing follows #### in field {name!r}")
        return gold


def read_rows(path: str, remedy: str) -> list[Row]:
    """Every line that is not blank; raises ConfigError when there is none or one is no JSON object.

    `remedy` says what to do about a missing file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {remedy}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not a readable UTF-8 text file: {e}") from None
    rows = [
        Row(number, f"{path}, line {number}", _object(line, f"{path}, line {number}"))
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise ConfigError(f"{path}: empty; it needs at least one line")
    return rows


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as e:
        raise ConfigError(f"{where}: not JSON ({e}); every line must be one JSON object") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a JSON {type(row).__name__}, not an object with fields")
    return row
