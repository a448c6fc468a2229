"""How many decisions a second a sampler makes: a round proposed and observed is one."""

import statistics
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from bench.lab.world import Stream
from samplers.base import Launch, Outcome, Problem
from samplers.registry import SamplerConfig, make_sampler

PROBLEM_COUNTS = (1_000, 10_000, 100_000)
NUM_DECISIONS = 200_000
ROLLOUTS_IN_FLIGHT = 1024
WARM_UP = 0.1  # share of the decisions made before the clock runs


class Speed(msgspec.Struct, frozen=True):
    """Processor time in `propose` and `observe` only. `decisions_per_s` is the median over blocks of about 1,024
    rollouts and `best_per_s` that of the fastest block: other processes take no processor time of this one, but they
    slow it down through caches and shared cores, and the gap between the two figures shows by how much.
    """

    num_problems: int
    decisions: int
    decisions_per_s: float
    best_per_s: float


def measure_speed(config: SamplerConfig, num_decisions: int = NUM_DECISIONS) -> Iterator[Speed]:
    """For each number of problems, with pass rates uniform in [0, 1) and about 1,024 rollouts in flight."""
    for num_problems in PROBLEM_COUNTS:
        yield _measure(config, num_problems, num_decisions)


def _measure(config: SamplerConfig, num_problems: int, num_decisions: int) -> Speed:
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
    if not rates_per_s:
        return Speed(num_problems, 0, 0.0, 0.0)
    return Speed(num_problems, timed, statistics.median(rates_per_s), max(rates_per_s))


def _outcome(launch: Launch, rates: np.ndarray, rng: np.random.Generator) -> Outcome:
    n = launch.num_rollouts
    correct = tuple((rng.random(n) < rates[int(launch.problem.problem_id)]).tolist())
    rewards = tuple(map(float, correct))
    return Outcome(launch.chain_id, launch.round, rewards, correct, (False,) * n, 20 * n, 0, 0)
