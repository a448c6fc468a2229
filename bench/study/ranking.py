"""Does the lab order the arms as the runs did? The same arms and seeds simulated, and how well the two orders agree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import kendalltau, spearmanr

from bench.lab.runner import default_jobs, simulate_all
from bench.lab.tally import Report
from bench.study.curves import Trace
from bench.study.estimates import Estimate
from bench.study.plan import Job, Outcome, Study, lab_config
from pipeline.tasks.registry import make_task

BySeed = dict[str, list[float]]

NUM_DRAWS = 1000
MIN_ARMS = 3  # of two arms the order is a coin


class Ranking(msgspec.Struct, frozen=True):
    """Areas under the outcome's curve against rollouts, by arm: `measured` and `simulated`, a value a seed.

    The rank correlations are of the arms' means, with a 95% interval from drawing the seeds of both sides again: how
    far seeds alone could move them, not what other arms would have given.
    """

    measured: BySeed
    simulated: BySeed
    spearman: Estimate
    kendall: Estimate


def rank(study: Study, traces: Sequence[Trace], measured: BySeed) -> Ranking | None:
    """None where the study has no [lab], or fewer than three arms. Raises ConfigError."""
    if study.config.lab is None or len(measured) < MIN_ARMS:
        return None
    table = {"population": population(study.jobs[0], traces)} | study.config.lab
    jobs = [job for job in study.jobs if job.arm in measured]
    configs = [lab_config(job, table, Path("[lab]")) for job in jobs]
    reports: dict[int, Report] = dict(simulate_all(configs, default_jobs()))
    simulated: BySeed = {name: [] for name in measured}
    for i, job in enumerate(jobs):
        simulated[job.arm].append(_area(reports[i], study.config.outcome))
    return Ranking(
        measured, simulated, _correlation(measured, simulated, spearmanr), _correlation(measured, simulated, kendalltau)
    )


def population(job: Job, traces: Sequence[Trace]) -> dict[str, Any]:
    """The levels of the runs' task, at the pass rates that all evaluations before training found together."""
    task = make_task(job.config.task, job.config.seed)
    right: dict[str, float] = {}
    judged: dict[str, int] = {}
    for point in (t.points[0] for t in traces):
        for level, n in point.num_rollouts.items():
            judged[level] = judged.get(level, 0) + n
            right[level] = right.get(level, 0.0) + n * point.levels[level]
    # Laplace's rule: a level at which nothing was right yet can still be learnt.
    levels = {
        level: (share, (right.get(level, 0.0) + 1) / (judged.get(level, 0) + 2))
        for level, share in task.level_weights().items()
    }
    return {"kind": "levels", "levels": levels} | ({"num_problems": task.num_problems} if task.num_problems else {})


def _area(report: Report, outcome: Outcome) -> float:
    hard = report.hard_pass_rate_area if outcome == "hard" else None
    return report.pass_rate_area if hard is None else hard


def _correlation(measured: BySeed, simulated: BySeed, statistic: Any) -> Estimate:
    rng = np.random.default_rng(0)
    sides = [[np.array(values) for values in side.values()] for side in (measured, simulated)]
    value = statistic(*([v.mean() for v in side] for side in sides)).statistic
    draws = [
        statistic(*([rng.choice(v, len(v)).mean() for v in side] for side in sides)).statistic for _ in range(NUM_DRAWS)
    ]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))
