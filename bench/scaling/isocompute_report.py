"""What `ngu fit isocompute` writes and says."""

import msgspec
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from bench.scaling.figures import compute_axis, panels, style
from bench.scaling.isocompute import SURE_FRAC, IsoFit
from bench.scaling.law import reward_at
from bench.scaling.scalerl_report import amount
from bench.scaling.sensitivity import Sensitivity
from pipeline.plots import GREY, INK

NUM_DRAWN = 100
HEADER = ("series", "n", "compute", "value", "low_95", "high_95")
# Below this the winner's curse of a maximum over runs is not averaged out.
ENOUGH_RUNS = 3


class IsoReport(msgspec.Struct, frozen=True):
    """The whole result; `b_problem` or `batch` (B_problem * n) is set when the fit was made with it fixed."""

    inputs: list[str]
    target: str
    b_problem: int | None
    batch: int | None
    num_draws: int
    seed: int
    fit: IsoFit
    sensitivity: Sensitivity
    says: list[str]


def sentences(fit: IsoFit, sensitivity: Sensitivity, rule: str) -> list[str]:
    """What follows from the sweep and what does not."""
    first, last = fit.frontier[0], fit.frontier[-1]
    runs = [c.num_runs for c in fit.curves]
    grows = fit.grows_frac >= SURE_FRAC and min(runs) > 1  # a bootstrap over one run always repeats it
    says = []
    if grows:
        says.append(
            f"Under {rule}, n*(C) grows from {first.n_star.value:.0f} at {amount(first.compute)} to "
            f"{last.n_star.value:.0f} [{last.n_star.low:.0f}, {last.n_star.high:.0f}] at {amount(last.compute)}."
        )
    else:
        says.append(
            f"Under {rule}, this sweep does not show that n*(C) grows: the best n at the largest compute is above that "
            f"at the smallest in {fit.grows_frac:.0%} of the draws."
        )
    if fit.saturation.observed:
        e = fit.saturation.n_sat
        said = "It saturates at" if grows else "The largest compute asks for no more than"
        says.append(f"{said} n = {e.value:.0f} [{e.low:.0f}, {e.high:.0f}]: {fit.saturation.reason}.")
    else:
        says.append(f"Saturation was not observed: {fit.saturation.reason}; n_sat of the sigmoid is no finding.")
    if sensitivity.n is not None and sensitivity.b_problem is not None:
        says.append(
            f"At {amount(sensitivity.compute)}, n moves the reward by {sensitivity.n:.1%} and problems per batch by "
            f"{sensitivity.b_problem:.1%}."
        )
    if min(runs) < ENOUGH_RUNS:
        says.append(f"Some n have {min(runs)} run(s): the intervals understate the spread between runs.")
    if min(runs) != max(runs):
        says.append("The n have different numbers of runs; a maximum over more runs is higher by luck alone.")
    if fit.left_out:
        says.append(f"Left out for too few record-breaking points: n = {', '.join(map(str, fit.left_out))}.")
    says.append(
        "Nothing here speaks of compute beyond the sweep, of other models, or of problems of another difficulty."
    )
    return says


def table(fit: IsoFit) -> str:
    """The curve of each n and the law of n*(C), as aligned text."""
    lines = [f"{'n':>6}{'A':>8}{'C_mid':>11}{'B':>7}{'R0':>7}{'records':>9}{'runs':>6}"]
    lines += [
        f"{c.n:>6}{c.a:>8.3f}{amount(c.c_mid):>11}{c.b:>7.2f}{c.r0:>7.3f}{c.num_records:>9}{c.num_runs:>6}"
        for c in fit.curves
    ]
    e, c0, k = fit.n_sat, fit.c0, fit.k
    lines.append(
        f"n*(C): n_min {fit.n_min}, n_sat {e.value:.0f} [{e.low:.0f}, {e.high:.0f}], C0 {amount(c0.value)} "
        f"[{amount(c0.low)}, {amount(c0.high)}], k {k.value:.2f} [{k.low:.2f}, {k.high:.2f}] per decade"
    )
    return "\n".join(lines)


def draw(fit: IsoFit, target: str) -> tuple[Figure, list[list[object]]]:
    """The curves and their frontier beside n*(C); also the drawn data as rows of `HEADER`."""
    figure, (left, right) = panels(2)
    style(left, "Record-breaking points and frontier", "compute", target.replace("_", " "))
    style(right, "Best rollouts per problem", "compute", "n")
    for axes in (left, right):
        compute_axis(axes, fit.frontier[0].compute, fit.frontier[-1].compute)
    rows = _draw_curves(left, fit)
    computes = [p.compute for p in fit.frontier]
    best = [p.reward.value for p in fit.frontier]
    left.plot(computes, best, color="black", linewidth=1.2, linestyle=(0, (1, 1)), label="frontier")
    left.legend(frameon=False, fontsize=6.5, ncols=2, loc="lower right", handlelength=1.4)
    right.set_yscale("log", base=2)
    star, low, high = ([getattr(p.n_star, f) for p in fit.frontier] for f in ("value", "low", "high"))
    right.plot(computes, [p.best_n for p in fit.frontier], "o", color=GREY, markersize=3, label="best swept n")
    right.fill_between(computes, low, high, color=INK[0], alpha=0.18, linewidth=0)
    right.plot(computes, star, color=INK[0], linewidth=1.6, label="n*(C), 95%")
    right.axhline(fit.curves[-1].n, color=INK[1], linewidth=0.8, linestyle="--", label="largest n tried")
    right.yaxis.set_major_locator(FixedLocator([c.n for c in fit.curves]))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    right.set_ylim(fit.n_min / 1.3, fit.curves[-1].n * 1.3)
    right.legend(frameon=False, fontsize=6.5, loc="upper left", bbox_to_anchor=(0, 0.93))
    for p in fit.frontier:
        rows.append(["frontier", p.best_n, p.compute, p.reward.value, p.reward.low, p.reward.high])
        rows.append(["n_star", p.best_n, p.compute, p.n_star.value, p.n_star.low, p.n_star.high])
    return figure, rows


def _draw_curves(axes: Axes, fit: IsoFit) -> list[list[object]]:
    rows: list[list[object]] = []
    colours = colormaps["viridis"](np.linspace(0, 0.92, len(fit.curves)))
    for curve, colour in zip(fit.curves, colours, strict=True):
        own = [r for r in fit.records if r.n == curve.n]
        grid = np.geomspace(curve.compute_low, curve.compute_high, NUM_DRAWN)
        line = reward_at(grid, np.array([curve.a, np.log(curve.c_mid), curve.b, curve.r0]))
        axes.plot([r.compute for r in own], [r.reward for r in own], ".", color=colour, markersize=3, alpha=0.6)
        axes.plot(grid, line, color=colour, linewidth=1.1, label=f"n = {curve.n}")
        rows += [["record", r.n, r.compute, r.reward, "", ""] for r in own]
        rows += [["curve", curve.n, c, v, "", ""] for c, v in zip(grid, line, strict=True)]
    return rows
