"""A whole run on a virtual clock: the real coordinator, ledger and sampler, and devices that only take time."""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.lag_model import Lag
from bench.overlap.devices import SimulatedEngine, SimulatedLearner
from bench.overlap.hosts import Fabric
from bench.planner.hardware import Rates
from bench.planner.placements import Placement, Split
from bench.planner.work import Job
from pipeline.config import Config, parse_config
from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.queues import queues
from pipeline.ledger import Ledger
from pipeline.manifest import write_manifest
from pipeline.messages import (
    Batch,
    BatchRequest,
    Hello,
    Judgement,
    Judgements,
    NewWeights,
    Rollouts,
    StepDone,
    Stop,
    Verdict,
    VerifyJobs,
    WeightsLoaded,
    WeightsNotice,
    WorkItems,
)
from pipeline.metrics import MetricSink, Record
from samplers.base import Problem
from samplers.registry import make_sampler

TICKS = 400  # turns of the coordinator in the time of the longest completion, at the least
MAX_IDLE_TURNS = 8  # the coordinator passes from one phase of a run to the next in turns of their own
WARM_UP = 0.4  # share of the steps that do not count: queues fill


class Measured(NamedTuple):
    """As `planner.placements.Period`, measured; `row_idle` is the share of slots without a row.

    `coordinator_busy` is this machine's processor seconds in the coordinator's loop for one second of the virtual
    clock; there are no sockets between it and its peers.
    """

    period_s: float
    engine_idle: float
    row_idle: float
    learner_idle: float
    coordinator_busy: float
    lag: Lag


class EndlessTask:
    """Problems without end and without an evaluation set."""

    num_problems = None
    hard_levels: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._count = 0

    def next_problem(self) -> Problem:
        self._count += 1
        return Problem(str(self._count), "simulated", "", "", "all")

    def eval_problems(self) -> list[Problem]:
        return []

    def level_weights(self) -> dict[str, float]:
        return {"all": 1.0}

    def state(self) -> dict[str, object]:
        return {"count": self._count}

    def restore(self, state: dict[str, Any]) -> None:
        self._count = state["count"]


