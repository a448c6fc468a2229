"""Roles without processes: a coordinator with fake peers joined by plain queues, for tests on no clock at all."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from pipeline.checkpoints import latest, load
from pipeline.config import Config
from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.queues import queues
from pipeline.engines.base import Failure
from pipeline.engines.fake import FakeEngine, FakeScript
from pipeline.ledger import Ledger
from pipeline.manifest import write_manifest
from pipeline.messages import (
    AttemptFailed,
    Batch,
    BatchRequest,
    Cancel,
    Hello,
    Identify,
    Judgement,
    Judgements,
    NewWeights,
    PublishAgain,
    Rollouts,
    Save,
    StepDone,
    Stop,
    Verdict,
    VerifyJobs,
    WeightsLoaded,
    WeightsNotice,
    WeightsRefused,
    WorkItems,
)
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Problem
from samplers.registry import make_sampler


class ListTask:
    """Problems p0..pN in shuffled passes; the even ones are level "easy", the others "hard"."""

    def __init__(self, num_problems: int, seed: int = 0, num_eval: int = 4):
        self.num_problems = num_problems
        self.hard_levels = ("hard",)
        levels = ("easy", "hard")
        self._problems = [Problem(f"p{i}", "list", f"{i}?", str(i), levels[i % 2]) for i in range(num_problems)]
        self._passes = ShuffledPasses(num_problems, seed)
        self._eval = self._problems[:num_eval]

    def next_problem(self) -> Problem:
        return self._problems[self._passes.next_index()]

    def eval_problems(self) -> list[Problem]:
        return self._eval

    def level_weights(self) -> dict[str, float]:
        return {"easy": 0.5, "hard": 0.5}

    def state(self) -> dict[str, object]:
        return self._passes.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._passes.restore(state)


class RecordingSink:
    def __init__(self):
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["kind"] == kind]

    def close(self) -> None:
        pass


VOCAB_SIZE = 12  # all that fake engines say is below it


def notice(version: int) -> WeightsNotice:
    return WeightsNotice(version, f"v{version}", "", 0, "", b"", b"", VOCAB_SIZE)


def mean_lag(batch: Batch, step: int) -> float:
    """Of the batch's tokens, at the step that trains them."""
    versions = [r.version_array() for g in batch.groups for r in g.rollouts]
    lags = [step - 1 - int(v) for array in versions for v in array]
    return sum(lags) / max(len(lags), 1)


class FakeVerifier:
    """Judges by string comparison; every `unknown_every`-th job gets no judgement."""

    def __init__(self, unknown_every: int = 0):
        self._unknown_every, self._count = unknown_every, 0

    def judge(self, jobs: VerifyJobs) -> Judgements:
        return Judgements(tuple(Judgement(j.attempt_id, self._verdict(j)) for j in jobs.jobs))

    def _verdict(self, job: Any) -> Verdict:
        self._count += 1
        if self._unknown_every and self._count % self._unknown_every == 0:
            return Verdict("unknown", 0.0, detail="scripted")
        is_correct = job.text == f"\\boxed{{{job.problem.answer}}}"
        return Verdict("correct" if is_correct else "incorrect", float(is_correct))


class Later(Executor):
    """Does what it is given `turns` calls of `turn` later, or when it is waited for: a slow disk without a clock."""

    def __init__(self, turns: int):
        self._turns = turns
        self._given: list[_Task] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        self._given.append(task := _Task(lambda: fn(*args, **kwargs), self._turns + 1))
        task.turn()
        return task

    def turn(self) -> None:
        for task in self._given:
            task.turn()
        self._given = [task for task in self._given if not task.done()]


class _Task(Future):
    def __init__(self, call: Callable[[], Any], turns: int):
        super().__init__()
        self._call, self._turns = call, turns

    def turn(self) -> None:
        self._turns -= 1
        if self._turns <= 0:
            self._do()

    def result(self, timeout: float | None = None) -> Any:
        self._do()
        return super().result(timeout)

    def _do(self) -> None:
        if not self.done():
            try:
                self.set_result(self._call())
            except Exception as e:
                self.set_exception(e)


