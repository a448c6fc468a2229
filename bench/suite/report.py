"""Figures for people: one page of the newest, and the history as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from bench.scaling.figures import COLOURS, style
from bench.suite.base import Row
from bench.suite.registry import BENCHMARKS
from bench.suite.results import Result
from bench.suite.tables import HEADER, cells, circumstances
from pipeline.errors import ConfigError

WIDTH_IN, MARGIN_IN, LINE_IN = 10.0, 0.85, 0.24
MAX_RUNS = 8  # of one figure, side by side
SPREAD = 0.3  # of a line's height, above and below its middle
PAST = "#9fb8d6"
OUTCOME_COLOURS = {"met": "#2f7d4f", "open": "#b07d00", "missed": "#b3261e", None: COLOURS[0]}

History = Mapping[str, Sequence[Result]]


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
        f"![Figures with a target, in multiples of it, over the runs]({picture})",
        "",
        "The newest run in green where the target is met, amber where it is open, red where it is missed; earlier runs "
        "with the same parameters above it. Where a benchmark has no targets, its ratios. Parameters that are not the "
        "defaults, which the targets are about, are named with the run.",
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
    """A panel for each benchmark, with a line for each figure: its runs from top to bottom, the newest in colour."""
    panels = {name: _drawn(results) for name, results in history.items()}
    panels = {name: rows for name, rows in panels.items() if rows} or {"nothing with a target, and no ratio": []}
    heights = [MARGIN_IN + LINE_IN * max(1, len(rows)) for rows in panels.values()]
    figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
    for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
        results = history.get(name, ())
        _panel(axes, name, rows, [r for r in results if r.parameters == results[-1].parameters])
    return figure


def _drawn(results: Sequence[Result]) -> list[str]:
    """The newest run's figures with a target, else its ratios. A log axis has no place for a figure of 0, nor for one
    whose target is 0.
    """
    rows = [row for row in results[-1].rows if row.median > 0] if results else []
    return [row.what for row in rows if _aim(row)] or [row.what for row in rows if row.unit == "x"]


def _panel(axes: Axes, name: str, drawn: Sequence[str], results: Sequence[Result]) -> None:
    aimed = False
    for line, what in enumerate(drawn):
        rows = [row for result in results for row in result.rows if row.what == what and row.median > 0][-MAX_RUNS:]
        aimed = aimed or bool(_aim(rows[-1]))
        scores = [_score(row) for row in rows]
        places = line + (np.linspace(-SPREAD, SPREAD, len(rows)) if len(rows) > 1 else np.zeros(1))
        low, middle, high = zip(*scores, strict=True)
        axes.plot(middle, places, color=PAST, linewidth=0.8, marker="o", markersize=2)
        axes.hlines(places, low, high, color=PAST, linewidth=0.8)
        colour = OUTCOME_COLOURS[rows[-1].outcome]
        axes.plot(middle[-1], places[-1], color=colour, marker="o", markersize=4)
        axes.hlines(places[-1], low[-1], high[-1], color=colour, linewidth=1.4)
    runs = f"{len(results)} run{'s' * (len(results) != 1)}, the newest {results[-1].taken[:10]}" if results else ""
    left_out = [row for row in (results[-1].rows if results else ()) if row.what not in drawn]
    if num_missed := sum(row.outcome == "missed" for row in left_out):
        runs += f"; {num_missed} more missed, not on this axis"
    style(axes, f"{name}: {runs}", "times its target: right of the line is better" if aimed else "ratio", "")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    lowest, highest = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if highest > 5 * lowest else range(1, 10)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(drawn)), drawn, fontsize=6.5)
    axes.set_ylim(len(drawn) - 0.5, -0.5)


def _score(row: Row) -> tuple[float, float, float]:
    """Low, median and high; of a figure with a target in multiples of it, where more is better in any case."""
    low = row.low if row.low > 0 else row.median
    if row.at_least:
        return low / row.at_least, row.median / row.at_least, row.high / row.at_least
    if row.at_most:
        return row.at_most / row.high, row.at_most / row.median, row.at_most / low
    return low, row.median, row.high


def _aim(row: Row) -> float | None:
    return row.at_least if row.at_least is not None else row.at_most
