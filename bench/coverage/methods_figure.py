"""The figure of `ngu methods`, and the numbers drawn in it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.coverage.figure import COLUMNS, Rows
from bench.coverage.methods import Methods
from bench.coverage.training import Course
from bench.scaling.figures import COLOURS, PANEL_IN, style
from bench.study.estimates import Estimate
from pipeline.plots import GREY

Panel = Callable[[Axes], Rows]


def draw(found: Methods, courses: Sequence[Course]) -> tuple[Figure, Rows]:
    """The panels that there is data for; also the drawn data as rows of `figure.HEADER`."""
    panels: list[Panel] = [lambda axes: _curves(axes, found), lambda axes: _gains(axes, found)]
    if any(method.reweighted is not None for method in found.methods):
        panels.append(lambda axes: _two_stages(axes, found))
    panels.append(lambda axes: _histogram(axes, found))
    if courses:
        panels.append(lambda axes: _over_training(axes, found, courses, "zero_mass", "Problems never solved"))
        panels.append(lambda axes: _over_training(axes, found, courses, "distance_to_uniform", "Distance to uniform"))
    height = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(PANEL_IN[0] * COLUMNS, PANEL_IN[1] * height), layout="constrained")
    places = list(figure.subplots(height, COLUMNS, squeeze=False).flat)
    rows: Rows = []
    for panel, place in zip(panels, places, strict=False):
        rows += panel(place)
    for place in places[len(panels) :]:
        place.set_axis_off()
    return figure, rows


def _curves(axes: Axes, found: Methods) -> Rows:
    style(axes, "Coverage, 95% over seeds", "k", "pass@k")
    axes.plot(found.ks, found.base, "o--", color=GREY, markersize=3, linewidth=1.2, label="base")
    rows: Rows = [["coverage", "base", k, v, "", ""] for k, v in zip(found.ks, found.base, strict=True)]
    for method, colour in zip(found.methods, _colours(found), strict=True):
        rows += _band(axes, "coverage", method.name, found.ks, method.pass_at_k, colour)
    _k_axis(axes, found.ks)
    axes.legend(frameon=False, fontsize=7, loc="best")
    return rows


def _gains(axes: Axes, found: Methods) -> Rows:
    style(axes, "Against the base model", "k", "pass@k gained")
    axes.axhline(0, color=GREY, linewidth=0.8)
    rows: Rows = []
    for method, colour in zip(found.methods, _colours(found), strict=True):
        rows += _band(axes, "gain", method.name, found.ks, method.gain, colour)
    _k_axis(axes, found.ks)
    return rows


def _two_stages(axes: Axes, found: Methods) -> Rows:
    """What of the gain in pass@1 is the choice of strategy, and what is skill."""
    style(axes, "Where pass@1 comes from", "", "pass@1 gained")
    rows: Rows = []
    width = 0.8 / len(found.methods)
    for i, (method, colour) in enumerate(zip(found.methods, _colours(found), strict=True)):
        for x, (part, e) in enumerate((("reweighted", method.reweighted), ("taught", method.taught))):
            if e is None:
                continue
            error = None if e.low is None or e.high is None else [[e.value - e.low], [e.high - e.value]]
            at = x + (i - (len(found.methods) - 1) / 2) * width
            axes.bar(at, e.value, width * 0.9, color=colour, yerr=error, error_kw={"linewidth": 0.8})
            rows.append(["change of pass@1", method.name, part, *_cells(e)])
        rows += [["strategy share", method.name, label, *_cells(e)] for label, e in method.shares.items()]
    rows += [["strategy share", "base", label, share, "", ""] for label, share in found.base_shares.items()]
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks([0, 1], ["strategies\nreweighted", "strategies\ntaught"])
    axes.grid(False, axis="x")
    return rows


def _histogram(axes: Axes, found: Methods) -> Rows:
    style(axes, "pass@1 of problems", "pass@1", "share of problems")
    shown = [("base", GREY, found.base_pass_at_1.histogram)]
    shown += [(m.name, colour, m.histogram) for m, colour in zip(found.methods, _colours(found), strict=True)]
    rows: Rows = []
    for name, colour, shares in shown:
        edges = np.linspace(0, 1, len(shares) + 1)
        axes.stairs(shares, edges, color=colour, linewidth=1.3)
        centres = edges[:-1] + edges[1] / 2
        rows += [["histogram", name, x, share, "", ""] for x, share in zip(centres, shares, strict=True)]
    return rows


def _over_training(axes: Axes, found: Methods, courses: Sequence[Course], field: str, title: str) -> Rows:
    """A line a run, from its own evaluations."""
    fewest = min(s.num_rollouts for course in courses for s in course.snapshots)
    style(axes, f"{title}, {fewest} rollouts each" if fewest > 1 else f"{title}, one rollout each", "rollouts", "")
    colours = dict(zip((method.name for method in found.methods), _colours(found), strict=True))
    rows: Rows = []
    for course in courses:
        x = [s.rollouts for s in course.snapshots]
        y = [getattr(s.pass_at_1, field) for s in course.snapshots]
        axes.plot(x, y, ".-", color=colours[course.method], linewidth=1.0, markersize=3, alpha=0.8)
        rows += [[field, f"{course.method}, seed {course.seed}", a, b, "", ""] for a, b in zip(x, y, strict=True)]
    axes.set_ylim(bottom=0)
    return rows


def _band(axes: Axes, panel: str, name: str, ks: Sequence[int], estimates: Sequence[Estimate], colour: str) -> Rows:
    axes.plot(ks, [e.value for e in estimates], "o-", color=colour, markersize=3, linewidth=1.5, label=name)
    bounds = [(e.low, e.high) for e in estimates if e.low is not None and e.high is not None]
    if len(bounds) == len(ks):
        low, high = zip(*bounds, strict=True)
        axes.fill_between(ks, low, high, color=colour, alpha=0.18, linewidth=0)
    return [[panel, name, k, *_cells(e)] for k, e in zip(ks, estimates, strict=True)]


def _cells(e: Estimate) -> tuple[object, object, object]:
    return e.value, "" if e.low is None else e.low, "" if e.high is None else e.high


def _k_axis(axes: Axes, ks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()


def _colours(found: Methods) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(found.methods))]
