"""The loop that joins sampler, engines, verifiers and learner.

One turn: drain the socket, let every message change the books, launch and hand out what now may be, commit the ledger,
and only then send. Nothing here blocks and nothing waits for a particular peer, so any message unblocks it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pipeline import tracing
from pipeline.channels import Transport, Unreadable
from pipeline.checkpoints import Snapshot
from pipeline.config import Config, dump_config
from pipeline.coordinator.evaluation import Phase
from pipeline.coordinator.evaluator import Evaluator
from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.journal import Configured, Journal
from pipeline.coordinator.lineage import Lineage
from pipeline.coordinator.records import Records
from pipeline.coordinator.recovery import recover
from pipeline.coordinator.rotation import Rotation
from pipeline.coordinator.saving import Saver
from pipeline.coordinator.starvation import relieved
from pipeline.coordinator.tally import Tally
from pipeline.errors import RunFailed, WireError
from pipeline.guards import is_process
from pipeline.ledger import Ledger
from pipeline.messages import (
    PROTOCOL_VERSION,
    AttemptFailed,
    BatchRequest,
    Cancel,
    Heartbeat,
    Hello,
    Identify,
    Judgements,
    Leave,
    NewWeights,
    PeerFailed,
    PeerWarning,
    PublishAgain,
    Role,
    Rollouts,
    SetLearningRate,
    StepDone,
    Stop,
    VerifyJobs,
    WeightsLoaded,
    WeightsNotice,
    WeightsRefused,
    WorkItems,
)
from pipeline.metrics import MetricSink
from pipeline.rundir import write_config
from pipeline.soundness import are_sound, check
from pipeline.tasks.base import TaskSource
from samplers.base import Sampler
from samplers.registry import make_sampler

State = Literal["starting", "evaluating", "training", "stopping", "finished", "stopped"]
# `pause` starts nothing new; `drain` launches nothing new, but trains the batches that what runs still fills.
Mode = Literal["run", "pause", "drain"]


MAX_UNSOUND = 8


def _is_rollouts(received: tuple[str, Any]) -> bool:
    return isinstance(received[1], Rollouts)


class Coordinator:
    """Peers, weights, the learner's turn and the phases of a run; `AttemptFlow` does the rest."""

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        transport: Transport,
        task: TaskSource,
        sampler: Sampler,
        ledger: Ledger,
        sink: MetricSink,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ):
        """`executor` writes checkpoints; a thread by default."""
        self.run_dir = run_dir
        self.transport = transport
        self.task = task
        self.ledger = ledger
        self.clock = clock
        self.tally = Tally(clock)
        self.journal = Journal(run_dir / "journal")
        self.flow = AttemptFlow(config, sampler, ledger, self.tally, self.journal)
        self.evaluator = Evaluator(self.flow, task)
        self.peer_stats: dict[str, dict[str, float]] = {}
        self.records = Records(sink, self.flow, self.peer_stats)
        self.saver = Saver(run_dir, executor)
        self.state: State = "starting"
        self.mode: Mode = "run"
        self.save_requested = False
        self._saves_last = False  # what is being saved is the closing checkpoint
        self.stop_requested = False
        self.peers: dict[str, Hello] = {}
        self.last_heard: dict[str, float] = {}  # from a peer's first word after Hello on: it loads its model in between
        self.rotation = Rotation(clock)
        self.dismissed: set[str] = set()  # engines, by boot id
        self.weights: WeightsNotice | None = None
        self.lineage = Lineage(run_dir, self.flow)
        self.resumed = False
        self.outbox: list[tuple[str, Any]] = []
        self._are_sound = False  # the arrays of the rollouts that the turn has received

    @property
    def config(self) -> Config:
        return self.flow.config

    @property
    def sampler(self) -> Sampler:
        return self.flow.sampler

    @property
    def policy_version(self) -> int:
        return self.flow.policy_version

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "stopped")

    # --- the loop ---

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for messages, then do everything they allow."""
        received = self.transport.receive(timeout_s)
        with tracing.span("turn", received=len(received)):
            self._take_turn(received)
        if tracing.is_on():
            tracing.counter("queues", self.flow.queues() | {"batches": self.flow.batcher.num_batches})

    def _take_turn(self, received: list[tuple[str, Any]]) -> None:
        rollouts = [r for _, message in received if isinstance(message, Rollouts) for r in message.rollouts]
        self._are_sound = are_sound(rollouts, self.flow.vocab_size)
        for are_rollouts, messages in groupby(received, _is_rollouts):
            if are_rollouts:
                self._take_rollouts([(name, message) for name, message in messages if self._may_say(name, message)])
                continue
            for name, message in messages:
                if self._may_say(name, message):
                    self._act_on(name, message)
        self.outbox.extend(self.evaluator.catch_up(self.weights))
        self._advance()
        self._heed_starvation()
        self._hand_out()
        self.records.new_warnings()
        with tracing.span("commit"):
            self.journal.flush()
            self.ledger.commit_turn()
        self._on_saved(self.saver.look(self.flow))
        outbox, self.outbox = self.outbox, []
        with tracing.span("send", messages=len(outbox)):
            for name, message in outbox:
                if not self.transport.send(name, message):
                    self._lose_peer(name)

    def _advance(self) -> None:
        if self.stop_requested and self.state not in ("stopping", "stopped", "finished"):
            self.flow.evaluation = None
            self.state = "stopping"
        if self.state == "starting":
            if self.flow.pending or self.lineage.training is not None:  # the learner catches up with the books
                self._feed_learner()
            elif self._engines_current() and self.flow.jobs.num_slots and self.evaluator.is_ready:
                self._start_phase("before")
        elif self.state == "evaluating":
            self._end_evaluation_if_complete()
        elif self.state == "training":
            self._train()
        elif self.state == "stopping":
            self._close()
        if not self.ended:
            self._feed_learner(is_open=False)

    def _train(self) -> None:
        self._end_evaluation_if_complete()
        self._feed_learner()
        # After the learner's turn: a batch without a group has just made room, and with nothing in flight the run would
        # end here although its budget is not spent.
        if self.mode == "run":
            self.flow.launch()
        if self._training_is_over():
            if self._engines_current():
                self._start_phase("after")
        else:
            self.evaluator.start_if_due()

    def _hand_out(self) -> None:
        for queue in (self.flow.work, self.flow.eval_work):
            self.outbox.extend((name, WorkItems(tuple(items))) for name, items in queue.assign().items())
        for name, jobs in self.flow.jobs.assign().items():
            self.outbox.append((name, VerifyJobs(tuple(jobs))))

    # --- peers ---

    def _may_say(self, name: str, message: Any) -> bool:
        """Whether a message is sound, and that peer's to send; one that is not has no other effect than this."""
        sender = self.peers.get(name)
        if sender is None and not isinstance(message, Hello | Unreadable):
            self.outbox.append((name, Identify()))
            return False
        try:
            check(message, sender, self.policy_version)
        except WireError as e:
            self.tally.refused(e.kind, f"{name}: {e.message}")
            return False
        if not isinstance(message, Hello):
            self.last_heard[name] = self.clock()
        return True

    def _take_rollouts(self, messages: Sequence[tuple[str, Rollouts]]) -> None:
        """At once what came at once: many engines send single rollouts, and most of their cost is by the call."""
        self.flow.on_rollouts([(name, message.rollouts) for name, message in messages], self._are_sound)
        for name in [*self.flow.num_unsound]:
            self._dismiss_if_unsound(name)

    def _act_on(self, name: str, message: Any) -> None:
        match message:
            case Hello():
                self._on_hello(name, message)
            case Judgements():
                self.flow.on_verdicts(message.judgements)
            case AttemptFailed():
                self.flow.on_attempt_failed(name, message)
            case Heartbeat():
                self.peer_stats[name] = message.stats
                self.tally.spent(self.peers[name].role, self.peers[name].boot_id, message.cpu_s)
            case WeightsLoaded():
                self._on_weights_loaded(name, message)
            case WeightsRefused():
                self._on_weights_refused(name, message)
            case BatchRequest():
                self.lineage.is_waiting = True
            case StepDone():
                self._on_step_done(message)
            case PeerFailed():
                self._on_peer_failed(name, message.reason)
            case PeerWarning():
                self.tally.warn(message.text)
            case Leave():
                if message.boot_id == self.peers[name].boot_id:
                    self._lose_peer(name)

    def _on_hello(self, name: str, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            self.tally.refused("protocol", f"{name} speaks protocol {hello.protocol}, this run {PROTOCOL_VERSION}")
            self.outbox.append((name, Stop()))
            return
        if hello.boot_id in self.dismissed:
            self.outbox.append((name, Stop()))
            return
        known = self.peers.get(name)
        if known is not None and known.boot_id != hello.boot_id:
            self._lose_peer(name)
        self.peers[name] = hello
        if hello.role == "gateway":  # those for whom an earlier one spoke are out of reach
            for lost in [n for n, peer in self.peers.items() if peer.via not in ("", hello.boot_id)]:
                self._lose_peer(lost)
        if hello.role == "engine" and self.weights is not None:
            self.outbox.append((name, NewWeights(self.weights)))
        if hello.role == "evaluator":
            self.evaluator.join(name, hello.slots)
        if hello.role == "verifier":
            self.flow.jobs.add_peer(name, hello.slots)

    def _lose_peer(self, name: str) -> None:
        """A peer is gone: what it held goes elsewhere."""
        if (peer := self.peers.get(name)) is not None and peer.role == "learner":
            if self.lineage.is_in_step:
                self.record_failure(f"the learner was lost in step {self.policy_version + 1}")
            self.lineage.lost()
        for known in (self.peers, self.peer_stats, self.last_heard, self.rotation.versions, self.flow.num_unsound):
            known.pop(name, None)
        self.evaluator.leave(name)
        for attempt_id in self.flow.work.remove_peer(name):
            self.flow.fail(attempt_id, f"{name} was lost")
        for attempt_id, job in self.flow.jobs.remove_peer(name).items():
            self.flow.jobs.put(attempt_id, job, urgent=True)

    def lose_dead_engines(self) -> None:
        """Those of this machine whose processes have ended: the next of that name may be long in coming."""
        for name in self._named("engine", "evaluator"):
            if not is_process(self.peers[name].pid):
                self._lose_peer(name)

    def _on_peer_failed(self, name: str, reason: str) -> None:
        """Raises RunFailed, unless it is an engine and another goes on."""
        if self.peers[name].role not in ("engine", "evaluator") or self.rotation.failed(name, self._named("engine")):
            raise RunFailed(f"{name}: {reason}")
        self.tally.count("error/engine")
        self.tally.warn(f"{name} failed, and the run goes on without it until it is started again: {reason}")
        self._lose_peer(name)

    def _dismiss_if_unsound(self, name: str) -> None:
        """An engine that sends nothing sound costs every problem that it gets. The last engine stays: if nothing
        comes of its attempts, the run ends with the reason.
        """
        if self.flow.num_unsound[name] >= MAX_UNSOUND and self.rotation.versions.keys() - {name}:
            self.tally.warn(f"{name} sent {MAX_UNSOUND} unsound rollouts in a row: it is stopped")
            self.dismissed.add(self.peers[name].boot_id)
            self._lose_peer(name)
            self.outbox.append((name, Stop()))

    def _on_weights_loaded(self, name: str, message: WeightsLoaded) -> None:
        self.rotation.loaded(message.policy_version)
        if self.peers[name].role == "evaluator":
            self.evaluator.loaded(name, message)
            return
        if name not in self.rotation.versions:  # an engine takes work only once it has weights
            self.flow.work.add_peer(name, message.slots or self.peers[name].slots)
        self.rotation.versions[name] = message.policy_version
        self.tally.weights_loaded(message)

    def _on_weights_refused(self, name: str, message: WeightsRefused) -> None:
        self.tally.count("error/weights")
        version = message.policy_version
        if version != self.policy_version:
            return  # newer ones are on their way
        self.tally.warn(f"{name} refused weights {version}: {message.reason}")
        match self.rotation.refused(name, version, self._named("engine", "evaluator")):
            case "end":
                raise RunFailed(f"every engine refused weights {version}, last {name}: {message.reason}")
            case "leave":
                self._lose_peer(name)  # its Identify brings it back, but nobody waits for it
            case "publish":
                self.outbox.extend((learner, PublishAgain(version)) for learner in self._named("learner"))

    def _named(self, *roles: Role) -> list[str]:
        return [name for name, hello in self.peers.items() if hello.role in roles]

    def _engines_current(self) -> bool:
        """Whether all engines that serve have the newest weights; the run waits `daemon.hang_s` for the last."""
        for name in self.rotation.overdue(self.policy_version, self.config.daemon.hang_s):
            self.tally.warn(f"{name} has not loaded weights {self.policy_version}: the run goes on without it")
            self._lose_peer(name)
        return self.rotation.is_current(self.policy_version)

    # --- the learner ---

    def _learner(self) -> str | None:
        return next(iter(self._named("learner")), None)

    def _feed_learner(self, is_open: bool = True) -> None:
        """Give the learner what it asks for; where the run is not `is_open` to new steps only what it has missed."""
        if self.lineage.is_waiting and (learner := self._learner()) is not None:
            may_step = is_open and not self._steps_are_done() and self.mode != "pause"
            may_save = is_open and (self.save_requested or self.journal.is_long)
            self.outbox.extend((learner, message) for message in self.lineage.next(may_step, may_save))

    def _on_step_done(self, message: StepDone) -> None:
        """A new policy version, the newest once more, or a checkpoint of it; of what a learner that was started alone
        repeats, only where it stands.
        """
        version, weights = message.policy_version, message.weights
        self.lineage.stands_at(version)
        if version < self.policy_version:
            return
        is_new = self.weights is None or version != self.policy_version
        is_other = self.weights is None or weights.checksum != self.weights.checksum
        self.flow.policy_version = version
        self._are_sound &= weights.vocab_size == self.flow.vocab_size
        self.weights, self.flow.vocab_size = weights, weights.vocab_size
        if self.lineage.training is not None and is_new:
            if message.warning:
                self.tally.warn(message.warning)
            self.flow.trained(self.lineage.stepped(version).groups, message.metrics)
            self.records.step(message.metrics | self._engine_gauges())
        engines = self._named("engine")
        if is_new:
            self.outbox.extend((name, NewWeights(weights)) for name in engines)
        elif message.checkpoint is None:
            self.evaluator.published_again()
            late = self.rotation.published_again(version, engines, is_other)
            self.outbox.extend((name, NewWeights(weights)) for name in late)
            lr = SetLearningRate(self.config.learner.lr)  # what was repeated may have had another
            self.outbox.extend((learner, lr) for learner in self._named("learner"))
        if message.checkpoint is not None:
            self._save(self.run_dir / message.checkpoint)

    def record_failure(self, reason: str) -> None:
        """Of the run or its learner, with what was measured since the last step and of the step in training."""
        learner = self._learner()
        said = self.peer_stats.get(learner, {}) if learner is not None else {}
        self.records.failure(reason, self.lineage.gauges() | {f"learner/{k}": v for k, v in said.items()})

    def _engine_gauges(self) -> dict[str, float]:
        return {f"{name}/{k}": v for name in self.rotation.versions for k, v in self.peer_stats.get(name, {}).items()}

    # --- phases ---

    def _start_phase(self, phase: Phase) -> None:
        if phase == "before" and self.resumed:
            self._start_training()
            return
        self.state = "evaluating"
        if phase == "after":  # what still runs would only delay the closing evaluation
            for name, ids in self.flow.cancel_in_flight().items():
                self.outbox.append((name, Cancel(tuple(ids))))
        self.evaluator.start(phase)

    def _start_training(self) -> None:
        self.state = "training"
        self.evaluator.training_starts()
        self.tally.start()
        self.flow.requeue_in_flight()

    def _end_evaluation_if_complete(self) -> None:
        evaluation = self.flow.evaluation
        if evaluation is None or evaluation.num_missing:
            return
        record = self.evaluator.end()
        if evaluation.launches:
            self.records.write(**record)
        if evaluation.phase == "before":
            self._start_training()
        elif evaluation.phase == "after":
            self.state = "stopping"

    def _steps_are_done(self) -> bool:
        return 0 < self.config.max_steps <= self.policy_version

    def _training_is_over(self) -> bool:
        if self.lineage.training is not None or self.flow.evaluation is not None or not self.flow.work.num_slots:
            return False
        # Nothing in flight and still no full batch: the budget is spent, or the sampler has no problem left.
        starved = self.mode == "run" and self.flow.book.num_in_flight == 0 and not self.flow.batcher.ready
        return starved or self._steps_are_done()

    # --- ending, saving, resuming ---

    def _close(self) -> None:
        """Ask the learner for the closing checkpoint; its arrival ends the run.

        Only the end of a run waits for a learner that is away or behind. A stop does not: without that checkpoint the
        last one and the journal hold everything.
        """
        if self.saver.is_busy:  # maybe with the closing one, whose learner is gone by now
            return
        learner = self._learner()
        if learner is None or not self.lineage.has_all:
            if self.stop_requested:
                self._end("stopped")
        elif not self.lineage.is_closing:
            self.outbox.append((learner, self.lineage.close()))

    def _save(self, partial: Path) -> None:
        """The learner has written its part of a checkpoint of the books as they are now."""
        if self.saver.is_busy:  # steps are shorter than the disk takes
            self._on_saved(self.saver.finish(self.flow))
        self.saver.begin(self.flow, self.task, partial)
        self.save_requested = False
        self._saves_last = self.state == "stopping"

    def _on_saved(self, version: int | None) -> None:
        """A checkpoint is published, or (None) nothing is new."""
        if version is not None:
            self.lineage.saved(version)
            if self._saves_last:
                self._end("stopped" if self.stop_requested else "finished")

    def _end(self, state: Literal["finished", "stopped"]) -> None:
        if state == "finished":
            self.flow.cancel_waiting()
        self.records.write("levels", **self.tally.totals())
        self.outbox.extend((name, Stop()) for name in self.peers)
        self.state = state

    def recover(self, snapshot: Snapshot | None) -> None:
        """Go on after a checkpoint (None: after none) and what the journal holds since; before the first turn."""
        self.resumed = recover(self.flow, self.task, snapshot, self._apply_config)
        self.journal.write(Configured(dump_config(self.config)))

    # --- live changes ---

    def _heed_starvation(self) -> None:
        """Warn, and change what `guards.starvation` says, as a person would by `ngu ctl set`."""
        if alarm := self.flow.starvation.take_alarm():
            config, changes = relieved(self.config)
            what = "; ".join(changes) or "nothing is changed for it (guards.starvation)"
            self.tally.warn(f"step {self.policy_version}: the run is about to starve: {alarm}; {what}")
            if changes:
                write_config(self.run_dir, config)
                self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        """Go on with other values of live fields (`control.LIVE_FIELDS`)."""
        if config.learner.lr != self.config.learner.lr and (learner := self._learner()) is not None:
            self.outbox.append((learner, SetLearningRate(config.learner.lr)))
        self._apply_config(config)
        self.journal.write(Configured(dump_config(config)))

    def _apply_config(self, config: Config) -> None:
        if config.sampler != self.config.sampler:
            sampler = make_sampler(config.sampler, self.task, config.seed)
            sampler.restore(self.sampler.state())
            self.flow.sampler = sampler
        self.flow.config = config
