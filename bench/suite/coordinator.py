"""What the coordinator's loop can carry: the real one, with its sockets, sampler, ledger, journal and checkpoints."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

import msgspec

from bench.suite.base import Benchmark, Row, Say, figure
from bench.suite.load_peers import Load, Report
from pipeline.channels import ENDPOINT, RouterSocket
from pipeline.config import Config, parse_config
from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.queues import queues
from pipeline.errors import NguError
from pipeline.ledger import Ledger
from pipeline.messages import Stop
from pipeline.metrics import open_sinks
from pipeline.role import few_collections, keep_freed_memory
from pipeline.sections import NonNegativeInt, Positive, PositiveInt
from pipeline.tasks.registry import make_task
from samplers.registry import make_sampler

TURN_TIMEOUT_S = 0.1
START_S = 60.0
# In flight over all workers, and a batch: less of it where a rollout is large.
IN_FLIGHT = {64: 6400, 8192: 640}
SATURATED_PER_S = {64: 50_000, 8192: 8_000}
CORE_SHARE = 0.35
COMMIT_S, ROUND_TRIP_S = 0.001, 0.005


class TimedLedger(Ledger):
    def __init__(self, path: Path):
        super().__init__(path)
        self.commit_s: list[float] = []

    def commit_turn(self) -> None:
        started = time.perf_counter()
        super().commit_turn()
        self.commit_s.append(time.perf_counter() - started)


class Course(msgspec.Struct, frozen=True):
    """Of each block: attempts judged a second, and a processor second of the coordinator's process, and its share of a
    core. Of the whole: seconds of every commit and turn, and what the load reports.
    """

    per_s: list[float]
    per_core_s: list[float]
    core_share: list[float]
    commit_s: list[float]
    turn_s: list[float]
    load: Report


class CoordinatorBench(Benchmark, frozen=True):
    """For each number of workers: saturated at 64 and at 8,192 tokens a rollout, and at `paced_per_s` attempts a second
    of 64 tokens; `blocks` blocks of `block_s` seconds each. The built-in task and sampler, half of the rollouts right,
    a checkpoint every ten steps. The workers answer from one other process; a round trip is from a rollout to the work
    that takes its place there, so where the load has no core left it is the load's.
    """

    workers: tuple[PositiveInt, ...] = (1, 10, 100, 1000)
    tokens: tuple[PositiveInt, ...] = (64, 8192)
    paced_per_s: NonNegativeInt = 10_000
    blocks: PositiveInt = 10
    block_s: Positive = 1.0

    def run(self, say: Say) -> list[Row]:
        rows = []
        for workers in self.workers:
            for num_tokens in self.tokens:
                course = self._measure(workers, num_tokens, 0.0)
                what, least = f"{workers} workers, {num_tokens} tokens", SATURATED_PER_S.get(num_tokens)
                rows.append(figure(f"{what}, saturated", "attempts/s", course.per_s, at_least=least))
                rows.append(figure(f"{what}, saturated", "attempts/core s", course.per_core_s))
            if self.paced_per_s:
                rows += self._paced(workers)
        return rows

    def _paced(self, workers: int) -> list[Row]:
        course = self._measure(workers, min(self.tokens), float(self.paced_per_s))
        what = f"{workers} workers, {self.paced_per_s:,}/s asked for"
        commits, trips = quantiles(course.commit_s, n=100), quantiles(course.load.round_trip_s, n=100)
        return [
            figure(what, "attempts/s", course.per_s),
            figure(what, "of a core", course.core_share, at_most=CORE_SHARE),
            figure(f"{what}, the load's part", "of a core", [course.load.core_share]),
            figure(f"{what}, commit p99", "s", [commits[98]], at_most=COMMIT_S),
            figure(f"{what}, round trip p50", "s", [trips[49]]),
            figure(f"{what}, round trip p99", "s", [trips[98]], at_most=ROUND_TRIP_S),
            figure(f"{what}, longest turn", "s", [max(course.turn_s)]),
        ]

    def _measure(self, workers: int, num_tokens: int, per_s: float) -> Course:
        in_flight = IN_FLIGHT.get(num_tokens, min(IN_FLIGHT.values()))
        slots = max(in_flight // workers, 2)
        config = parse_config(
            {
                "max_rollouts": 0,
                "task": {"num_problems": 100_000},  # or most of them would be in flight or cool down
                "max_steps": 1_000_000_000,
                "sampling": {"max_new_tokens": num_tokens},
                "learner": {"batch_size": slots * workers // 2},
                "staleness": {"max_lag": 4},
                "eval": {"every_steps": 0, "final_num_rollouts": 1},
                "daemon": {"checkpoint_every_steps": 10, "ledger_keep_steps": 20},
            },
            "bench",
        )
        with coordinated(config, Load(ENDPOINT, workers, slots, num_tokens, per_s)) as (coordinator, ledger, peers):
            course = self._observe(coordinator, ledger)
            coordinator.transport.send("learner", Stop())
            said, _ = peers.communicate(timeout=START_S)
        return msgspec.structs.replace(course, load=msgspec.json.decode(said, type=Report))

    def _observe(self, coordinator: Coordinator, ledger: TimedLedger) -> Course:
        course = Course([], [], [], [], [], Report([], 0.0))
        deadline = time.monotonic() + START_S
        while coordinator.policy_version < 4:  # the queues are full by then
            coordinator.turn(TURN_TIMEOUT_S)
            if time.monotonic() > deadline:
                raise NguError(
                    f"the peers made {coordinator.policy_version} steps in {START_S:.0f} s: {queues(coordinator.flow)}"
                )
        ledger.commit_s.clear()
        for _ in range(self.blocks):
            started, cpu, judged = time.perf_counter(), time.process_time(), coordinator.tally.counters["rollouts"]
            while (wall_s := time.perf_counter() - started) < self.block_s:
                coordinator.turn(TURN_TIMEOUT_S)
                course.turn_s.append(time.perf_counter() - started - wall_s)
            cpu_s, num = time.process_time() - cpu, coordinator.tally.counters["rollouts"] - judged
            course.per_s.append(num / wall_s)
            course.per_core_s.append(num / cpu_s)
            course.core_share.append(cpu_s / wall_s)
        course.commit_s.extend(ledger.commit_s)
        return course


@contextmanager
def coordinated(config: Config, load: Load) -> Iterator[tuple[Coordinator, TimedLedger, subprocess.Popen[bytes]]]:
    """A coordinator in a run directory of its own, its working directory meanwhile, and its peers."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ngu-bench-") as directory:
        run_dir = Path(directory)
        os.chdir(run_dir)
        (run_dir / "ipc").mkdir()
        task = make_task(config.task, config.seed)
        sampler = make_sampler(config.sampler, task, config.seed)
        transport, ledger, sink = RouterSocket(ENDPOINT), TimedLedger(run_dir / "ledger.sqlite"), open_sinks(run_dir)
        coordinator = Coordinator(run_dir, config, transport, task, sampler, ledger, sink)
        coordinator.recover(None)
        ledger.checkpoint_in_background()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(before), os.environ.get("PYTHONPATH", "")])}
        peers = subprocess.Popen(
            [sys.executable, "-m", "bench.suite.load_peers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C reaches the benchmark alone, which ends them
        )
        try:
            assert peers.stdin is not None
            peers.stdin.write(msgspec.json.encode(load))
            peers.stdin.close()
            peers.stdin = None
            keep_freed_memory()
            with few_collections():
                yield coordinator, ledger, peers
        finally:
            peers.kill()
            peers.communicate()
            coordinator.close()
            sink.close()
            transport.close()
            os.chdir(before)
