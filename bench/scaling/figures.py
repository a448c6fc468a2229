"""Figures fit for a paper, and the files that every fit leaves: PNG and SVG, the drawn data as CSV, the fit as JSON."""

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.errors import ConfigError
from pipeline.plots import GREY, INK

COLOURS = (*INK, "#8b5fbf", "#b5912f", "#5a6b7b", "#c04a7a", "#2f8f9d")
WIDTH_IN = 7.2  # two columns of a paper


def panels(num: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
    return figure, list(figure.subplots(1, num, squeeze=False)[0])


def style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(True, color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(
    out: Path, name: str, figure: Figure, header: Sequence[str], rows: Sequence[Sequence[object]], fit: msgspec.Struct
) -> list[Path]:
    """Write `out/name.{json,csv,png,svg}` and return the paths; equal fits give equal files. Raises ConfigError."""
    paths = [out / f"{name}.{ending}" for ending in ("json", "csv", "png", "svg")]
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths[0].write_bytes(msgspec.json.format(msgspec.json.encode(fit)) + b"\n")
        with paths[1].open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        FigureCanvasAgg(figure)
        figure.savefig(paths[2], dpi=200)
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(paths[3], metadata={"Date": None})
    except OSError as e:
        raise ConfigError(f"{out}: cannot write the fit: {e.strerror}; choose another --out") from None
    return paths
