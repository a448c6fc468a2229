"""The `Engine` seam over an SGLang server: requests over HTTP, weights pushed into it while they run.

One thread and one event loop, which runs only inside the verbs of the seam: what arrives between two calls waits in the
socket. `step` waits a moment for an answer instead of decoding, so the worker's loop reads its own socket as often as
over an engine that decodes.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from pipeline.config import EnginesConfig
from pipeline.engines.base import Failure, LoadReport
from pipeline.engines.requests import Request, open_request, why_impossible
from pipeline.engines.sglang.capabilities import read_load
from pipeline.engines.sglang.connection import Connection
from pipeline.engines.sglang.push import WeightsFile
from pipeline.engines.sglang.server import Server
from pipeline.errors import EngineError, WeightError
from pipeline.messages import Rollout, WeightsNotice, Work
from pipeline.tokenization import PromptCodec

STEP_S = 0.02
OPEN_S = 0.05  # how long one look at a server that starts may take
WATCH_S = 1.0
DEATH_S = 0.5
MAX_ERRORS = 3  # in a row, of single requests: the server is at fault then, not the request
MAX_STARTS = 6  # in a row without a rollout between them
BACKOFF_S = (0.0, 1.0, 5.0, 20.0, 60.0)


class _Running:
    """A request, the task that waits for its answers, and the name of the part of it that the server runs now."""

    def __init__(self, request: Request):
        self.request = request
        self.task: asyncio.Task[None] | None = None
        self.rid = ""


class SGLangEngine:
    """Raises a retryable EngineError when its server is lost, and starts it again, with a growing pause."""

    def __init__(
        self, config: EnginesConfig, codec: PromptCodec, server: Server, engine_id: str, num_spare_gpus: int = 0
    ):
        self.slots = config.slots
        self._config = config
        self._codec = codec
        self._engine_id = engine_id
        self._loop = asyncio.new_event_loop()
        self._connection = Connection(server, config, num_spare_gpus)
        self._opening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_at = 0.0
        self._starts = 0
        self._errors = 0
        self._trouble = ""
        self._crash: BaseException | None = None
        self._policy_version: int | None = None
        self._layout: dict[str, Any] | None = None
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._ended: list[Rollout | Failure] = []
        self._ids: set[int] = set()
        self._news = asyncio.Event()
        self._may_send = asyncio.Event()  # not while weights change: what is sent then may start under either
        self._last_end = time.monotonic()
        self._totals = {"tokens": 0.0, "rollouts": 0.0}
        self._gauges: dict[str, float] = {}

    # --- the server ---

    @property
    def ready(self) -> bool:
        """See `Engine.ready`; each look takes the start of the server a little further.

        Raises EngineError, not retryable, when it cannot be started.
        """
        if self._connection.is_open:
            return True
        if self._opening is None:
            if time.monotonic() < self._retry_at:
                return False
            self._opening = self._loop.create_task(self._connection.open())
        self._loop.run_until_complete(asyncio.wait({self._opening}, timeout=OPEN_S))
        if not self._opening.done():
            return False
        opening, self._opening = self._opening, None
        try:
            opening.result()
        except EngineError as e:
            if not e.retryable:
                raise
            self._shut()
            self._back_off(e.message)
            return False
        capabilities = self._connection.capabilities
        self.slots = max(1, min(self._config.slots, capabilities.slots - 1))  # the canary takes the last one
        self._start_task(self._watch())
        return True

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task whose failure ends the worker, like one anywhere else, instead of being forgotten with it."""

        def check(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._crash = error

        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(check)
        return task

    def _shut(self) -> None:
        """Let go of the server and of every attempt."""
        tasks = [*self._tasks, *([self._opening] if self._opening is not None else [])]
        self._opening = None
        self._waiting.clear()
        self._running.clear()
        self._ids.clear()
        self._ended.clear()
        self._trouble, self._errors, self._policy_version = "", 0, None
        self._may_send.clear()
        self._loop.run_until_complete(self._end(tasks))

    async def _end(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._connection.shut()

    def _lose(self, reason: str) -> NoReturn:
        # Connections break a moment before a dead process can be seen to be dead, which says more.
        reason = self._connection.why_dead(DEATH_S) or reason
        self._shut()
        self._back_off(reason)
        raise EngineError(f"{reason}; it is started again")

    def _back_off(self, reason: str) -> None:
        self._starts += 1
        if self._starts >= MAX_STARTS:
            raise EngineError(f"{self._starts} starts in a row of the SGLang server failed: {reason}", retryable=False)
        self._retry_at = time.monotonic() + BACKOFF_S[min(self._starts - 1, len(BACKOFF_S) - 1)]

    async def _watch(self) -> None:
        """Read the gauges, and ask a server that runs requests but ends none whether it still generates."""
        while True:
            await asyncio.sleep(WATCH_S)
            version = self._policy_version
            try:
                load = await self._connection.client.get(self._connection.capabilities.load_path, self._config.hang_s)
                self._gauges = read_load(load)
                if self._running and time.monotonic() - self._last_end > self._config.hang_s / 2:
                    await self._connection.client.get("/health_generate", self._config.hang_s)
            except EngineError as e:
                if version == self._policy_version:  # else it was paused for new weights meanwhile
                    self._trouble = e.message

    # --- weights ---

    def load_weights(self, notice: WeightsNotice) -> LoadReport:
        """See `Engine.load_weights`. A wrong canary ends every attempt in flight: they may have used the weights."""
        ids = np.frombuffer(notice.canary_ids, dtype="<i4").tolist()
        expected = np.frombuffer(notice.canary_logprobs, dtype="<f4").tolist()
        if not len(ids) - 1 == len(expected) > 0:
            raise WeightError(f"weights {notice.policy_version}: the canary needs one logprob a token after the first")
        weights = WeightsFile.open(notice)
        self._check_layout(weights)
        while not self.ready:
            time.sleep(max(0.0, self._retry_at - time.monotonic()))
        self._may_send.clear()
        try:
            report = self._loop.run_until_complete(self._connection.update(weights, ids, expected))
            if not report.is_right:
                self._fail_all(f"weights {notice.policy_version} arrived wrong")
                self._loop.run_until_complete(self._connection.distrust())
        except EngineError as e:
            self._lose(e.message)
        self._policy_version = notice.policy_version
        if report.is_right:
            self._layout = weights.layout
            self._may_send.set()
        return report

    def _check_layout(self, weights: WeightsFile) -> None:
        """The server would notice a tensor that does not fit only after it has replaced others."""
        if self._layout is None or weights.layout == self._layout:
            return
        odd = {name for name, _ in weights.layout.items() ^ self._layout.items()}
        raise WeightError(
            f"weights {weights.notice.policy_version}: tensor {min(odd)} and {len(odd) - 1} others are not as in the "
            "weights served so far; publish the weights of the same model"
        )

    def _fail_all(self, reason: str) -> None:
        requests = [running.request for running in self._running.values()] + list(self._waiting)
        ids = [request.work.attempt_id for request in requests]
        ids += [ended.attempt_id for ended in self._ended if isinstance(ended, Rollout)]
        self._running.clear()
        self._waiting.clear()
        failed: list[Rollout | Failure] = [Failure(attempt_id, reason, retryable=True) for attempt_id in ids]
        self._ended = [ended for ended in self._ended if isinstance(ended, Failure)] + failed

    # --- attempts ---

    def submit(self, work: Sequence[Work]) -> None:
        assert self._policy_version is not None, "weights are loaded before work is submitted"
        most = self._connection.capabilities.max_tokens
        for item in work:
            if item.attempt_id in self._ids:
                continue
            self._ids.add(item.attempt_id)
            request = open_request(item, self._codec)
            if reason := why_impossible(request, most, f"the server's {most}"):
                self._ended.append(Failure(item.attempt_id, reason, retryable=False))
            else:
                self._waiting.append(request)
        self._fill()

    def _fill(self) -> None:
        """Requests for every free slot, at once."""
        while self._waiting and len(self._running) < self.slots:
            running = _Running(self._waiting.popleft())
            running.request.start()
            running.task = self._start_task(self._run(running))
            self._running[running.request.work.attempt_id] = running

    async def _run(self, running: _Running) -> None:
        attempt_id = running.request.work.attempt_id
        try:
            ended = await self._sample(running)
            self._errors = 0
        except EngineError as e:
            self._errors += 1
            if self._errors >= MAX_ERRORS:
                self._trouble = e.message
            ended = Failure(attempt_id, e.message, retryable=e.retryable)
        if ended is None or self._running.get(attempt_id) is not running:
            return
        del self._running[attempt_id]
        self._ended.append(ended)
        self._last_end = time.monotonic()
        self._fill()
        self._news.set()

    async def _sample(self, running: _Running) -> Rollout | Failure | None:
        """The whole completion: in one call of the server, or in several where it is interrupted or was aborted there.

        None when the request is nobody's any more: cancelled, or failed with the weights.
        """
        request, eos_ids = running.request, self._codec.eos_ids
        while True:
            await self._may_send.wait()
            if self._running.get(request.work.attempt_id) is not running:
                return None
            sent_under = self._policy_version
            assert sent_under is not None
            running.rid = f"{self._engine_id}-{uuid.uuid4().hex}"
            body = self._body(request, running.rid) | self._connection.cache_key(f"v{sent_under}")
            reply = await self._connection.client.post("/generate", body, None)
            if self._running.get(request.work.attempt_id) is not running:
                return None
            if problem := self._read(request, sent_under, reply["meta_info"]):
                return Failure(request.work.attempt_id, problem, retryable=True)
            reason = request.finish_reason(eos_ids)
            due = request.due_interruption() if reason is None else None
            if due is not None and due.thought_end not in self._codec.decode(request.completion_ids):
                request.interrupt(due.answer_tokens)
                for token in request.phrase_ids:
                    request.extend([token], [0.0], self._policy_version or sent_under)
                reason = request.finish_reason(eos_ids)
            if reason is not None:
                self._totals["rollouts"] += 1
                self._starts = 0
                return request.rollout(reason, self._codec.decode(request.completion_ids), self._engine_id)

    def _body(self, request: Request, rid: str) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": request.work.sampling.temperature,
            "max_new_tokens": request.num_until_look,
        }
        # What ends a completion is the codec's to say, not the server's.
        sampling |= {"stop_token_ids": sorted(eos)} if (eos := self._codec.eos_ids) else {"ignore_eos": True}
        return {"input_ids": request.context_ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}

    def _read(self, request: Request, sent_under: int, meta: dict[str, Any]) -> str:
        """Take the tokens of an answer to a call made under version `sent_under`; says why none of them can be used."""
        tokens = meta["output_token_logprobs"]
        if not tokens:
            return f"the server ended it with {meta['finish_reason']} and no token"
        # Servers before 0.5.19 do not say which token had which version: count all as the oldest they can be.
        spans = meta.get("weight_versions") or [{"version": sent_under, "start": 0}]
        if not all(str(span["version"]).isdecimal() for span in spans):
            self._trouble = (
                f"the server serves weights {spans[-1]['version']!r}, which nobody gave it: was it restarted?"
            )
            return self._trouble
        if int(spans[0]["version"]) != sent_under and meta.get("cached_tokens"):
            # Sent just before an update, started after it: its prompt may be cached from the weights before.
            return "its prompt was cached under older weights"
        ends = [span["start"] for span in spans[1:]] + [len(tokens)]
        for span, end in zip(spans, ends, strict=True):
            logprobs, ids = [], []
            for logprob, token, *_ in tokens[span["start"] : end]:
                logprobs.append(math.nan if logprob is None else logprob)
                ids.append(token)
            request.extend(ids, logprobs, int(span["version"]))
        self._totals["tokens"] += len(tokens)
        return ""

    def cancel(self, attempt_ids: Sequence[int]) -> None:
        gone = self._ids.intersection(attempt_ids)
        self._ids -= gone
        self._ended = [e for e in self._ended if e.attempt_id not in gone]
        self._waiting = deque(r for r in self._waiting if r.work.attempt_id not in gone)
        for attempt_id in gone & self._running.keys():
            self._start_task(self._abort(self._running.pop(attempt_id)))
        self._fill()

    async def _abort(self, running: _Running) -> None:
        """End a request at the server too; again if this overtook the request on another connection."""
        assert running.task is not None
        if not running.rid:  # not sent yet, and it will not be
            return
        while not running.task.done():
            with contextlib.suppress(EngineError):  # a server in trouble is noticed by `_watch`
                await self._connection.client.post("/abort_request", {"rid": running.rid}, self._config.hang_s)
            await asyncio.wait({running.task}, timeout=WATCH_S)

    def step(self) -> list[Rollout | Failure]:
        """Wait up to `STEP_S` for an answer; return what ended. Raises EngineError when the server is lost."""
        if self._policy_version is None:
            return []
        self._loop.run_until_complete(self._wait_for_news())
        if self._crash is not None:
            raise self._crash
        ended: list[Rollout | Failure] = self._ended
        self._ended = []
        # A request may fail a moment before the server that died under it can be seen to be dead.
        has_failed = any(isinstance(e, Failure) and e.retryable for e in ended)
        trouble = self._connection.why_dead(DEATH_S if has_failed else 0.0) or self._trouble
        if trouble:
            ended = [e for e in ended if isinstance(e, Rollout)]  # the rest is lost with the server
            if not ended:
                self._lose(trouble)
        self._ids.difference_update(e.attempt_id for e in ended)
        return ended

    async def _wait_for_news(self) -> None:
        self._news.clear()
        if self._running and not self._ended:
            task = asyncio.ensure_future(self._news.wait())
            await asyncio.wait({task}, timeout=STEP_S)
            task.cancel()
        else:
            await asyncio.sleep(0)

    @property
    def num_in_flight(self) -> int:
        return len(self._ids)

    def stats(self) -> dict[str, float]:
        """Of ours and, with `server_` and `cache_`, of the server's scheduler; `update_…` are sums over all updates."""
        phases = msgspec.structs.asdict(self._connection.phases)
        seconds = {f"update_{name}": float(value) for name, value in phases.items()}
        slots = {"slots_used": float(len(self._running))}
        return slots | self._gauges | self._totals | seconds

    def close(self) -> None:
        if not self._loop.is_closed():
            self._shut()
            self._loop.close()
