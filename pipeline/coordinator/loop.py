"""The loop that joins sampler, engines, verifiers and learner.

One turn: drain the socket, let every message change the books, launch and hand out what now may be, commit the ledger,
and only then send. Nothing here blocks and nothing waits for a particular peer, so any message unblocks it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal

from pipeline import tracing
from pipeline.channels import Transport
from pipeline.checkpoints import Snapshot
from pipeline.config import Config, dump_config
from pipeline.coordinator.book import results_of
from pipeline.coordinator.evaluation import Phase
from pipeline.coordinator.evaluator import Evaluator
from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.journal import Configured, Journal
from pipeline.coordinator.lineage import Lineage
from pipeline.coordinator.peers import Peers
from pipeline.coordinator.queues import queues
from pipeline.coordinator.records import Records
from pipeline.coordinator.recovery import recover
from pipeline.coordinator.saving import Saver
from pipeline.coordinator.starvation import relieved
from pipeline.coordinator.tally import Tally
from pipeline.ledger import Ledger
from pipeline.messages import (
    AttemptFailed,
    BatchRequest,
    Cancel,
    Heartbeat,
    Hello,
    Judgements,
    Leave,
    NewWeights,
    PeerFailed,
    PeerWarning,
    Rollout,
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
from pipeline.soundness import are_sound
from pipeline.tasks.base import TaskSource
from samplers.base import Sampler
from samplers.registry import make_sampler

State = Literal["starting", "evaluating", "training", "stopping", "finished", "stopped"]
# `pause` starts nothing new; `drain` launches nothing new, but trains the batches that what runs still fills.
Mode = Literal["run", "pause", "drain"]


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
        stats: dict[str, dict[str, float]] = {}  # of the peers
        self.records = Records(sink, self.flow, stats)
        self.saver = Saver(run_dir, executor)
        self.state: State = "starting"
        self.mode: Mode = "run"
        self.save_requested = False
        self._saves_last = False  # what is being saved is the closing checkpoint
        self.stop_requested = False
        self.weights: WeightsNotice | None = None
        self.lineage = Lineage(run_dir, self.flow)
        self.peers = Peers(self.flow, self.evaluator, self.lineage, self.records, stats, clock, self._say)
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
            tracing.counter("queues", queues(self.flow) | {"batches": self.flow.batcher.num_batches})

    def _take_turn(self, received: list[tuple[str, Any]]) -> None:
        rollouts = [r for _, message in received if type(message) is Rollouts for r in message.rollouts]
        self._are_sound = are_sound(rollouts, self.flow.vocab_size)
        now = self.clock()
        arrived: list[tuple[str, Sequence[Rollout]]] = []
        for name, message in received:
            are_rollouts = type(message) is Rollouts
            if not are_rollouts:  # before it is asked who may say this: whom they bring down may not
                self._take_rollouts(arrived)
            if not self.peers.may_say(name, message, now):
                continue
            if are_rollouts:
                arrived.append((name, message.rollouts))
            else:
                self._act_on(name, message)
        self._take_rollouts(arrived)
        self.outbox.extend(self.evaluator.catch_up(self.weights))
        self._advance()
        self._heed_starvation()
        self._hand_out()
        self.tally.fold()
        self.records.new_warnings()
        with tracing.span("commit"):
            self.journal.flush()
            self.ledger.commit_turn()
        self._on_saved(self.saver.look(self.flow))
        self.lineage.forget()
        outbox, self.outbox = self.outbox, []
        with tracing.span("send", messages=len(outbox)):
            for name, message in outbox:
                if not self.transport.send(name, message):
                    self.peers.lose(name)

    def _advance(self) -> None:
        if self.stop_requested and self.state not in ("stopping", "stopped", "finished"):
            self.flow.evaluation = None
            self.state = "stopping"
        if self.state == "starting":
            if self.flow.pending or self.lineage.training is not None:  # the learner catches up with the books
                self._feed_learner()
            elif self.peers.engines_current() and self.flow.jobs.num_slots and self.evaluator.is_ready:
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
            if self.peers.engines_current():
                self._start_phase("after")
        else:
            self.evaluator.start_if_due()

    def _hand_out(self) -> None:
        for queue in (self.flow.work, self.flow.eval_work):
            self.outbox.extend((name, WorkItems(tuple(items))) for name, items in queue.assign().items())
        for name, jobs in self.flow.jobs.assign().items():
            self.outbox.append((name, VerifyJobs(tuple(jobs))))

    # --- messages ---

    def _say(self, name: str, message: Any) -> None:
        self.outbox.append((name, message))

    def _take_rollouts(self, arrived: list[tuple[str, Sequence[Rollout]]]) -> None:
        """At once what came at once, and nothing twice: most of what single rollouts of many engines cost is calls."""
        if not arrived:
            return
        self.flow.on_rollouts(arrived, self._are_sound)
        arrived.clear()
        if self.flow.num_unsound:
            self.peers.dismiss_unsound()

    def _act_on(self, name: str, message: Any) -> None:
        match message:
            case Hello():
                self.peers.hello(name, message, self.weights)
            case Judgements():
                self.flow.on_verdicts(message.judgements)
            case AttemptFailed():
                self.flow.on_attempt_failed(name, message)
            case Heartbeat():
                self.peers.heartbeat(name, message)
            case WeightsLoaded():
                self.peers.weights_loaded(name, message)
            case WeightsRefused():
                self.peers.weights_refused(name, message)
            case BatchRequest():
                self.lineage.is_waiting = True
            case StepDone():
                self._on_step_done(message)
            case PeerFailed():
                self.peers.failed(name, message.reason)
            case PeerWarning():
                self.tally.warn(message.text)
            case Leave():
                self.peers.leave(name, message.boot_id)

    # --- the learner ---

    def _feed_learner(self, is_open: bool = True) -> None:
        """Give the learner what it asks for; where the run is not `is_open` to new steps only what it has missed."""
        if self.lineage.is_waiting and (learner := self.peers.learner) is not None:
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
            self.records.step(message.metrics | self.peers.engine_gauges())
        engines = self.peers.named("engine")
        if is_new:
            self.outbox.extend((name, NewWeights(weights)) for name in engines)
        elif message.checkpoint is None:
            self.evaluator.published_again()
            late = self.peers.rotation.published_again(version, engines, is_other)
            self.outbox.extend((name, NewWeights(weights)) for name in late)
            lr = SetLearningRate(self.config.learner.lr)  # what was repeated may have had another
            self.outbox.extend((learner, lr) for learner in self.peers.named("learner"))
        if message.checkpoint is not None:
            self._save(self.run_dir / message.checkpoint)

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
        if (learner := self.peers.learner) is None or not self.lineage.has_all:
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
        if self.saver.newest < (step := self.policy_version):
            self.tally.warn(f"no checkpoint of step {step}, as the learner was away: `ngu resume` takes it again")
        if state == "finished":
            self.flow.cancel_waiting()
        self.records.write("levels", **self.tally.totals())
        self.outbox.extend((name, Stop()) for name in self.peers.known)
        self.state = state

    def close(self) -> None:
        """What is being saved is saved; the ledger gets the verdicts of what waits to be trained, and is closed."""
        self.saver.close()
        waiting = self.flow.waiting()
        if (batch := self.lineage.training) is not None:
            waiting += results_of(batch.groups)
        self.ledger.judge([r.rollout for r in waiting], [r.verdict for r in waiting])
        self.ledger.close()

    def recover(self, snapshot: Snapshot | None) -> None:
        """Go on after a checkpoint (None: after none) and what the journal holds since; before the first turn."""
        self.saver.newest = snapshot.policy_version if snapshot is not None else -1
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
        if config.learner.lr != self.config.learner.lr and (learner := self.peers.learner) is not None:
            self.outbox.append((learner, SetLearningRate(config.learner.lr)))
        self._apply_config(config)
        self.journal.write(Configured(dump_config(config)))

    def _apply_config(self, config: Config) -> None:
        if config.sampler != self.config.sampler:
            sampler = make_sampler(config.sampler, self.task, config.seed)
            sampler.restore(self.sampler.state())
            self.flow.sampler = sampler
        self.flow.config = config
