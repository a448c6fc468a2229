"""What to run within a budget, from a saved IsoCompute fit."""

from pathlib import Path

import msgspec
import numpy as np

from bench.files import read_report
from bench.scaling.isocompute import IsoFit
from bench.scaling.isocompute_report import IsoReport
from pipeline.errors import ConfigError
from pipeline.estimates import Estimate
from pipeline.learner_config import LearnerConfig

# The learning rate that a plan starts from is that of this many rollouts per optimizer step (IsoCompute).
REFERENCE_BATCH = 1024
# Problems per batch are taken from what won within this factor of the budget.
NEAR = 4.0


class Plan(msgspec.Struct, frozen=True):
    """`n_star` is n*(C) with its interval; `n` is the swept value nearest to it (on the scale of doublings).

    `num_steps` (M) spends `compute`: compute = cost of a rollout * b_problem * n * num_steps. `settings` are the
    overrides of `ngu train` that run it; `growing` are those of a sampler that follows n*(C) as the budget is spent.
    """

    compute: float
    n_star: Estimate
    n: int
    b_problem: int
    num_steps: int
    lr: float
    extrapolates: bool
    says: list[str]
    settings: list[str]
    growing: list[str]


def load_fit(path: Path) -> IsoReport:
    """A report written by `ngu fit isocompute`; raises ConfigError for anything else."""
    what, remedy = "a fit written by `ngu fit isocompute`", "`ngu fit isocompute` writes isocompute.json"
    return read_report(path, IsoReport, what, remedy)


def make_plan(report: IsoReport, compute: float, base_lr: float) -> Plan:
    """Prescribe (B_problem, n, M, lr) for a budget in the fit's unit; raises ConfigError if one step costs more."""
    fit = report.fit
    star = fit.log2_n_star(compute)
    n_star = Estimate(*(float(2**v) for v in (star.value, star.low, star.high)))
    curve = min(fit.curves, key=lambda c: abs(np.log2(c.n) - star.value))
    b_problem = report.b_problem or (
        max(1, report.batch // curve.n) if report.batch else _b_problem(fit, curve.n, compute)
    )
    cost = curve.compute_per_rollout * b_problem * curve.n
    if not compute >= cost:
        raise ConfigError(f"--budget {compute:g}: one step of {b_problem} problems x {curve.n} rollouts costs {cost:g}")
    low, high = fit.frontier[0].compute, fit.frontier[-1].compute
    says = []
    if not low <= compute <= high:
        factor = compute / high if compute > high else low / compute
        side = "beyond the largest" if compute > high else "below the smallest"
        says.append(f"extrapolates: the budget is {factor:.1f} times {side} compute of the sweep")
    if not fit.saturation.observed and compute > high:
        says.append(f"no plateau of n was observed ({fit.saturation.reason}), so a larger n may be better still")
    if curve.n == fit.curves[-1].n and n_star.value > 0.9 * curve.n:
        says.append(f"n = {curve.n} is the largest that was swept; the best may lie above it")
    num_steps, batch = int(compute / cost), b_problem * curve.n
    learner = LearnerConfig(lr=base_lr, batch_by="attempts", batch_size=batch, reference_batch=REFERENCE_BATCH)
    fields = ("lr", "reference_batch", "batch_by", "batch_size")
    settings = {f"learner.{field}": getattr(learner, field) for field in fields}
    settings |= {"sampler.kind": "fixed", "sampler.num_rollouts": curve.n, "max_steps": num_steps, "max_rollouts": 0}
    return Plan(
        compute=compute,
        n_star=n_star,
        n=curve.n,
        b_problem=b_problem,
        num_steps=num_steps,
        lr=learner.scaled_lr,
        extrapolates=not low <= compute <= high,
        says=says,
        settings=[f"{name}={value}" for name, value in settings.items()],
        growing=sampler_settings(fit),
    )


def sampler_settings(fit: IsoFit) -> list[str]:
    """The `isocompute` sampler with this n*(C); it counts compute in rollouts, at the median cost of one."""
    cost = float(np.median([curve.compute_per_rollout for curve in fit.curves]))
    law = {
        "a": np.log2(max(fit.n_min, 2)),
        "b": np.log2(max(fit.n_sat.value, fit.n_min, 2)),
        "k": fit.k.value,
        "log10_c0": max(0.0, np.log10(fit.c0.value / cost)),
    }
    return ["sampler.kind=isocompute", *(f"sampler.{name}={value:.4f}" for name, value in law.items())]


def _b_problem(fit: IsoFit, n: int, compute: float) -> int:
    """The problems per batch that most often broke the record of this n near the budget, the fewer in a tie."""
    own = [r for r in fit.records if r.n == n]
    near = [r for r in own if compute / NEAR <= r.compute <= compute] or own
    values, counts = np.unique([r.b_problem for r in near], return_counts=True)
    return int(values[np.argmax(counts)])
