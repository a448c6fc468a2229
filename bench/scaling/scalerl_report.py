"""What `ngu fit scalerl` writes and says."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.scaling.curves import UNIT_NAMES, PassRate, Recipe, Unit
from bench.scaling.figures import COLOURS, compute_axis, panels, style
from bench.scaling.law import Array, reward_at
from bench.scaling.rivals import Ranking
from bench.scaling.scalerl import Comparison, Method, RecipeFit
from pipeline.estimates import Estimate
from pipeline.plots import GREY

# How far beyond the data the curve is drawn, and beyond which multiple of C_mid the data have seen the bend.
DRAWN_BEYOND = 4.0
BENT_AT = 2.0
NUM_DRAWN = 120
# Spread of A between seeds and the margin on it that ScaleRL reports from three runs.
PUBLISHED_SEED_MARGIN = 0.02


class ScalerlReport(msgspec.Struct, frozen=True):
    """The whole result; `rankings[i]` is None where a recipe has too few evaluations to hold any out."""

    inputs: list[str]
    unit: Unit
    pass_rate: PassRate
    method: Method
    num_draws: int
    seed: int
    fits: list[RecipeFit]
    comparison: Comparison | None
    rankings: list[Ranking | None]
    says: list[str]


def curve_grid(recipe: Recipe) -> Array:
    """The computes at which a recipe's curve is drawn, [NUM_DRAWN]."""
    return np.geomspace(recipe.compute.min(), recipe.compute.max() * DRAWN_BEYOND, NUM_DRAWN)


def sentences(
    fits: Sequence[RecipeFit], rankings: Sequence[Ranking | None], comparison: Comparison | None, unit: str
) -> list[str]:
    """What follows from the fits and what does not, one recipe a sentence or two."""
    says = []
    for fit, ranking in zip(fits, rankings, strict=True):
        says += _follows(fit, unit) + _does_not_follow(fit, unit) + _ranked(fit, ranking, unit)
    if comparison is not None:
        says += _compared(fits, comparison)
    return says


def shown(e: Estimate, digits: int = 3) -> str:
    return f"{e.value:.{digits}f} [{e.low:.{digits}f}, {e.high:.{digits}f}]"


def amount(value: float) -> str:
    """A compute in few digits: 2542, 1.09e+04, 0.31."""
    return f"{value:.0f}" if 100 <= value < 1e4 else f"{value:.3g}"


def _follows(fit: RecipeFit, unit: str) -> list[str]:
    if not fit.a_determined:
        return [
            f"{fit.name}: A = {shown(fit.a)} at 95% reaches its bound of 1: these points show no bend that determines "
            f"a ceiling, and what follows is only the trend up to {amount(fit.compute_high)} {unit}."
        ]
    return [
        f"{fit.name}: A = {shown(fit.a)} at 95%: if the law holds, more of the same training ends near "
        f"{fit.a.value:.2f}; 90% of the gain is reached at {amount(fit.compute_90.value)} {unit} "
        f"[{amount(fit.compute_90.low)}, {amount(fit.compute_90.high)}]."
    ]


def _does_not_follow(fit: RecipeFit, unit: str) -> list[str]:
    says = []
    reach = fit.compute_high / fit.c_mid.value
    if fit.a_determined and reach < BENT_AT:
        says.append(
            f"{fit.name}: the data end at {reach:.1f} C_mid, before the curve has bent: A is an extrapolation, and its "
            "interval holds only within this law."
        )
    if fit.num_seeds == 1:
        says.append(
            f"{fit.name}: one seed, so the interval leaves out the spread between seeds (ScaleRL found a margin of "
            f"{PUBLISHED_SEED_MARGIN} in A)."
        )
    elif fit.num_seeds < 5:
        says.append(f"{fit.name}: a bootstrap over {fit.num_seeds} seeds understates their spread.")
    return says


def _ranked(fit: RecipeFit, ranking: Ranking | None, unit: str) -> list[str]:
    if ranking is None:
        return [f"{fit.name}: too few evaluations to hold half of them out, so nothing here tests the law itself."]
    best, equal = ranking.scores[0], ranking.not_worse
    text = (
        f"{fit.name}: fitted up to {amount(ranking.split)} {unit} and scored beyond, {best.law} predicts best "
        f"(RMSE {best.rmse:.4f})"
    )
    others = [name for name in equal if name != best.law]
    if others:
        text += f"; the data do not tell it from {' or '.join(others)}"
    if "ScaleRL" not in equal and "log-sigmoid" not in equal:
        text += "; the saturating law predicts worse here, so its A should not be believed"
    return [text + "."]


