"""The picture of a comparison: how far the policy came, where the rollouts went, and what they taught."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.lab.tables import Reports, merge_bins
from bench.lab.tally import Bin, Report
from bench.scaling.figures import COLOURS, style
from pipeline.errors import ConfigError
from pipeline.plots import GREY, INK

PALETTE = (*COLOURS, "#2a2d31", "#9fb8d6")
FATES = (("trained", INK[0]), ("all right", INK[2]), ("all wrong", INK[1]), ("other", GREY))


def save_comparison(path: Path, reports: Reports) -> None:
    """Write a PNG; raises ConfigError when it cannot be written."""
    figure = Figure(figsize=(11.5, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    hard = any(r.num_hard for found in reports.values() for r in found)
    _curves(axes[0, 0], reports, hard)
    _solved(axes[0, 1], reports)
    _fates(axes[0, 2], reports)
    merged = {name: merge_bins(found) for name, found in reports.items()}
    _shares(axes[1, 0], merged)
    _weights(axes[1, 1], merged)
    _signal(axes[1, 2], merged)
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as e:
        raise ConfigError(f"{path}: cannot write the plot: {e.strerror}; choose another --plot") from None


def _curves(axes: Axes, reports: Reports, hard: bool) -> None:
    style(axes, f"pass@1{' on hard problems' if hard else ''}", "rollouts", "pass@1")
    for colour, found in zip(_colours(reports), reports.values(), strict=True):
        _band(
            axes, found, [[(p.hard_pass_rate if hard else p.pass_rate) or 0.0 for p in r.curve] for r in found], colour
        )
    axes.set_ylim(bottom=0)


def _solved(axes: Axes, reports: Reports) -> None:
    style(axes, "Problems solved at least once", "rollouts", "problems")
    for colour, (name, found) in zip(_colours(reports), reports.items(), strict=True):
        _band(axes, found, [[float(p.solved) for p in r.curve] for r in found], colour, name)
    axes.set_ylim(bottom=0)


def _band(axes: Axes, found: list[Report], values: list[list[float]], colour: str, label: str = "") -> None:
    """The mean over seeds, and the range from the lowest to the highest."""
    grid = np.linspace(0, min(r.rollouts for r in found), 200)
    table = np.array([np.interp(grid, [p.rollouts for p in r.curve], v) for r, v in zip(found, values, strict=True)])
    axes.plot(grid, table.mean(axis=0), color=colour, label=label)
    if len(found) > 1:
        axes.fill_between(grid, table.min(axis=0), table.max(axis=0), color=colour, alpha=0.18, linewidth=0)


def _fates(axes: Axes, reports: Reports) -> None:
    style(axes, "What became of the rollouts", "share of the judged rollouts", "")
    left = np.zeros(len(reports))
    shares = np.array([np.mean([_fate_shares(r) for r in found], axis=0) for found in reports.values()])
    for (fate, colour), widths in zip(FATES, shares.T, strict=True):
        axes.barh(range(len(reports)), widths, left=left, color=colour, label=fate, height=0.6)
        left += widths
    axes.set_yticks(range(len(reports)), list(reports))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(False, axis="y")
    axes.legend(frameon=False, fontsize=7.5, ncols=4, loc="lower center", bbox_to_anchor=(0.45, 0.98), columnspacing=1)
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=9, fontweight="bold", pad=20)


def _fate_shares(r: Report) -> tuple[float, float, float, float]:
    named = r.trained_frac, r.wasted_right_frac, r.wasted_wrong_frac
    return *named, max(0.0, 1.0 - sum(named))


def _shares(axes: Axes, merged: dict[str, list[Bin]]) -> None:
    style(axes, "Where the rollouts went", "pass rate when the problem was visited", "share of the rollouts")
    names = sorted({b.difficulty for bins in merged.values() for b in bins}, key=lambda d: float(d.split("-")[0]))
    width = 0.8 / len(merged)
    for i, (colour, bins) in enumerate(zip(_colours(merged), merged.values(), strict=True)):
        by_name, total = {b.difficulty: b.rollouts for b in bins}, sum(b.rollouts for b in bins)
        x = np.arange(len(names)) + (i - (len(merged) - 1) / 2) * width
        axes.bar(x, [by_name.get(name, 0) / total for name in names], width, color=colour)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
    axes.grid(False, axis="x")


def _weights(axes: Axes, merged: dict[str, list[Bin]]) -> None:
    style(axes, "Gradient weight w(p) of a visit", "pass rate p", "w(p)")
    for colour, bins in zip(_colours(merged), merged.values(), strict=True):
        taught = [b for b in bins if b.weight > 0]
        if not taught:
            continue
        x, y = [b.pass_rate for b in taught], [b.weight for b in taught]
        # On a logarithmic axis an interval that reaches 0 has no lower end to draw.
        error = [[min(b.weight_se, 0.9 * b.weight) for b in taught], [b.weight_se for b in taught]]
        axes.errorbar(x, y, error, color=colour, marker="o", markersize=3, linewidth=1.2, elinewidth=0.8)
    _log_log(axes)


def _signal(axes: Axes, merged: dict[str, list[Bin]]) -> None:
    style(axes, "Signal to noise of a rollout", "pass rate p", "SNR")
    for colour, bins in zip(_colours(merged), merged.values(), strict=True):
        taught = [b for b in bins if b.signal_to_noise > 0]
        if not taught:
            continue
        x, y = [b.pass_rate for b in taught], [b.signal_to_noise for b in taught]
        axes.plot(x, y, color=colour, marker="o", markersize=3, linewidth=1.2)
    _log_log(axes)


def _log_log(axes: Axes) -> None:
    if axes.lines:  # without a point a logarithmic axis cannot be drawn
        axes.set_xscale("log")
        axes.set_yscale("log")


def _colours(named: dict[str, list[Report]] | dict[str, list[Bin]]) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(len(named))]
