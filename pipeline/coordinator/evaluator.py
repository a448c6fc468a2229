"""Evaluations: what they run, when those beside training begin, and which engine does them.

Without `eval.pinned` the engines that train do them in flight. With it an engine of its own does: it is given new
weights only between two evaluations, so that every token of one is of one version.
"""

import time
from typing import Any

from pipeline.config import EvalConfig
from pipeline.coordinator.evaluation import Evaluation, Phase
from pipeline.coordinator.flow import AttemptFlow
from pipeline.errors import ConfigError
from pipeline.messages import NewWeights, WeightsLoaded, WeightsNotice
from pipeline.tasks.base import TaskSource

EVAL_CHAIN = -1


class Evaluator:
    def __init__(self, flow: AttemptFlow, task: TaskSource):
        self._flow = flow
        self._task = task
        self._last_step = 0
        self._is_asked = False
        self._name = ""  # of the engine of its own, while there is one
        self._slots = 0
        self._sent: int | None = None  # the newest version that was sent to it,
        self._serves: int | None = None  # and the one it has loaded

    # --- its engine ---

    def join(self, name: str, slots: int) -> None:
        self._name, self._slots = name, slots
        self._sent = self._serves = None

    def leave(self, name: str) -> None:
        """A peer is gone; an evaluation that this one was doing begins again, perhaps at a later version."""
        if name != self._name:
            return
        self._name = ""
        self._sent = self._serves = None
        self._flow.eval_work.remove_peer(name)
        if self._is_pinned_running:
            self._abandon()
            self._is_asked = True

    def loaded(self, name: str, message: WeightsLoaded) -> None:
        if self._serves is None:
            self._flow.eval_work.add_peer(name, message.slots or self._slots)
        self._serves = message.policy_version

    def published_again(self) -> None:
        """What it was sent last may have been damaged."""
        self._sent = self._serves

    def catch_up(self, weights: WeightsNotice | None) -> list[tuple[str, NewWeights]]:
        """What its engine must be sent now, by name: the newest weights, unless it is evaluating."""
        if not self._name or weights is None or self._is_pinned_running or self._sent == weights.policy_version:
            return []
        self._sent = weights.policy_version
        return [(self._name, NewWeights(weights))]

    @property
    def _is_pinned_running(self) -> bool:
        return self._flow.evaluation is not None and self._flow.evaluation.is_pinned

    @property
    def is_ready(self) -> bool:
        """Whether training may start: not before its engine, or the first evaluations would be missing."""
        config = self._flow.config.eval
        return not (config.pinned and config.every_steps) or self._serves is not None

    # --- when ---

    def training_starts(self) -> None:
        self._last_step = self._flow.policy_version

    def ask(self) -> None:
        """Evaluate as soon as possible; raises ConfigError while an evaluation runs, or where nobody could do it."""
        self.check(self._flow.config.eval)
        if self._flow.evaluation is not None or self._is_asked:
            raise ConfigError("an evaluation can start during training, and one at a time")
        self._is_asked = True

    def check(self, config: EvalConfig) -> None:
        """Raise ConfigError if evaluations would wait for ever: their engine is started with the run, or not at all."""
        if config.pinned and not self._name:
            raise ConfigError("eval.pinned needs an engine of its own, which a run has if eval.every_steps was above 0")

    def start_if_due(self) -> None:
        """Called during training, after `catch_up`: a pinned evaluation waits until its engine has what it was sent."""
        flow, config = self._flow, self._flow.config.eval
        every, step = config.every_steps, flow.policy_version
        is_due = bool(every) and step >= self._last_step + every
        if flow.evaluation is not None or not (is_due or self._is_asked):
            return
        if config.pinned and (self._serves is None or self._serves != self._sent):
            return
        if is_due:
            self._last_step = step - step % every
        self._is_asked = False
        self.start("during", self._serves if config.pinned else None)

    # --- what ---

    def start(self, phase: Phase, pinned_version: int | None = None) -> None:
        """Queue its rollouts, for the engine that serves `pinned_version` until the end, or for those that train."""
        flow, task = self._flow, self._task
        config, hard = flow.config.eval, task.hard_levels if phase == "during" else ()
        usual = config.num_rollouts if phase == "during" else config.final_num_rollouts
        on_hard = config.hard_num_rollouts or usual
        launches = [p for p in task.eval_problems() for _ in range(on_hard if p.level in hard else usual)]
        step = flow.policy_version if pinned_version is None else pinned_version
        flow.evaluation = Evaluation(phase, step, launches, is_pinned=pinned_version is not None)
        for problem in launches:
            flow.queue(flow.book.new_attempt(problem, EVAL_CHAIN, 0, 0, "eval", tries=1))

    def end(self) -> dict[str, Any]:
        """The record of the evaluation that has just finished."""
        evaluation, task = self._flow.evaluation, self._task
        assert evaluation is not None and evaluation.num_missing == 0
        record = evaluation.record(task.level_weights(), task.hard_levels) | {"time": time.time()}
        self._flow.evaluation = None
        self._flow.tally.evaluated(record)
        return record

    def _abandon(self) -> None:
        flow = self._flow
        gone = {attempt_id for attempt_id, place in flow.book.places.items() if place.work.purpose == "eval"}
        for queue in (flow.work, flow.eval_work, flow.jobs):
            queue.discard(gone)
        for attempt_id in gone:
            flow.book.take(attempt_id)
        flow.evaluation = None
