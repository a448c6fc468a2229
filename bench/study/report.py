"""The findings of a study: each arm over its seeds, and against the first arm seed by seed."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from bench.study.curves import AXES, OUTCOMES, Axis, Trace, area, crossing, curve, read_trace
from bench.study.estimates import NUM_DRAWS, Estimate, estimate
from bench.study.plan import Outcome, Study
from bench.study.ranking import Ranking, rank
from pipeline.errors import NguError


class Crossing(msgspec.Struct, frozen=True):
    """The cost at which a threshold is first reached: the median over seeds and its 95% bootstrap interval.

    A seed that never reached it counts as infinity, which JSON writes as null; `reached` of `of` seeds did.
    """

    axis: Axis
    threshold: float
    value: float
    low: float
    high: float
    reached: int
    of: int


class ArmReport(msgspec.Struct, frozen=True):
    """`final` and `area` by outcome; an area is the mean of the curve over the rollouts 0 to `StudyReport.budget`.

    `final_gain` and `area_gain` are differences to the first arm, paired by seed; empty for the first arm. A run that
    failed keeps its last evaluation for the rest of the budget. `below_best`: by how much the outcome ended below the
    best point of its own curve; evaluation noise alone makes it somewhat above 0.
    """

    name: str
    settings: dict[str, Any]
    seeds: list[int]
    final: dict[Outcome, Estimate]
    area: dict[Outcome, Estimate]
    final_gain: dict[Outcome, Estimate]
    area_gain: dict[Outcome, Estimate]
    below_best: float
    crossings: list[Crossing]


class StudyReport(msgspec.Struct, frozen=True):
    """`budget`: the rollouts that every finished run has spent. `arms` are those of which a run was evaluated at least
    once; `traces` are all runs.
    """

    outcome: Outcome
    thresholds: tuple[float, ...]
    budget: float
    arms: list[ArmReport]
    traces: list[Trace]
    ranking: Ranking | None


def report_on(study: Study, out: Path) -> StudyReport:
    """From the files of the runs. Raises NguError when an arm has nothing to show, ConfigError for a wrong outcome."""
    traces = [read_trace(job, out) for job in study.jobs]
    finished = [t.rollouts for t in traces if t.state == "finished"]
    budget = float(min(finished, default=max(t.rollouts for t in traces)))
    evaluated = [t for t in traces if t.points]
    if not evaluated or budget <= 0:
        raise NguError(f"no run got as far as training: {'; '.join(sorted({t.reason for t in traces}))}")
    by_arm = {arm.name: [t for t in evaluated if t.arm == arm.name] for arm in study.arms}
    by_arm = {name: found for name, found in by_arm.items() if found}
    first = next(iter(by_arm.values()))
    outcomes: list[Outcome] = [o for o in OUTCOMES if o == study.config.outcome or _has(traces, o)]
    arms = []
    for arm in study.arms:
        found = by_arm.get(arm.name, [])
        if not found:
            continue
        others = first if found is not first else []
        arms.append(
            ArmReport(
                name=arm.name,
                settings=arm.settings,
                seeds=[t.seed for t in found],
                final={o: estimate(_finals(found, o)) for o in outcomes},
                area={o: estimate(_areas(found, o, budget)) for o in outcomes},
                final_gain={o: _gain(_finals(found, o), _finals(others, o)) for o in outcomes if others},
                area_gain={o: _gain(_areas(found, o, budget), _areas(others, o, budget)) for o in outcomes if others},
                below_best=fmean(
                    max(y) - y[-1] for t in found for y in [curve(t, "rollouts", study.config.outcome)[1]]
                ),
                crossings=[
                    _crossing(found, study.config.outcome, axis, threshold)
                    for threshold in study.config.thresholds
                    for axis in AXES
                ],
            )
        )
    measured = {name: list(_areas(found, study.config.outcome, budget).values()) for name, found in by_arm.items()}
    ranking = rank(study, evaluated, measured)
    return StudyReport(study.config.outcome, study.config.thresholds, budget, arms, traces, ranking)


# --- over seeds ---


def _gain(mine: dict[int, float], theirs: dict[int, float]) -> Estimate:
    """Seeds that both have; without any, the difference of the means and no interval."""
    both = {seed: mine[seed] - theirs[seed] for seed in mine if seed in theirs}
    return estimate(both) if both else Estimate(fmean(mine.values()) - fmean(theirs.values()), None, None)


def _crossing(traces: Sequence[Trace], outcome: Outcome, axis: Axis, threshold: float) -> Crossing:
    costs = np.array([crossing(*curve(t, axis, outcome), threshold) for t in traces])
    picks = np.random.default_rng(0).integers(0, len(costs), (NUM_DRAWS, len(costs)))
    # Medians and quantiles that are one of the values: between a cost and infinity there is no middle.
    medians = np.quantile(costs[picks], 0.5, axis=1, method="inverted_cdf")
    low, high = np.quantile(medians, [0.025, 0.975], method="inverted_cdf")
    value = float(np.quantile(costs, 0.5, method="inverted_cdf"))
    return Crossing(axis, threshold, value, float(low), float(high), int(np.isfinite(costs).sum()), len(costs))


def _finals(traces: Sequence[Trace], outcome: Outcome) -> dict[int, float]:
    return {t.seed: curve(t, "rollouts", outcome)[1][-1] for t in traces}


def _areas(traces: Sequence[Trace], outcome: Outcome, budget: float) -> dict[int, float]:
    return {t.seed: area(*curve(t, "rollouts", outcome), budget) for t in traces}


def _has(traces: Sequence[Trace], outcome: Outcome) -> bool:
    return all(getattr(p, outcome) is not None for t in traces for p in t.points)


def mean(traces: Sequence[Trace], figure: Callable[[Trace], float | None]) -> float:
    """nan where no run has the figure."""
    known = [v for t in traces if (v := figure(t)) is not None]
    return fmean(known) if known else math.nan
