"""The picture of what arms train on: a panel for each, its groups by kind against the rollouts."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from bench.scaling.figures import COLOURS, style
from bench.study.curves import Trace
from pipeline.plots import GREY

KINDS = {"full": "with a solution", "improving": "none, but the problem's best so far", "other": "neither"}
PANELS_A_ROW = 5
PANEL_IN = 2.4, 2.0
WINDOWS = 12


def draw_groups(traces: Sequence[Trace]) -> Figure | None:
    """Shares of the groups trained within each twelfth of the rollouts, all seeds of an arm together. None where no run
    trained a group.
    """
    by_arm: dict[str, list[Trace]] = {}
    for trace in traces:
        if trace.usage is not None and trace.usage.kinds:
            by_arm.setdefault(trace.arm, []).append(trace)
    if not by_arm:
        return None
    num_rows = -(-len(by_arm) // PANELS_A_ROW)
    num_columns = min(len(by_arm), PANELS_A_ROW)
    figure = Figure(figsize=(PANEL_IN[0] * num_columns, PANEL_IN[1] * num_rows + 0.4), layout="constrained")
    panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).flat
    colours = COLOURS[2], COLOURS[4], GREY
    for axes, (arm, found) in zip(panels, by_arm.items(), strict=False):
        middles, counts = _windows(found)
        style(axes, arm.replace(",", "\n", 1), "", "")
        axes.stackplot(middles, counts / counts.sum(0), labels=KINDS.values(), colors=colours, alpha=0.85)
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in panels:
        axes.set_visible(False)
    figure.supxlabel("rollouts", fontsize=8)
    figure.supylabel("trained groups", fontsize=8)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(KINDS), frameon=False, fontsize=8)
    return figure


def _windows(traces: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """Rollouts in the middle of each window that trained a group, [W], and its groups of each kind, [3, W]."""
    points = [
        (t.rollouts_at.get(k.step, t.rollouts), k.full, k.improving, k.other)
        for t in traces
        if t.usage is not None
        for k in t.usage.kinds
    ]
    rollouts, *counts = np.array(points, float).T
    edges = np.linspace(0, rollouts.max(), WINDOWS + 1)
    sums = np.array([np.histogram(rollouts, edges, weights=of_kind)[0] for of_kind in counts])
    filled = sums.sum(0) > 0
    return ((edges[:-1] + edges[1:]) / 2)[filled], sums[:, filled]
