"""How many decisions a second a sampler makes: a round proposed and observed is one."""

import time

import numpy as np

from bench.lab.world import Stream
from bench.suite.base import Benchmark, Row, Say, figure
from pipeline.sections import PositiveInt
from samplers.base import Launch, Outcome, Problem
from samplers.never_give_up import NeverGiveUpConfig
from samplers.registry import SamplerConfig, make_sampler

ROLLOUTS_IN_FLIGHT = 1024
WARM_UP = 0.1  # share of the decisions made before the clock runs
DECISIONS_PER_S = 200_000  # the target


class SamplersBench(Benchmark, frozen=True):
    """Processor time in `propose` and `observe` only, for each number of problems, with pass rates uniform in [0, 1).

    A rate is that of a block of about 1,024 rollouts in flight. Other processes take no processor time of this one, but
    slow it down through caches and shared cores: the fastest block shows by how much.
    """

    sampler: SamplerConfig = NeverGiveUpConfig()
    problems: tuple[PositiveInt, ...] = (1_000, 10_000, 100_000)
    decisions: PositiveInt = 200_000

    def run(self, say: Say) -> list[Row]:
        rows = []
        target = DECISIONS_PER_S if isinstance(self.sampler, NeverGiveUpConfig) else None
        for num_problems in self.problems:
            rates = measure(self.sampler, num_problems, self.decisions)
            if not rates:
                say(f"{num_problems:,} problems: all were retired before the clock ran")
                continue
            rows.append(figure(f"{num_problems:,} problems", "decisions/CPU s", rates, at_least=target))
            rows.append(figure(f"{num_problems:,} problems, fastest block", "decisions/CPU s", [max(rates)]))
        return rows


def measure(config: SamplerConfig, num_problems: int, num_decisions: int) -> list[float]:
    """Decisions a processor second of each block; none when everything is retired before the clock runs."""
    rng = np.random.default_rng(num_problems)
    rates = rng.random(num_problems)
    problems = [Problem(str(i), "lab", "", "") for i in range(num_problems)]
    sampler = make_sampler(config, Stream(problems, 0), 0)
    warm_up = round(WARM_UP * num_decisions)
    made, timed = 0, 0
    rates_per_s: list[float] = []
    while timed < num_decisions:
        start = time.process_time()
        launches = sampler.propose(ROLLOUTS_IN_FLIGHT)
        middle = time.process_time()
        if not launches:
            break  # everything is retired
        outcomes = [_outcome(launch, rates, rng) for launch in launches]
        resumed = time.process_time()
        for outcome in outcomes:
            sampler.observe(outcome)
        if made >= warm_up:
            timed += len(launches)
            rates_per_s.append(len(launches) / (middle - start + time.process_time() - resumed))
        made += len(launches)
    return rates_per_s


def _outcome(launch: Launch, rates: np.ndarray, rng: np.random.Generator) -> Outcome:
    n = launch.num_rollouts
    correct = tuple((rng.random(n) < rates[int(launch.problem.problem_id)]).tolist())
    rewards = tuple(map(float, correct))
    return Outcome(launch.chain_id, launch.round, rewards, correct, (False,) * n, 20 * n, 0, 0)