class NoRecords:
    """A sink that keeps nothing: what is measured is seen on the wire."""

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class _AtOnce(Executor):
    """A disk that takes none of the virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class World:
    """The transport of a coordinator whose peers live on the same virtual clock."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        job: Job,
        split: Split,
        rates: Rates,
        barrier: bool,
        sink: MetricSink,
        copy_s: float = 0.0,
        per_host: int = 1,
    ):
        """With a `barrier` weights wait until no engine runs a row, and nothing new starts before they are loaded. With
        `copy_s` engines are `per_host` on a host, which fetches them (`bench.overlap.hosts`).
        """
        self.now = 0.0
        self._barrier = barrier
        self._held: dict[str, WeightsNotice] = {}
        self._dir = run_dir
        self._inbox: deque[tuple[str, Any]] = deque()
        lengths = job.lengths.draw((1 << 16,), seed=config.seed + 7)
        names = [f"engine-{i}" for i in range(split.engines)]
        length = lambda attempt_id: float(lengths[attempt_id % lengths.size])  # noqa: E731
        self.engines = {n: SimulatedEngine(n, split.slots, rates, length) for n in names}
        self.learner = SimulatedLearner(split.learners, rates)
        self.version = 0
        self.batches: list[tuple[float, Batch]] = []  # when each was trained
        # Seconds of the engines, of their rows, of the learner and of this machine's processor in the coordinator, at
        # each step.
        self.usage: list[tuple[float, float, float, float]] = []
        self._coordinator_s = 0.0
        hosts = [names[i : i + per_host] for i in range(0, len(names), per_host)]
        self.fabric = Fabric(hosts, copy_s, lambda: self.now) if copy_s else None
        self._tick_s = job.lengths.largest * rates.decode_s(split.slots) / TICKS
        task = EndlessTask()
        self._ledger = Ledger(run_dir / "ledger.sqlite")
        sampler = make_sampler(config.sampler, task, config.seed)
        clock = lambda: self.now  # noqa: E731
        self.coordinator = Coordinator(run_dir, config, self, task, sampler, self._ledger, sink, clock, _AtOnce())
        self.coordinator.recover(None)
        self._hello("learner", "learner", 1)
        self._hello("verifier", "verifier", 1 << 16)
        for name in names:
            self._hello("engine", name, split.slots)
        self._inbox.append(("learner", StepDone(0, _notice(0), {})))
        self._inbox.append(("learner", BatchRequest(0)))

    def _hello(self, role: Any, name: str, slots: int) -> None:
        self._inbox.append((name, Hello(role, name, name, 1, slots)))

    # --- the transport that the coordinator sees ---

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        received = list(self._inbox)
        self._inbox.clear()
        return received

    def send(self, name: str, message: Any) -> bool:
        match message:
            case WorkItems():
                self.engines[name].submit(message.items)
            case NewWeights() if self.fabric is not None:
                self.fabric.announce(name, message.notice)
            case NewWeights():
                self._held[name] = message.notice
                self.engines[name].holds = self._barrier
            case VerifyJobs():
                right = Verdict("correct", 1.0), Verdict("incorrect", 0.0)
                found = tuple(Judgement(job.attempt_id, right[job.attempt_id % 2]) for job in message.jobs)
                self._inbox.append((name, Judgements(found)))
            case Batch():
                self.learner.start(message, self.now)
            case Stop(checkpoint=str(path)):
                Path(path).mkdir(parents=True)
                write_manifest(Path(path), [])
                self._inbox.append((name, StepDone(self.version, _notice(self.version), {}, path)))
        return True

    # --- time ---

    def run(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        """To the end; `on_step` hears the number of each step when it has been taken."""
        num_idle, said = 0, 0
        while not self.coordinator.ended:
            if self.version > said:
                on_step(said := self.version)
            began_s = time.process_time()
            self.coordinator.turn(0.0)
            self._coordinator_s += time.process_time() - began_s
            num_idle = 0 if self._inbox or self._advance() else num_idle + 1
            assert num_idle < MAX_IDLE_TURNS, f"the run stands still: {queues(self.coordinator.flow)}"
        self._ledger.close()

    def _advance(self) -> bool:
        """To the next thing that happens, and what else happens within a tick of it; False when nothing will."""
        if self._held and not (self._barrier and any(engine.num_rows for engine in self.engines.values())):
            for name, notice in self._held.items():
                self.engines[name].load(notice)
            self._held.clear()
        due = min(self.learner.ends_s, *(engine.next_event_s() for engine in self.engines.values()))
        if self.fabric is not None:
            due = min(due, self.fabric.due_s())
        if due == float("inf"):
            return False
        # A step ends exactly when it does; completions are gathered.
        self.now = min(max(due, self.now + self._tick_s), max(self.learner.ends_s, self.now))
        for name, notice in self.fabric.take(self.now) if self.fabric is not None else ():
            self.engines[name].load(notice)
        for name, engine in self.engines.items():
            ended, loaded = engine.advance(self.now)
            if ended:
                self._inbox.append((name, Rollouts(tuple(ended))))
            if loaded is not None:
                if self.fabric is not None:
                    self.fabric.loaded(name, loaded)
                self._inbox.append((name, WeightsLoaded(loaded, 0.0, 0.0, engine.num_in_flight)))
        if self.learner.ends_s <= self.now:
            batch = self.learner.finish()
            self.version += 1
            self.batches.append((self.now, batch))
            busy_s = sum(engine.busy_s for engine in self.engines.values())
            row_s = sum(engine.row_s for engine in self.engines.values())
            self.usage.append((busy_s, row_s, self.learner.busy_s, self._coordinator_s))
            self._inbox.append(("learner", StepDone(self.version, _notice(self.version), self._metrics(batch))))
            self._inbox.append(("learner", BatchRequest(self.version)))
        return True

    def _metrics(self, batch: Batch) -> dict[str, float]:
        """What a learner would say of the step that has just been taken."""
        ages = np.concatenate(_ages(batch, self.version))
        return {"ess": 1.0, "num_tokens": ages.size, "lag_mean": float(ages.mean()), "lag_max": float(ages.max())}


def _ages(batch: Batch, step: int) -> list[np.ndarray]:
    """Lag of each rollout's tokens when `step` trains them."""
    return [step - 1 - rollout.version_array() for group in batch.groups for rollout in group.rollouts]


def _notice(version: int) -> WeightsNotice:
    return WeightsNotice(version, f"v{version}", "", 0, "", b"", b"")


def config_of(placement: Placement, job: Job, split: Split, steps: int, seed: int) -> Config:
    """The run that `simulate` takes."""
    raw = {
        "seed": seed,
        "max_steps": steps,
        "max_rollouts": 0,
        "engines": {"kind": "fake", "count": split.engines, "slots": split.slots},
        # One step off as it is usually built waits for all of a batch, in flight for as many as a batch has.
        "learner": {"batch_size": job.batch, "batch_order": "ticket" if placement == "one_step_off" else "arrival"},
        "sampler": {"kind": "fixed", "num_rollouts": job.group, "drop_zero_variance": False},
        "sampling": {"max_new_tokens": 1 << 20},
        "staleness": {"max_lag": split.max_lag, "min_ess": 0.0},
        "eval": {"every_steps": 0},
        "daemon": {"checkpoint_every_steps": 0},
    }
    return parse_config(raw, "overlap")


def simulate(placement: Placement, job: Job, split: Split, rates: Rates, steps: int, seed: int = 0) -> Measured:
    """A run of so many steps, without its warm-up. `synchronous`, `one_step_off` or `in_flight`: the other placements
    put two things on one device, which this system does not do.
    """
    assert placement in ("synchronous", "one_step_off", "in_flight")
    config = config_of(placement, job, split, steps, seed)
    with tempfile.TemporaryDirectory(prefix="ngu-overlap-") as directory:
        world = World(Path(directory), config, job, split, rates, placement != "in_flight", NoRecords())
        world.run()
    return measured(world, split, round(WARM_UP * steps))


def measured(world: World, split: Split, skip: int) -> Measured:
    """Of the steps after the first `skip`."""
    times = [time_s for time_s, _ in world.batches]
    span_s = times[-1] - times[skip]
    busy_s, row_s, learner_s, coordinator_s = np.subtract(world.usage[-1], world.usage[skip])
    lags, launches = [], []
    for step, (_, batch) in enumerate(world.batches):
        if step > skip:
            ages = _ages(batch, step + 1)
            lags.append(np.concatenate(ages))
            launches.append(float(np.mean([age[0] for age in ages])))
    return Measured(
        period_s=span_s / (len(times) - 1 - skip),
        engine_idle=1 - float(busy_s) / (span_s * split.engines),
        row_idle=1 - float(row_s) / (span_s * split.engines * split.slots),
        learner_idle=1 - float(learner_s) / span_s,
        coordinator_busy=float(coordinator_s) / span_s,
        lag=Lag(float(np.mean([a.mean() for a in lags])), float(np.mean(launches)), int(max(a.max() for a in lags))),
    )
