"""Figures as text: the rows of one run, and the cells of each row."""

from collections.abc import Iterable

import msgspec

from bench.suite.base import Row
from bench.suite.results import Result

HEADER = ("what", "median", "95% interval", "target", "")


def text_table(result: Result) -> str:
    """The rows of one run for a terminal."""
    return f"{result.benchmark}: {circumstances(result)}\n{row_table(result.rows)}"


def row_table(rows: Iterable[Row]) -> str:
    lines = [HEADER, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def circumstances(result: Result) -> str:
    machine, (before, after) = result.machine, result.load
    at = f" at {result.commit}" if result.commit else ""
    changed = "".join(f", {name}={msgspec.json.encode(value).decode()}" for name, value in result.changed.items())
    return (
        f"{result.taken}{at}, {machine.cores} cores of {machine.cpu}, load {before:.1f} to {after:.1f}, "
        f"{result.seconds:.0f} s{changed}"
    )


def cells(row: Row) -> tuple[str, str, str, str, str]:
    return (
        row.what,
        _with_unit(row.median, row.unit),
        f"[{number(row.low)}, {number(row.high)}]" if row.num > 1 else "",
        _target(row),
        row.outcome or "",
    )


def number(value: float) -> str:
    """Three digits that matter, and none of a count that is whole."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with_unit(value: float, unit: str) -> str:
    return f"{number(value)}{'' if unit in ('%', 'x', '') else ' '}{unit}"


def _target(row: Row) -> str:
    if row.at_least is not None:
        return f"≥ {_with_unit(row.at_least, row.unit)}"
    return f"≤ {_with_unit(row.at_most, row.unit)}" if row.at_most is not None else ""
