"""Figures fit for a paper, and the files that every fit leaves: PNG and SVG, the drawn data as CSV, the fit as JSON."""

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pipeline.errors import ConfigError
from pipeline.plots import INK

COLOURS = (*INK, "#8b5fbf", "#b5912f", "#5a6b7b", "#c04a7a", "#2f8f9d")
WIDE_RATIO = 300.0  # from here on one tick a decade is enough
PANEL_IN = 3.6, 3.1  # one column of a paper


def panels(num: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(PANEL_IN[0] * num, PANEL_IN[1]), layout="constrained")
    return figure, list(figure.subplots(1, num, squeeze=False)[0])


def style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5)
    axes.grid(True, color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def compute_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic x axis for compute from `low` to `high`, with readable ticks over half a decade as over five."""
    axes.set_xscale("log")
    subs = (1.0, 2.0, 5.0) if high / low < WIDE_RATIO else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    """0.05, 200, 20k, 3M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit * (1 - 1e-9):
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def save(
    out: Path, name: str, figure: Figure, header: Sequence[str], rows: Sequence[Sequence[object]], fit: msgspec.Struct
) -> list[Path]:
    """Write `name.{json,csv,png,svg}` into the directory and return the paths; equal fits give equal files."""
    paths = [out / f"{name}.{ending}" for ending in ("json", "csv")]
    try:
        paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(fit)) + b"\n")
        with paths[1].open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    except OSError as e:
        raise ConfigError(f"{out}: cannot write the fit: {e.strerror}; choose another --out") from None
    return [*paths, *save_figure(out, name, figure)]


def save_figure(out: Path, name: str, figure: Figure) -> list[Path]:
    """Write `name.{png,svg}` into the directory and return the paths."""
    paths = [out / f"{name}.{ending}" for ending in ("png", "svg")]
    try:
        FigureCanvasAgg(figure)
        figure.savefig(paths[0], dpi=200)
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(paths[1], metadata={"Date": None})
    except OSError as e:
        raise ConfigError(f"{out}: cannot write the figure: {e.strerror}; choose another --out") from None
    return paths
