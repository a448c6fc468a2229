"""The verb `ngu sweep`. What computes is imported when it runs, so that its help costs nothing."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.types import PositiveInt

from pipeline.progress import duration

if TYPE_CHECKING:
    from bench.sweep.plan import Plan
    from bench.sweep.runs import Ran

sweep = App(name="sweep", help="Run a grid of settings for a scaling-law fit, as much of it as is missing.")


@sweep.command
def isocompute(
    file: Annotated[Path, Parameter(name="SWEEP.toml", help="What to run; docs/STUDY.md shows one.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Directory of the results. Default: sweeps/SWEEP.")] = None,
    processes: Annotated[
        PositiveInt | None, Parameter(help="Runs at a time, one thread each. Default: the cores of this machine.")
    ] = None,
) -> int:
    """Train at every (problems per batch, rollouts per problem) of a sweep; the same command goes on with it.

    `ngu fit isocompute OUT` fits what is there, also while the sweep runs.
    """
    from bench.files import hold
    from bench.scaling.sweep import TABLE
    from bench.sweep.plan import load_plan
    from bench.sweep.runs import run_sweep

    plan = load_plan(file)
    out = out or Path("sweeps") / file.stem
    with hold(out, "ngu sweep"):
        runs = run_sweep(plan, out, processes or len(os.sched_getaffinity(0)), _reporter(plan))
    _summarize(plan, runs)
    print(f"wrote {out / TABLE}; `ngu fit isocompute {out}` fits it")
    return 0


def _reporter(plan: "Plan") -> "Callable[[Ran, int], None]":
    """A line on stderr for each run that ends."""
    started, num_done = time.monotonic(), 0

    def report(ran: "Ran", num_left: int) -> None:
        nonlocal num_done
        num_done += 1
        left_s = (time.monotonic() - started) / num_done * num_left
        course = ran.course
        print(
            f"[{len(plan.arms) - num_left}/{len(plan.arms)}] {ran.b_problem} problems x {ran.n}, seed {ran.seed}: "
            f"{course.ending}, pass@1 {course.start.overall:.2f} to {course.final.overall:.2f} "
            f"({course.cpu_s:.0f} core-seconds); {duration(left_s)} left",
            file=sys.stderr,
            flush=True,
        )

    return report


def _summarize(plan: "Plan", runs: "Sequence[Ran]") -> None:
    """What did not go to its end, or was not run at all."""
    for b_problem, n in plan.left_out:
        print(f"left out: {b_problem} problems x {n}, a batch larger than eval_every")
    for ran in runs:
        if ran.course.ending != "finished":
            print(f"{ran.course.ending}: {ran.b_problem} problems x {ran.n}, seed {ran.seed}: {ran.course.reason}")
    cpu_s = sum(ran.course.cpu_s for ran in runs)
    print(f"{len(runs)} runs, {duration(cpu_s)} of one core")