class Simulation:
    """A coordinator, `num_engines` fake engines, a verifier and a learner that takes `step_turns` turns a step."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        num_problems: int = 40,
        script: FakeScript | None = None,
        num_engines: int = 1,
        step_turns: int = 3,
        unknown_every: int = 0,
        resume: Path | None = None,
        ess: Callable[[int], float] = lambda step: 1.0,
        ratio: Callable[[int], float] = lambda step: 1.0,
        sink: Any = None,
        make_notice: Callable[[int], WeightsNotice] = notice,
        save_turns: int = 0,
    ):
        self.run_dir = run_dir
        self.config = config
        self.inbox: deque[tuple[str, Any]] = deque()
        self.sent: list[tuple[str, Any]] = []
        self.sink = sink or RecordingSink()
        self.ledger = Ledger(run_dir / "ledger.sqlite")
        self.task = ListTask(num_problems, config.seed)
        sampler = make_sampler(config.sampler, self.task, config.seed)
        self.disk = Later(save_turns)  # how long it takes to write the coordinator's part of a checkpoint
        self.coordinator = Coordinator(
            run_dir, config, self, self.task, sampler, self.ledger, self.sink, self._clock, self.disk
        )
        self.now = 0.0
        self.version = 0
        snapshot = load(resume) if resume is not None else None
        self.version = snapshot.policy_version if snapshot else 0
        self.coordinator.recover(snapshot)
        self.script = script or FakeScript()
        self.engines: dict[str, FakeEngine] = {}
        self.verifier = FakeVerifier(unknown_every)
        self.step_turns = step_turns
        self.ess, self.ratio = ess, ratio
        self.notice = make_notice
        self.stopped: set[str] = set()
        self.forgives = False  # an engine that is not known any more says Hello, instead of failing the test
        self.refuses: Callable[[str, int], bool] = lambda name, version: False  # engines, of damaged weights
        self.batch: Batch | None = None
        self.batch_left = 0
        self.batches: list[Batch] = []
        self.taken: list[tuple[int, Batch]] = []  # the same, each with the version that it was to make
        self.num_boots = 0  # of the learner
        self.alive = {"learner", "verifier"}
        self._join_learner()
        self._say_hello("verifier", "verifier", 64)
        for i in range(num_engines):
            self.add_engine(f"engine-{i}")

    def _clock(self) -> float:
        return self.now

    def _say_hello(self, role: Any, name: str, slots: int, boot: str = "1") -> None:
        self.inbox.append((name, Hello(role, name, f"{name}/{boot}", 1, slots)))

    def _join_learner(self) -> None:
        self.num_boots += 1
        self._say_hello("learner", "learner", 1, str(self.num_boots))
        self.inbox.append(("learner", StepDone(self.version, self.notice(self.version), {})))
        self.inbox.append(("learner", BatchRequest(self.version)))

    def kill_learner(self) -> None:
        """With it goes what it had not finished, or not said."""
        self.alive.discard("learner")
        self.batch = None
        self.inbox = deque((name, message) for name, message in self.inbox if name != "learner")

    def start_learner(self) -> None:
        """Another one, from the newest checkpoint."""
        newest = latest(self.run_dir)
        self.version = load(newest).policy_version if newest is not None else 0
        self.alive.add("learner")
        self._join_learner()

    def add_engine(self, name: str, boot: str = "1", role: str = "engine") -> None:
        self.engines[name] = FakeEngine(self.config.engines.slots, self.config.seed, name, self.script)
        self._say_hello(role, name, self.config.engines.slots, boot)

    # --- the transport the coordinator sees ---

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        received = list(self.inbox)
        self.inbox.clear()
        return received

    def send(self, name: str, message: Any) -> bool:
        if name not in self.engines and name not in self.alive:
            return False
        self.sent.append((name, message))
        match message:
            case WorkItems():
                self.engines[name].submit(message.items)
                assert self.engines[name].num_in_flight <= self.engines[name].slots, "credit exceeded"
            case Cancel():
                self.engines[name].cancel(message.attempt_ids)
            case NewWeights() if self.refuses(name, message.notice.policy_version):
                self.inbox.append((name, WeightsRefused(message.notice.policy_version, "scripted")))
            case NewWeights():
                report = self.engines[name].load_weights(message.notice)
                loaded = WeightsLoaded(report.policy_version, 0.0, 0.0, self.engines[name].num_in_flight)
                self.inbox.append((name, loaded))
            case VerifyJobs():
                self.inbox.append((name, self.verifier.judge(message)))
            case Batch():
                self.batch, self.batch_left = message, self.step_turns
                self.batches.append(message)
                self.taken.append((self.version + 1, message))
            case PublishAgain() if message.policy_version == self.version and self.batch is None:
                self.inbox.append((name, StepDone(self.version, self.notice(self.version), {})))
            case Save():
                self._save(name, message)
                self.inbox.append(("learner", BatchRequest(self.version)))
            case Stop() if name in self.engines:
                self.stopped.add(name)
            case Stop():
                self._save(name, message)
            case Identify():
                assert self.forgives, f"{name} was not known"
                if name in self.engines:
                    self._say_hello("engine", name, self.config.engines.slots)
        return True

    def _save(self, name: str, message: Stop | Save) -> None:
        if self.batch is not None:  # a learner reads its socket between two steps
            self._finish_step(self.batch)
        if message.checkpoint is not None:
            self.write_part(Path(message.checkpoint))
            self.inbox.append((name, StepDone(self.version, self.notice(self.version), {}, message.checkpoint)))

    # --- time ---

    def turn(self) -> None:
        """One token of every engine, one turn of the learner, one turn of the coordinator."""
        self.now += 0.01
        for name, engine in self.engines.items():
            if engine.num_in_flight and name not in self.stopped:
                self._deliver(name, engine.step())
        if self.batch is not None:
            self.batch_left -= 1
            if self.batch_left <= 0:
                self._finish_step(self.batch)
        self.disk.turn()
        self.coordinator.turn(0.0)

    def _deliver(self, name: str, ended: list[Any]) -> None:
        for item in ended:
            if isinstance(item, Failure):
                self.inbox.append((name, AttemptFailed(item.attempt_id, item.reason, item.retryable)))
        rollouts = tuple(item for item in ended if not isinstance(item, Failure))
        if rollouts:
            self.inbox.append((name, Rollouts(rollouts)))

    def _finish_step(self, batch: Batch) -> None:
        self.batch = None
        metrics = self.learn(batch)
        self.version += 1
        self.inbox.append(("learner", StepDone(self.version, self.notice(self.version), metrics)))
        if batch.checkpoint:
            path = self.run_dir / "checkpoints" / f".step_{self.version:06d}.partial"
            self.write_part(path)
            self.inbox.append(("learner", StepDone(self.version, self.notice(self.version), {}, str(path))))
        self.inbox.append(("learner", BatchRequest(self.version)))

    def learn(self, batch: Batch) -> dict[str, float]:
        """Take the step that makes version + 1."""
        step = self.version + 1
        return {"loss": 1.0, "ess": self.ess(step), "ratio_mean": self.ratio(step), "lag_mean": mean_lag(batch, step)}

    def write_part(self, directory: Path) -> None:
        """The learner's part of a checkpoint: no files, sealed."""
        directory.mkdir(parents=True, exist_ok=True)  # a crash may have left one behind
        write_manifest(directory, [])

    def run(self, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if self.coordinator.ended:
                return
            self.turn()
            self.check_books()
        raise AssertionError(f"the run did not end: {self.coordinator.state}, {queues(self.coordinator.flow)}")

    def check_books(self) -> None:
        """Launched = ended + open, and the open ones are exactly those somebody still holds."""
        flow = self.coordinator.flow
        batch = self.coordinator.lineage.training
        training = [r.attempt_id for g in (batch.groups if batch else ()) for r in g.rollouts]
        flying = [a for a, p in flow.book.places.items() if p.work.purpose == "train"]
        waiting = [] if self.coordinator.state == "finished" else [r.rollout.attempt_id for r in flow.waiting()]
        held = flying + training + waiting
        assert len(held) == len(set(held))
        assert self.ledger.num_open == len(held), (self.ledger.counts, len(held))
