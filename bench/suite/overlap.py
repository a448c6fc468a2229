"""How generation and training overlap on more devices than there are here: the real coordinator, simulated devices."""

from pathlib import Path

from bench.overlap.figure import draw
from bench.overlap.scenarios import SIMULATED, job_for, rates_for, split_for
from bench.overlap.world import Measured, simulate
from bench.planner.placements import Period, period_of
from bench.suite.base import Benchmark, Row, Say, figure
from pipeline.errors import ConfigError
from pipeline.sections import PositiveInt

AGREES = 0.1  # of the planner with the simulation


class OverlapBench(Benchmark, frozen=True):
    """Synchronous, one step off and in flight on the same devices and job, for each number of GPUs; latencies are those
    of `bench.overlap.scenarios`, which says what has a source and what is assumed. Every seed is a run of `steps`
    optimizer steps on a virtual clock, whose first two fifths do not count: nothing depends on this machine. `figure`
    is a PNG to draw.
    """

    gpus: tuple[PositiveInt, ...] = (8, 64, 128)
    steps: PositiveInt = 40
    seeds: PositiveInt = 3
    figure: str = ""

    def run(self, say: Say) -> list[Row]:
        if min(self.gpus) < 8 or self.steps < 10:
            raise ConfigError("overlap: at least 8 GPUs and 10 steps, or there is nothing to overlap or to measure")
        rows: list[Row] = []
        found: dict[int, dict[str, list[Measured]]] = {}
        for gpus in self.gpus:
            found[gpus] = {}
            for placement in SIMULATED:
                job, split = job_for(gpus), split_for(gpus, placement)
                rates = rates_for(job)
                runs = [simulate(placement, job, split, rates, self.steps, seed) for seed in range(self.seeds)]
                found[gpus][placement] = runs
                rows += _rows(
                    f"{gpus} GPUs, {placement.replace('_', ' ')}", runs, period_of(placement, job, split, rates)
                )
                say(f"{gpus} GPUs, {placement}: {runs[0].period_s:.2f} s a step")
            sync, in_flight = found[gpus]["synchronous"], found[gpus]["in_flight"]
            gains = [a.period_s / b.period_s for a, b in zip(sync, in_flight, strict=True)]
            rows.append(figure(f"{gpus} GPUs, synchronous / in flight", "x", gains))
        if self.figure:
            draw(found, Path(self.figure))
        return rows


def _rows(what: str, runs: list[Measured], plan: Period) -> list[Row]:
    def off(measured: float, planned: float) -> float:
        return abs(measured / planned - 1)

    rows = [
        figure(f"{what}: period", "s", [run.period_s for run in runs]),
        figure(f"{what}: slots empty", "share", [run.row_idle for run in runs]),
        figure(f"{what}: learner idle", "share", [run.learner_idle for run in runs]),
        figure(f"{what}: token lag", "versions", [run.lag.token for run in runs]),
        figure(f"{what}: largest lag", "versions", [run.lag.largest for run in runs]),
        figure(f"{what}: plan off by, period", "share", [off(r.period_s, plan.period_s) for r in runs], at_most=AGREES),
    ]
    if plan.lag.token:
        lags = [off(run.lag.token, plan.lag.token) for run in runs]
        rows.append(figure(f"{what}: plan off by, token lag", "share", lags, at_most=AGREES))
    return rows
