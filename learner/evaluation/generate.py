"""Rollouts of held-out problems from one engine in this process, judged as in training."""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import torch
import xxhash

from learner.evaluation.outcomes import RolloutOutcome
from learner.evaluation.strategies import Label, by_rule
from learner.model import canary_batch, completion_logprobs, export_model_dir, load_model
from pipeline.config import Config, SamplingConfig
from pipeline.engines.base import Engine
from pipeline.engines.registry import make_engine
from pipeline.errors import WeightError
from pipeline.interruption import draw_interruption
from pipeline.messages import Problem, Rollout, SamplingParams, Verdict, VerifyJob, Work
from pipeline.model_path import model_for_task
from pipeline.verifiers.pool import VerifierPool
from pipeline.weights import WeightPublisher

SHARED_MEMORY = Path("/dev/shm")
# A rollout that could not be generated or judged is tried again this often, then it is missing.
MAX_TRIES = 3
# Work held by the engine, in multiples of its slots: enough that a slot is filled the moment it is free.
QUEUED = 2


def ready_engine(config: Config, model_path: str, name: str) -> Engine:
    """An engine that serves the model; `name` sets its random numbers, together with the seed of `config`.

    The weights go the way they go in training, checksum and canary included, so what is evaluated is what a run's
    engines would have served. Raises ConfigError for a model that cannot be loaded, WeightError for a wrong canary.
    """
    torch.set_num_threads(1)  # as in the engines of a run: two threads that wait for each other are slower
    model, tokenizer = load_model(model_for_task(model_path, str(config.task.__struct_config__.tag)))
    shared = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="ngu-eval-", dir=shared) as scratch,
        closing(WeightPublisher(Path(scratch) / "weights")) as publisher,
    ):
        model_dir = Path(scratch) / "model"
        export_model_dir(model, tokenizer, model_dir)
        ids, batch = canary_batch(model)
        with torch.no_grad():
            logprobs, _ = completion_logprobs(model, batch, temperature=1.0)
        notice = publisher.publish(model.state_dict(), 0, model_dir, ids.cpu().numpy(), logprobs.cpu().numpy())
        del model
        seed = xxhash.xxh3_64_intdigest(f"{config.seed}/{name}".encode()) >> 1
        engine = make_engine(config.engines, str(model_dir), seed, config.model.chat_template, name)
        report = engine.load_weights(notice)
    if not report.is_right:
        raise WeightError(
            f"{model_path}: the engine's logprobs differ from the model's by {report.canary_error:.3g} (at most "
            f"{report.tolerance:g} is rounding); try engines.kind=transformers"
        )
    return engine


class _Slot(msgspec.Struct):
    """One of the wanted rollouts of one problem."""

    problem: Problem
    num_tries: int = 0
    rollout: Rollout | None = None
    outcome: RolloutOutcome | None = None


class Collector:
    """Keeps an engine full and a verifier fed until every problem has its rollouts."""

    def __init__(
        self,
        engine: Engine,
        pool: VerifierPool,
        problems: Sequence[Problem],
        num_rollouts: int,
        config: SamplingConfig,
        label: Label = by_rule,
    ):
        self._label = label
        self._engine = engine
        self._pool = pool
        self._sampling = SamplingParams(config.temperature, config.max_new_tokens)
        self._interruption = config.interruption
        self._slots = [_Slot(problem) for problem in problems for _ in range(num_rollouts)]
        self._todo = deque(self._slots)
        self._attempts: dict[int, _Slot] = {}  # with the engine or the verifier, by attempt id
        self._num_attempts = 0
        self.last_failure = ""

    def run(self, on_settled: Callable[[int], object] = lambda number: None) -> list[RolloutOutcome]:
        """The outcomes, problem by problem; what failed `MAX_TRIES` times is missing. Blocks until all have ended.

        `on_settled` is told how many rollouts have just been judged or given up.
        """
        while self._todo or self._attempts:
            self._submit()
            settled = self._step()
            engine_idle = not self._engine.num_in_flight
            for attempt_id, verdict in self._pool.poll(1.0 if engine_idle and self._attempts else 0.0):
                settled += self._judge(self._attempts.pop(attempt_id), verdict)
            if settled:
                on_settled(settled)
        return [slot.outcome for slot in self._slots if slot.outcome is not None]

    def _submit(self) -> None:
        work = []
        while self._todo and self._engine.num_in_flight + len(work) < QUEUED * self._engine.slots:
            slot = self._todo.popleft()
            slot.num_tries += 1
            self._num_attempts += 1
            self._attempts[self._num_attempts] = slot
            # Drawn without the run's seed: every model is interrupted at the same lengths, so comparisons are paired.
            cut = draw_interruption(self._interruption, 0, self._num_attempts)
            number = self._num_attempts
            work.append(Work(number, number, 0, slot.problem, self._sampling, "eval", interruption=cut))
        self._engine.submit(work)

    def _step(self) -> int:
        """One token for every running rollout; the number of slots that were given up."""
        given_up = 0
        for ended in self._engine.step():
            slot = self._attempts[ended.attempt_id]
            if isinstance(ended, Rollout):
                ended.check()
                slot.rollout = ended
                truncated = ended.finish_reason == "length"
                self._pool.submit(VerifyJob(ended.attempt_id, slot.problem, ended.text, truncated))
            else:
                del self._attempts[ended.attempt_id]
                given_up += self._retry(slot, ended.retryable, ended.reason)
        return given_up

    def _judge(self, slot: _Slot, verdict: Verdict) -> int:
        if verdict.outcome == "unknown":
            return self._retry(slot, True, verdict.detail)
        verdict.check()
        rollout, problem = slot.rollout, slot.problem
        assert rollout is not None, "only a rollout is judged"
        slot.rollout = None
        slot.outcome = RolloutOutcome(
            problem.problem_id,
            problem.level,
            verdict.outcome == "correct",
            verdict.reward,
            rollout.num_tokens,
            rollout.finish_reason == "length",
            self._label(problem, rollout.text),
        )
        return 1

    def _retry(self, slot: _Slot, retryable: bool, why: str) -> int:
        """Put the slot back to work, or give it up (1)."""
        slot.rollout = None
        self.last_failure = why
        if retryable and slot.num_tries < MAX_TRIES:
            self._todo.append(slot)
            return 0
        return 1
