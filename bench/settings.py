"""Tables of settings as TOML has them: laid over each other, by dotted keys, and flat."""

from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

Table = dict[str, Any]


def overlay(base: Table, changes: Table) -> Table:
    """`base` with `changes`. Another `kind` of a table starts from its own defaults: the fields of the one do not fit
    the other.
    """
    result = {} if "kind" in changes and base.get("kind") != changes["kind"] else dict(base)
    for name, value in changes.items():
        inner = result.get(name)
        result[name] = overlay(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return result


def nested(table: Table, path: Path) -> Table:
    """Keys written "a.b" in quotes mean what a.b means without. Raises ConfigError naming `path`."""
    result: Table = {}
    for key, value in table.items():
        put(result, key, nested(value, path) if isinstance(value, dict) else value, path)
    return result


def put(table: Table, key: str, value: Any, path: Path) -> None:
    """Set the dotted `key`; raises ConfigError naming `path` when a part of it is a value."""
    *tables, leaf = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {key}: {name} is a value, not a table")
    if isinstance(value, dict) and isinstance(table.get(leaf), dict):
        for name, inner in value.items():
            put(table[leaf], name, inner, path)
    else:
        table[leaf] = value


def flat(table: Table, prefix: str = "") -> Table:
    """The leaves of nested tables by their dotted keys."""
    leaves: Table = {}
    for name, value in table.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return leaves
