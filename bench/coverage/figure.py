"""The figure of `ngu coverage`, and the numbers drawn in it."""

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.coverage.compare import Comparison, Pair
from bench.scaling.figures import COLOURS, PANEL_IN, style
from learner.evaluation.outcomes import counts
from pipeline.estimates import Estimate
from pipeline.plots import GREY

BASE, TUNED = COLOURS[0], COLOURS[1]
SIDES = (("base", BASE), ("tuned", TUNED))
COLUMNS = 3
MAX_LEVELS = 20  # more rows than this cannot be read

HEADER = ("panel", "series", "x", "value", "low_95", "high_95")
Rows = list[list[object]]


def draw(found: Comparison, pair: Pair) -> tuple[Figure, Rows]:
    """The panels that the comparison has data for; also the drawn data as rows of `HEADER`."""
    panels: list[Callable[[Axes, Comparison, Pair], Rows]] = [_curves]
    if found.by_level:
        panels.append(_levels)
    if found.strategies is not None:
        panels.append(_strategies)
    panels += [_gains, _histogram]
    height = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(PANEL_IN[0] * COLUMNS, PANEL_IN[1] * height), layout="constrained")
    axes = list(figure.subplots(height, COLUMNS, squeeze=False).flat)
    rows: Rows = []
    for panel, place in zip(panels, axes, strict=False):
        rows += panel(place, found, pair)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    return figure, rows


def _curves(axes: Axes, found: Comparison, pair: Pair) -> Rows:
    c = found.coverage
    style(axes, "Coverage", "k", "pass@k")
    rows: Rows = []
    for (name, colour), estimates in zip(SIDES, (c.base, c.tuned), strict=True):
        value, low, high = np.array([(e.value, e.low, e.high) for e in estimates]).T
        axes.plot(c.ks, value, "o-", color=colour, markersize=3, linewidth=1.5, label=name)
        axes.fill_between(c.ks, low, high, color=colour, alpha=0.15, linewidth=0)
        rows += [["coverage", name, k, e.value, e.low, e.high] for k, e in zip(c.ks, estimates, strict=True)]
    star = c.crossing
    if star.n_star is not None:
        axes.axvline(star.n_star, color=GREY, linestyle=":", linewidth=1.2)
        label = f" N* = {star.n_star:.1f} ({star.crossed_frac:.0%})"
        axes.text(star.n_star, 0.02, label, transform=axes.get_xaxis_transform(), fontsize=7)
        rows.append(["coverage", "n_star", star.n_star, star.crossed_frac, star.low, star.high])
    axes.set_xscale("log", base=2)
    axes.set_xticks(c.ks, [str(k) for k in c.ks])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7, loc="best")
    return rows


def _levels(axes: Axes, found: Comparison, pair: Pair) -> Rows:
    """A dumbbell a level and model, from the smallest k to the largest."""
    c = found.coverage
    style(axes, f"pass@{c.ks[0]} (hollow), pass@{c.ks[-1]} (full)", "pass@k", "")
    rows: Rows = []
    shown = list(found.by_level.items())[:MAX_LEVELS]
    for y, (level, of_level) in enumerate(shown):
        for offset, (name, colour), estimates in zip(
            (-0.17, 0.17), SIDES, (of_level.base, of_level.tuned), strict=True
        ):
            first, last = estimates[0], estimates[-1]
            axes.plot([first.value, last.value], [y + offset] * 2, color=colour, linewidth=1.2, alpha=0.5)
            axes.plot(first.value, y + offset, "o", color=colour, markersize=3.5, markerfacecolor="white")
            axes.plot(last.value, y + offset, "o", color=colour, markersize=3.5)
            for k, e in ((c.ks[0], first), (c.ks[-1], last)):
                rows.append([f"pass@{k} by level", name, level, e.value, e.low, e.high])
    axes.set_yticks(range(len(shown)), [level for level, _ in shown])
    axes.set_xlim(-0.03, 1.03)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    return rows


def _strategies(axes: Axes, found: Comparison, pair: Pair) -> Rows:
    """Shares as bars, split into the part that is right (full) and the part that is not (pale)."""
    s = found.strategies
    assert s is not None
    style(axes, "Strategies (what was right: full)", "", "share of rollouts")
    rows: Rows = []
    x = np.arange(len(s.names))
    sides = zip(SIDES, (s.share_before, s.share_after), (s.success_before, s.success_after), (-0.2, 0.2), strict=True)
    for (name, colour), shares, successes, offset in sides:
        right = [share * (success or 0.0) for share, success in zip(shares, successes, strict=True)]
        axes.bar(x + offset, shares, 0.36, color=colour, alpha=0.3)
        axes.bar(x + offset, right, 0.36, color=colour, label=name)
        for strategy, share, success in zip(s.names, shares, successes, strict=True):
            rows.append(["strategy share", name, strategy, share, "", ""])
            rows.append(["strategy success", name, strategy, "" if success is None else success, "", ""])
    for part in ("reweighted", "first_used", "taught", "change"):
        e: Estimate = getattr(s, part)
        rows.append(["change of pass@1", part, "", e.value, e.low, e.high])
    axes.set_xticks(x, s.names)
    axes.set_ylim(0, 1)
    axes.grid(False, axis="x")
    axes.legend(frameon=False, fontsize=7)
    return rows


def _gains(axes: Axes, found: Comparison, pair: Pair) -> Rows:
    """A point a problem; the line has the slope that is corrected for noise and passes through the means."""
    style(axes, "Gain against initial pass rate", "pass@1 before", "pass@1 gained")
    n, before = counts(pair.base)
    _, after = counts(pair.tuned)
    x, gain = before / n, (after - before) / n
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(x, gain, ".", color=TUNED, markersize=4, alpha=0.4, markeredgewidth=0)
    slope = found.matthew.slope
    if not math.isnan(slope.value):
        label = f"slope {slope.value:+.2f} [{slope.low:+.2f}, {slope.high:+.2f}]"
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, gain.mean() + slope.value * (ends - x.mean()), color=BASE, linewidth=1.2, label=label)
        axes.legend(frameon=False, fontsize=7)
    axes.set_ylim(min(-0.05, gain.min() - 0.05), max(0.05, gain.max() + 0.05))
    return [["gain", p.problem_id, float(a), float(b), "", ""] for p, a, b in zip(pair.base, x, gain, strict=True)]


def _histogram(axes: Axes, found: Comparison, pair: Pair) -> Rows:
    style(axes, "pass@1 of problems", "pass@1", "share of problems")
    rows: Rows = []
    shares = found.base_pass_at_1.histogram, found.tuned_pass_at_1.histogram
    centres = (np.arange(len(shares[0])) + 0.5) / len(shares[0])
    width = 0.4 / len(shares[0])
    for (name, colour), share, offset in zip(SIDES, shares, (-width / 2, width / 2), strict=True):
        axes.bar(centres + offset, share, width, color=colour, label=name)
        rows += [["histogram", name, float(x), y, "", ""] for x, y in zip(centres, share, strict=True)]
    axes.legend(frameon=False, fontsize=7)
    axes.grid(False, axis="x")
    return rows
