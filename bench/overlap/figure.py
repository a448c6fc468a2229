"""Where the time of the devices goes, by placement and number of GPUs, and how old the trained tokens are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from bench.overlap.world import Measured
from pipeline.plots import GREY, INK, to_png
from pipeline.rundir import write_atomic


def draw(found: Mapping[int, Mapping[str, Sequence[Measured]]], path: Path) -> None:
    """`found[gpus][placement]`: the runs of its seeds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    placements = list(next(iter(found.values())))
    panels = (
        ("seconds a step", lambda run: run.period_s),
        ("share of slots empty", lambda run: run.row_idle),
        ("token lag, versions", lambda run: run.lag.token),
    )
    width = 0.8 / len(placements)
    for axis, (title, value) in zip(axes, panels, strict=True):
        for i, (placement, colour) in enumerate(zip(placements, (GREY, INK[1], INK[0]), strict=True)):
            heights = [fmean(value(run) for run in runs[placement]) for runs in found.values()]
            places = [n + (i - (len(placements) - 1) / 2) * width for n in range(len(found))]
            axis.bar(places, heights, width, color=colour, label=placement.replace("_", " "))
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.set_xticks(range(len(found)), [f"{gpus} GPUs" for gpus in found])
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(placements), frameon=False)
    write_atomic(path, to_png(figure))
