"""The plots of a run. Figures are drawn without pyplot, so there is no global state and no display is needed."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.metrics import Record

INK = ("#1f5fa8", "#d1602a", "#3c8d5a")
GREY = "#b8bec6"
MAX_LEVELS = 40  # more rows than this cannot be read


def reward(steps: Sequence[Record]) -> Figure:
    """Mean reward at each step: of everything generated since the step before, and of what was trained on.

    The sampler drops what teaches nothing and keeps at what is hard, so the two differ, and neither is pass@1.
    """
    figure, axes = _figure("Reward", "optimizer step", "mean reward")
    _line(axes, steps, "generated/reward_mean", INK[0], "generated")
    _line(axes, steps, "reward_mean", INK[1], "trained")
    _legend(axes)
    return figure


def lag(steps: Sequence[Record]) -> Figure:
    """Lag of the trained tokens (learner version − token version) at each step, with its largest value."""
    figure, axes = _figure("Lag of trained tokens", "optimizer step", "policy versions")
    _line(axes, steps, "lag_max", GREY, "max", step="mid")
    _line(axes, steps, "lag_mean", INK[0], "mean")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def pass_at_1(evals: Sequence[Record]) -> Figure:
    """Above, overall and hard pass@1 against training rollouts; below, each level at each evaluation as shades."""
    levels = sorted({level for r in evals for level in r["pass_at_1"]})[:MAX_LEVELS]
    figure = Figure(figsize=(8, 3.4 + 0.24 * max(len(levels), 4)), layout="constrained")
    top, grid = figure.subplots(2, 1, height_ratios=[2.6, 0.24 * max(len(levels), 4)])
    _style(top, "pass@1 on held-out problems", "training rollouts", "pass@1")
    top.set_ylim(0, 1)
    for name, label, colour in (("mix_pass_at_1", "overall", INK[0]), ("hard_pass_at_1", "hard", INK[1])):
        points = [(r["rollouts"], r[name]) for r in evals if r.get(name) is not None]
        if points:
            top.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=4)
    _legend(top)
    _shades(grid, evals, levels)
    return figure


def rollouts_by_level(levels: dict[str, dict[str, int]]) -> Figure:
    """How many rollouts each level was given, how many of them were trained on, and how many were right."""
    names = sorted(levels)[:MAX_LEVELS]
    figure, axes = _figure("Where the rollouts went", "level", "rollouts")
    width = 0.8 / 3
    for i, (kind, colour) in enumerate(zip(("launched", "trained", "correct"), (GREY, INK[0], INK[2]), strict=True)):
        counts = [levels[name].get(kind, 0) for name in names]
        axes.bar(np.arange(len(names)) + (i - 1) * width, counts, width, color=colour, label=kind)
    axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 16 else 0)
    axes.grid(False, axis="x")
    _legend(axes)
    return figure


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    _style(axes, title, x, y)
    return figure, axes


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _line(axes: Axes, steps: Sequence[Record], name: str, colour: str, label: str, **style: Any) -> None:
    points = [(r["step"], r["metrics"][name]) for r in steps if r["metrics"].get(name) is not None]
    if not points:
        return
    x, y = zip(*points, strict=True)
    if style:
        axes.fill_between(x, y, color=colour, alpha=0.35, linewidth=0, label=label, **style)
    else:
        axes.plot(x, y, color=colour, label=label, marker="o" if len(points) < 60 else "", markersize=3)


def _shades(axes: Axes, evals: Sequence[Record], levels: Sequence[str]) -> None:
    if not levels:
        axes.set_axis_off()
        return
    table = np.array([[r["pass_at_1"].get(level, np.nan) for r in evals] for level in levels])
    axes.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(levels)), levels)
    axes.set_xticks(range(len(evals)), [str(r["step"]) for r in evals])
    axes.set_xlabel("optimizer step of the evaluation")
    axes.set_ylabel("level")
    if len(evals) > 16:
        axes.locator_params(axis="x", nbins=12)
        return
    for row, column in np.argwhere(~np.isnan(table)):
        value = table[row, column]
        axes.text(
            column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "black"
        )
