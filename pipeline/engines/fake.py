"""An engine without a model: scripted pass rates, lengths and faults, one token a step, the same every time.

It lets the coordinator, the chaos tests and simulations of many engines run without torch. What a rollout says depends
only on its attempt id, its problem and the seed, never on timing.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from pipeline.engines.base import Failure, LoadReport
from pipeline.messages import Rollout, VersionSpan, WeightsNotice, Work, pack_ids, pack_logprobs
from samplers.base import Problem

LOGPROB = -1.0


class FakeScript(msgspec.Struct, frozen=True):
    """Lengths are uniform in `min_tokens..max_tokens`, cut by the request's own limit."""

    pass_rate: Callable[[Problem], float] = lambda problem: 0.5
    min_tokens: int = 4
    max_tokens: int = 16
    fail_frac: float = 0.0


class _Running(msgspec.Struct):
    work: Work
    length: int
    is_correct: bool
    spans: list[VersionSpan]
    started_ns: int
    num_tokens: int = 0


class FakeEngine:
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
        for attempt_id, request in list(self._running.items()):
            self._advance(request)
            if request.num_tokens == request.length:
                del self._running[attempt_id]
                self._num_rollouts += 1
                ended.append(self._finish(request))
        return ended

    def _admit(self, work: Work) -> Failure | None:
        rng = random.Random(f"{self._seed}/{work.attempt_id}")
        if rng.random() < self._script.fail_frac:
            return Failure(work.attempt_id, "scripted failure", retryable=True)
        length = min(rng.randint(self._script.min_tokens, self._script.max_tokens), work.sampling.max_new_tokens)
        is_correct = rng.random() < self._script.pass_rate(work.problem)
        self._running[work.attempt_id] = _Running(work, length, is_correct, [], time.time_ns())
        return None

    def _advance(self, request: _Running) -> None:
        assert self._version is not None, "load_weights comes before the first step"
        if not request.spans or request.spans[-1].policy_version != self._version:
            request.spans.append(VersionSpan(request.num_tokens, self._version))
        request.num_tokens += 1
        self._num_tokens += 1

    def _finish(self, request: _Running) -> Rollout:
        work, n = request.work, request.num_tokens
        answer = work.problem.answer if request.is_correct else f"1{work.problem.answer}"
        return Rollout(
            attempt_id=work.attempt_id,
            chain_id=work.chain_id,
            round=work.round,
            prompt_ids=pack_ids([1, 2, 3]),
            completion_ids=pack_ids(range(n)),
            engine_logprobs=pack_logprobs([LOGPROB] * n),
            version_spans=tuple(request.spans),
            finish_reason="stop",
            text=f"\\boxed{{{answer}}}",
            engine_id=self.engine_id,
            started_ns=request.started_ns,
            finished_ns=time.time_ns(),
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    def stats(self) -> dict[str, float]:
        return {
            "tokens": self._num_tokens,
            "rollouts": self._num_rollouts,
            "busy_s": 0.0,
            "decode_steps": self._num_steps,
            "slots_used": len(self._running),
        }

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()
