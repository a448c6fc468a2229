"""The picture of a study: pass@1 against what it cost, each seed a thin line, the mean of an arm a thick one."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from bench.scaling.figures import COLOURS, PANEL_IN, style
from bench.study.curves import AXES, OUTCOMES, Axis, Trace, curve
from bench.study.plan import Outcome
from pipeline.plots import GREY

AXIS_WORDS: dict[Axis, str] = {"rollouts": "rollouts", "tokens": "generated tokens", "core_s": "core-seconds"}
TITLES: dict[Outcome, str] = {"hard": "Hard problems", "overall": "All problems"}
LINE_STYLES = ("-", "--", ":")
GRID = 200
MAX_CELLS = 4
LEGEND_LINE_IN, LEGEND_LETTER_IN = 0.65, 0.075  # of an entry: its line with the space around, and a letter


def draw(traces: Sequence[Trace], outcome: Outcome, thresholds: Sequence[float]) -> Figure:
    """A column for each cost; the outcome's row, with its thresholds, and below it the other one's if there is one.
    Where a grid multiplies the arms, each of its few cells has rows of its own.
    """
    known: list[Outcome] = [o for o in OUTCOMES if all(getattr(p, o) is not None for t in traces for p in t.points)]
    known.sort(key=lambda shown: shown != outcome)
    cells = list(dict.fromkeys(_cell(t) for t in traces))
    if len(cells) > MAX_CELLS:
        cells = [""]
    rows: list[tuple[Outcome, str]] = [(shown, cell) for shown in known for cell in cells]
    figure = Figure(figsize=(PANEL_IN[0] * len(AXES), PANEL_IN[1] * len(rows)), layout="constrained")
    places = figure.subplots(len(rows), len(AXES), squeeze=False)
    for row, (shown, cell) in zip(places, rows, strict=True):
        by_arm: dict[str, list[Trace]] = {}
        for trace in traces:
            if trace.points and (len(cells) == 1 or _cell(trace) == cell):
                by_arm.setdefault(trace.arm if len(cells) == 1 else trace.arm.partition(",")[0], []).append(trace)
        for axes, axis in zip(row, AXES, strict=True):
            title = ", ".join(filter(None, (TITLES[shown], cell if len(cells) > 1 else "")))
            style(axes, title if axis == AXES[0] else "", AXIS_WORDS[axis], "pass@1" if axis == AXES[0] else "")
            for i, (name, found) in enumerate(by_arm.items()):
                _arm(axes, [curve(t, axis, shown) for t in found], name, i)
            if shown == outcome:
                axes.set_ylim(bottom=0)
                for threshold in thresholds:
                    axes.axhline(threshold, color=GREY, linewidth=0.8, linestyle=":")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    handles, labels = places[0, 0].get_legend_handles_labels()
    room = figure.get_figwidth() / (LEGEND_LINE_IN + LEGEND_LETTER_IN * max(map(len, labels), default=0))
    figure.legend(handles, labels, loc="outside upper center", ncols=max(1, int(room)), frameon=False, fontsize=8)
    return figure


def _cell(trace: Trace) -> str:
    """The grid's part of an arm's name."""
    return trace.arm.partition(",")[2]


def _arm(axes: Axes, curves: Sequence[tuple[list[float], list[float]]], name: str, index: int) -> None:
    """The mean goes as far as the cheapest seed; beyond it there would be fewer seeds in it."""
    colour, dashes = COLOURS[index % len(COLOURS)], LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
    for x, y in curves:
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.35)
    grid = np.linspace(0, min(x[-1] for x, _ in curves), GRID)
    mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
    axes.plot(grid, mean, color=colour, linewidth=1.8, linestyle=dashes, label=name)
