"""Many hosts of engines: the real coordinator and the gateway's rules, with simulated devices and network."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.overlap.hosts import spread_s
from bench.overlap.scenarios import GENERATING, job_for, rates_for, split_for
from bench.overlap.world import WARM_UP, Measured, NoRecords, World, config_of, measured
from bench.planner.hardware import BYTES
from bench.planner.placements import period_of
from bench.suite.base import Benchmark, Row, Say, figure
from pipeline.errors import ConfigError
from pipeline.sections import Positive, PositiveInt

PROGRESS_S = 10.0  # between two lines
AGREES = 0.1  # of the plan with the simulation


class HostsBench(Benchmark, frozen=True):
    """`hosts` hosts of `per_host` engines each and as many learner devices as `bench.overlap.scenarios` gives them, in
    flight. Weights reach the hosts from the head and from each other, at `gb_per_s` (10^9 bytes) from one place to all
    that fetch from it; engines and learner take the time of that scenario. Every seed is a run of `steps` steps on a
    virtual clock, whose first two fifths do not count; the coordinator's figure alone depends on this machine.
    """

    hosts: PositiveInt = 64
    per_host: PositiveInt = 8
    gb_per_s: Positive = 35.0
    steps: PositiveInt = 32
    seeds: PositiveInt = 3

    def run(self, say: Say) -> list[Row]:
        if self.steps < 10:
            raise ConfigError("hosts: at least 10 steps, or there is nothing to measure")
        gpus = round(self.hosts * self.per_host / GENERATING)
        job, split = job_for(gpus), split_for(gpus, "in_flight")._replace(engines=self.hosts * self.per_host)
        rates = rates_for(job)
        copy_s = job.model.weight_bytes(BYTES) / (1e9 * self.gb_per_s)
        runs: list[Measured] = []
        skews, above, delays = [], [], []
        skip = round(WARM_UP * self.steps)
        for seed in range(self.seeds):
            config = config_of("in_flight", job, split, self.steps, seed)
            with tempfile.TemporaryDirectory(prefix="ngu-hosts-") as directory:
                where = Path(directory)
                world = World(where, config, job, split, rates, False, NoRecords(), copy_s, self.per_host)
                world.run(self._progress(f"seed {seed}", say))
            runs.append(measured(world, split, skip))
            assert world.fabric is not None
            begin_s, end_s = world.batches[skip][0], world.batches[-1][0]
            skew = world.fabric.skew(begin_s, end_s)
            skews.append(float(skew.largest))
            above.append(skew.above_one_s / (end_s - begin_s))
            late = [delay_s for version, delay_s in world.fabric.delays if version > skip]
            delays.append(sum(late) / len(late))
            say(f"seed {seed}: {runs[-1].period_s:.2f} s a step, {runs[-1].coordinator_busy:.2f} of a core")
        plan = period_of("in_flight", job, split, rates)
        lag = plan.lag.token + spread_s(self.hosts, copy_s) / plan.period_s
        return [
            figure("period", "s", [run.period_s for run in runs]),
            figure(
                "period, off the plan by", "share", [abs(r.period_s / plan.period_s - 1) for r in runs], at_most=AGREES
            ),
            figure("token lag", "versions", [run.lag.token for run in runs]),
            figure("token lag, off the plan by", "share", [abs(r.lag.token / lag - 1) for r in runs], at_most=AGREES),
            figure("slots empty", "share", [run.row_idle for run in runs]),
            figure(
                "slots empty, off the plan by",
                "of all",
                [abs(r.row_idle - plan.engine_idle) for r in runs],
                at_most=AGREES,
            ),
            figure("learner idle", "share", [run.learner_idle for run in runs]),
            figure(
                "learner idle, off the plan by",
                "of its time",
                [abs(r.learner_idle - plan.learner_idle) for r in runs],
                at_most=AGREES,
            ),
            figure("a host has a version after", "s", delays),
            figure("versions between two hosts, at most", "versions", skews, at_most=1),
            figure("time with more than one between two hosts", "share", above),
            figure("coordinator, of a core", "CPU s a simulated s", [r.coordinator_busy for r in runs], at_most=1.0),
        ]

    def _progress(self, what: str, say: Say) -> Callable[[int], None]:
        """Says the step, now and then."""
        due = time.monotonic() + PROGRESS_S

        def on_step(step: int) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + PROGRESS_S
                say(f"{what}: step {step} of {self.steps}")

        return on_step
