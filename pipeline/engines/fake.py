"""An engine without a model: scripted pass rates, lengths and faults, one token a step, the same every time.

It lets the coordinator, the chaos tests and simulations of many engines run without torch. What a rollout says depends
only on its attempt id, its problem and the seed, never on timing.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from pipeline.engines.base import Failure, LoadReport
from pipeline.engines.requests import Request
from pipeline.messages import FinishReason, Rollout, WeightsNotice, Work
from samplers.base import Problem

# A real learner may score these tokens: their ids are in every vocabulary, and a ratio to so low a logprob is cut off
# instead of being taken for that of an engine with other weights.
LOGPROB = -16.0
PROMPT_IDS = [1, 2, 3]
FIRST_ID, NUM_IDS, EOS_ID = 4, 8, 0


class FakeScript(msgspec.Struct, frozen=True):
    """Lengths of whole completions are uniform in `min_tokens..max_tokens`, or whatever `length` draws; one that the
    limit cuts short says nothing.

    A phrase is a token a word, and no thought ends before its interruption.
    """

    pass_rate: Callable[[Problem], float] = lambda problem: 0.5
    min_tokens: int = 4
    max_tokens: int = 16
    fail_frac: float = 0.0
    length: Callable[[random.Random], int] | None = None


class _Running(msgspec.Struct):
    request: Request
    length: int
    is_correct: bool


class FakeEngine:
    ready = True

    def __init__(self, slots: int, seed: int, engine_id: str = "fake", script: FakeScript | None = None):
        self.slots = slots
        self.engine_id = engine_id
        self._seed = seed
        self._script = script or FakeScript()
        self._waiting: deque[Work] = deque()
        self._running: dict[int, _Running] = {}
        self._version: int | None = None
        self._num_tokens = self._num_rollouts = self._num_steps = 0

    def submit(self, work: Sequence[Work]) -> None:
        self._waiting.extend(work)

    def cancel(self, attempt_ids: Sequence[int]) -> None:
        gone = set(attempt_ids)
        self._waiting = deque(w for w in self._waiting if w.attempt_id not in gone)
        for attempt_id in gone:
            self._running.pop(attempt_id, None)

    def load_weights(self, notice: WeightsNotice) -> LoadReport:
        self._version = notice.policy_version
        return LoadReport(notice.policy_version, stall_s=0.0, canary_error=0.0)

    def step(self) -> list[Rollout | Failure]:
        ended: list[Rollout | Failure] = []
        while self._waiting and len(self._running) < self.slots:
            failure = self._admit(self._waiting.popleft())
            if failure is not None:
                ended.append(failure)
        self._num_steps += bool(self._running)
        for attempt_id, running in list(self._running.items()):
            reason = self._advance(running)
            if reason is not None:
                del self._running[attempt_id]
                self._num_rollouts += 1
                ended.append(self._finish(running, reason))
        return ended

    def _admit(self, work: Work) -> Failure | None:
        rng = random.Random(f"{self._seed}/{work.attempt_id}")
        if rng.random() < self._script.fail_frac:
            return Failure(work.attempt_id, "scripted failure", retryable=True)
        script = self._script
        length = script.length(rng) if script.length else rng.randint(script.min_tokens, script.max_tokens)
        is_correct = rng.random() < self._script.pass_rate(work.problem)
        phrase = [FIRST_ID] * len(work.interruption.phrase.split()) if work.interruption is not None else []
        request = Request(work, PROMPT_IDS, phrase)
        request.start()
        self._running[work.attempt_id] = _Running(request, length, is_correct)
        return None

    def _advance(self, running: _Running) -> FinishReason | None:
        assert self._version is not None, "load_weights comes before the first step"
        request = running.request
        is_last = request.num_sampled + 1 >= running.length
        token = EOS_ID if is_last else FIRST_ID + len(request.completion_ids) % NUM_IDS
        request.extend([token], [LOGPROB], self._version)
        self._num_tokens += 1
        reason = request.finish_reason({EOS_ID})
        if reason is None and (due := request.due_interruption()) is not None:
            request.interrupt(due.answer_tokens)
        return reason

    def _finish(self, running: _Running, reason: FinishReason) -> Rollout:
        answer = running.request.work.problem.answer
        said = answer if running.is_correct else f"1{answer}"
        return running.request.rollout(reason, f"\\boxed{{{said}}}" if reason == "stop" else "", self.engine_id)

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    def stats(self) -> dict[str, float]:
        return {
            "tokens": self._num_tokens,
            "rollouts": self._num_rollouts,
            "decode_steps": self._num_steps,
            "slots_used": len(self._running),
        }

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
