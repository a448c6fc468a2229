"""Figures for people: the table of one run, one page of the newest figures, and the history as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.scaling.figures import COLOURS, style
from bench.suite.base import Row
from bench.suite.registry import BENCHMARKS
from bench.suite.results import Result
from pipeline.errors import ConfigError

HEADER = ("what", "median", "95% interval", "target", "")
PANELS_ACROSS = 3
MAX_LINES = len(COLOURS)

History = Mapping[str, Sequence[Result]]


def text_table(result: Result) -> str:
    """The rows of one run for a terminal."""
    rows = [HEADER, *map(cells, result.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"{result.benchmark}: {circumstances(result)}"
    return "\n".join([title, *lines])


def circumstances(result: Result) -> str:
    machine, (before, after) = result.machine, result.load
    at = f" at {result.commit}" if result.commit else ""
    return (
        f"{result.taken}{at}, {machine.cores} cores of {machine.cpu}, load {before:.1f} to {after:.1f}, "
        f"{result.seconds:.0f} s"
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
    return f"{number(value)}{'' if unit == '%' else ' '}{unit}" if unit != "x" else f"{number(value)}x"


def _target(row: Row) -> str:
    if row.at_least is not None:
        return f"≥ {_with_unit(row.at_least, row.unit)}"
    return f"≤ {_with_unit(row.at_most, row.unit)}" if row.at_most is not None else ""


# --- the page ---


def write_report(history: History, out: Path) -> list[Path]:
    """Write OUT/report.md and OUT/report.png. Raises ConfigError when it cannot."""
    page, picture = out / "report.md", out / "report.png"
    figure = _draw(history)
    try:
        out.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(history, picture.name))
        FigureCanvasAgg(figure)
        figure.savefig(picture, dpi=130)
    except OSError as e:
        raise ConfigError(f"{out}: cannot write the report: {e.strerror}; choose another --out") from None
    return [page, picture]


def markdown(history: History, picture: str) -> str:
    newest = {name: results[-1] for name, results in history.items() if results}
    outcomes = [row.outcome for result in newest.values() for row in result.rows if row.outcome]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("met", "open", "missed"))
    lines = [
        "# Benchmarks",
        "",
        f"The newest run of each (`ngu bench`), medians with 95% bootstrap intervals. Targets: {counts} (open: the "
        "target lies in the interval).",
        "",
        f"![Figures with a target, divided by it, over time]({picture})",
    ]
    for name, result in newest.items():
        lines += ["", f"## {name}", "", f"{_sentence(name)}. {circumstances(result)}.", ""]
        lines += [_line(HEADER), _line(("---",) * len(HEADER)), *(_line(cells(row)) for row in result.rows)]
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
    return "\n".join(lines) + "\n"


def _sentence(name: str) -> str:
    text = BENCHMARKS[name].sentence if name in BENCHMARKS else "of another version of this program"
    return text[:1].upper() + text[1:]


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(part.replace('|', ' ') for part in parts)} |"


# --- the picture ---


def _draw(history: History) -> Figure:
    """A panel for each benchmark: what has a target divided by it, else all that is a ratio, over its runs."""
    across = min(PANELS_ACROSS, len(history))
    down = -(-len(history) // across)
    figure = Figure(figsize=(4.2 * across, 3.1 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel, (name, results) in zip(panels, history.items(), strict=False):
        _panel(panel, name, results)
    for panel in panels[len(history) :]:
        panel.set_visible(False)
    return figure


def _panel(axes: Axes, name: str, results: Sequence[Result]) -> None:
    rows = [row for result in results for row in result.rows]
    aimed = any(_aim(row) for row in rows)
    drawn = list(dict.fromkeys(row.what for row in rows if (_aim(row) if aimed else row.unit == "x")))[:MAX_LINES]
    style(axes, name, "run", "times its target" if aimed else "ratio")
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    for colour, what in zip(COLOURS, drawn, strict=False):
        points = [
            (i, row.median / (_aim(row) or 1.0), row.low / (_aim(row) or 1.0), row.high / (_aim(row) or 1.0))
            for i, result in enumerate(results)
            for row in result.rows
            if row.what == what and row.median > 0
        ]
        if points:
            x, middle, low, high = zip(*points, strict=True)
            axes.plot(x, middle, marker="o", markersize=3.5, linewidth=1.2, color=colour, label=what)
            axes.vlines(x, low, high, color=colour, linewidth=0.8)
    if drawn:
        axes.set_yscale("log")
        axes.legend(fontsize=6, frameon=False)
    axes.set_xticks(range(len(results)), [f"{r.taken[5:10]}\n{r.commit}" for r in results], fontsize=6)


def _aim(row: Row) -> float | None:
    return row.at_least if row.at_least is not None else row.at_most