def _compared(alone: Sequence[RecipeFit], comparison: Comparison) -> list[str]:
    order = sorted(range(len(comparison.fits)), key=lambda i: comparison.fits[i].c_mid.value)
    says = []
    if max(f.a.low for f in alone) > min(f.a.high for f in alone):
        says.append(
            "The recipes' own A do not agree: they end at different rewards, which matters more than how fast, and a "
            "common A fits neither."
        )
    for first, second in itertools.pairwise(order):
        a, b = comparison.fits[first], comparison.fits[second]
        share = comparison.faster[first][second]
        verdict = "is faster than" if share >= 0.975 else "is not shown to be faster than"
        says.append(
            f"With a common A = {comparison.common_a.value:.3f}, {a.name} {verdict} {b.name}: half of the gain at "
            f"{amount(a.c_mid.value)} against {amount(b.c_mid.value)} ({share:.0%} of draws), B {shown(a.b, 2)} "
            f"against {shown(b.b, 2)}."
        )
    return says


# --- figure ---


def _ceiling(fit: RecipeFit) -> str:
    return f"A = {fit.a.value:.3f}" if fit.a_determined else "A undetermined"


def draw(
    recipes: Sequence[Recipe],
    fits: Sequence[RecipeFit],
    draws: Sequence[Array],
    rankings: Sequence[Ranking | None],
    unit: str,
) -> tuple[Figure, list[list[object]]]:
    """The curves with their bands beside the held-out errors; also the drawn data as rows of `HEADER`."""
    ranked = any(r is not None for r in rankings)
    figure, axes = panels(2 if ranked else 1)
    style(axes[0], "Held-out reward", unit, "pass rate")
    low, high = min(f.compute_low for f in fits), max(f.compute_high for f in fits)
    compute_axis(axes[0], low, high * DRAWN_BEYOND)
    rows: list[list[object]] = []
    for i, (recipe, fit, samples) in enumerate(zip(recipes, fits, draws, strict=True)):
        colour = COLOURS[i % len(COLOURS)]
        grid = curve_grid(recipe)
        line = reward_at(grid, fit.parameters)
        low, high = np.quantile(reward_at(grid, samples), [0.025, 0.975], axis=0)
        inside = grid <= fit.compute_high
        axes[0].plot(recipe.compute, recipe.reward, ".", color=colour, markersize=3, alpha=0.45)
        axes[0].plot(grid[inside], line[inside], color=colour, linewidth=1.5, label=f"{recipe.name}: {_ceiling(fit)}")
        axes[0].plot(grid[~inside], line[~inside], color=colour, linewidth=1.5, linestyle=(0, (4, 2)))
        axes[0].fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
        if fit.a_determined:
            axes[0].axhline(fit.a.value, color=colour, linewidth=0.7, linestyle=":")
        rows += [[recipe.name, "observed", c, r, "", ""] for c, r in zip(recipe.compute, recipe.reward, strict=True)]
        rows += [[recipe.name, "fit", *point] for point in zip(grid, line, low, high, strict=True)]
    axes[0].legend(frameon=False, fontsize=7, loc="upper left" if len(fits) == 1 else "best")
    if ranked:
        _draw_ranking(axes[1], fits, rankings)
    return figure, rows


HEADER = ("recipe", "series", "compute", "reward", "low_95", "high_95")


def _draw_ranking(axes: Axes, fits: Sequence[RecipeFit], rankings: Sequence[Ranking | None]) -> None:
    style(axes, "Fit the first half, predict the second", "RMSE on the held-out half", "")
    names = [s.law for s in next(r for r in rankings if r is not None).scores]
    for i, (fit, ranking) in enumerate(zip(fits, rankings, strict=True)):
        if ranking is None:
            continue
        rmse = {s.law: s.rmse for s in ranking.scores}
        offset = (i - (len(fits) - 1) / 2) * 0.5 / len(fits)
        at = [k + offset for k, name in enumerate(names) if name in rmse]
        values = [rmse[name] for name in names if name in rmse]
        axes.hlines(at, 0, values, color=GREY, linewidth=1)
        axes.plot(values, at, "o", color=COLOURS[i % len(COLOURS)], markersize=5, label=fit.name)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(False, axis="y")


def table(fits: Sequence[RecipeFit], unit: Unit) -> str:
    """The fits as aligned text."""
    width = max(6, *(len(f.name) for f in fits))
    c_mid = f"C_mid ({UNIT_NAMES.get(unit, unit)})"
    lines = [f"{'recipe':<{width}}  {'A':<22}{c_mid:<32}{'B':<20}{'R0':<8}points  seeds"]
    for f in fits:
        c_mid = f"{amount(f.c_mid.value)} [{amount(f.c_mid.low)}, {amount(f.c_mid.high)}]"
        mark = "" if f.r0_given else "*"
        lines.append(
            f"{f.name:<{width}}  {shown(f.a):<22}{c_mid:<32}{shown(f.b, 2):<20}{f.r0.value:.3f}{mark:<3}"
            f"{f.num_points:>6}  {f.num_seeds:>5}"
        )
    if not all(f.r0_given for f in fits):
        lines.append("* R0 fitted: no evaluation at compute 0")
    return "\n".join(lines)
