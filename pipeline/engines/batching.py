"""Continuous batching over any decoder: admission, sampling, version spans, endings."""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.base import Failure, LoadReport
from pipeline.engines.requests import Request, open_request, why_impossible
from pipeline.engines.unread import UnreadTokens
from pipeline.errors import WeightError
from pipeline.messages import FinishReason, Rollout, WeightsNotice, Work
from pipeline.tokenization import PromptCodec


class Decoder(Protocol):
    """A model with a KV cache of contiguous rows, one row a running request; knows nothing of attempts.

    `max_tokens` is the longest prompt and completion together. `min_admit` is how many free slots make admitting
    worth it, for a decoder whose cost grows with the number of admissions.
    """

    device: torch.device
    max_tokens: int
    min_admit: int

    def load(self, notice: WeightsNotice) -> None:
        """Serve these weights from the next call on, keeping all rows; WeightError (and no change) if they are not what
        was announced, or misfit.
        """
        ...

    def score(self, ids: Tensor) -> Tensor:
        """Teacher-forced logprobs at temperature 1: `ids` int64 [T] to float32 [T-1]. Leaves the rows alone."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> None:
        """Append a row for each prompt (not empty; with what a continued completion has), up to `max_tokens` long."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Read one token a row (the last one admitted for a new row): int64 [rows] to float32 logits [rows, vocab]."""
        ...

    def retire(self, rows: Collection[int]) -> list[int]:
        """Drop rows; entry i of the answer is the old index of what is row i now."""
        ...


class BatchingEngine:
    """The `Engine` seam over a `Decoder`, in one thread. The same seed and calls give the same rollouts."""

    ready = True

    def __init__(self, decoder: Decoder, codec: PromptCodec, slots: int, seed: int, engine_id: str):
        self.slots = slots
        self._decoder = decoder
        self._codec = codec
        self._engine_id = engine_id
        self._generator = torch.Generator(device=decoder.device).manual_seed(seed)
        self._policy_version: int | None = None
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._unread = UnreadTokens(codec.eos_ids)
        self._ids: set[int] = set()
        self._failures: list[Failure] = []
        self._temperatures = torch.ones(0, 1)
        self._stats = {"tokens": 0.0, "rollouts": 0.0, "decode_steps": 0.0}

    def submit(self, work: Sequence[Work]) -> None:
        """Queue attempts; one that is already here is ignored, since a coordinator re-sends after a reconnect."""
        assert self._policy_version is not None, "weights are loaded before work is submitted"
        most = self._decoder.max_tokens
        for item in work:
            if item.attempt_id in self._ids:
                continue
            self._ids.add(item.attempt_id)
            request = open_request(item, self._codec)
            if reason := why_impossible(request, most, f"the model's {most} positions"):
                self._failures.append(Failure(item.attempt_id, reason, retryable=False))
            else:
                self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, attempt_ids: Sequence[int]) -> None:
        gone = self._ids.intersection(attempt_ids)
        if not gone:
            return
        self._ids -= gone
        self._failures = [f for f in self._failures if f.attempt_id not in gone]
        self._waiting = deque(r for r in self._waiting if r.work.attempt_id not in gone)
        self._retire({i for i, r in enumerate(self._running) if r.work.attempt_id in gone})

    @torch.inference_mode()
    def load_weights(self, notice: WeightsNotice) -> LoadReport:
        start = time.perf_counter()
        ids = torch.from_numpy(np.frombuffer(notice.canary_ids, dtype="<i4").astype(np.int64))
        expected = torch.from_numpy(np.frombuffer(notice.canary_logprobs, dtype="<f4").copy())
        if not len(ids) - 1 == len(expected) > 0:
            raise WeightError(f"weights {notice.policy_version}: the canary needs one logprob a token after the first")
        for row in range(len(self._running)):
            self._read(row)
        self._decoder.load(notice)
        self._policy_version = notice.policy_version
        loaded = time.perf_counter()
        difference = (self._decoder.score(ids.to(self._decoder.device)).cpu() - expected).abs()
        # A logprob that is not a number would pass every "error > tolerance" test.
        error = float(difference.nan_to_num(nan=math.inf).max())
        now = time.perf_counter()
        return LoadReport(notice.policy_version, now - start, error, canary_s=now - loaded)

    @torch.inference_mode()
    def step(self) -> list[Rollout | Failure]:
        """See `Engine.step`. Slots freed by one call are filled by the next before it decodes: none idles a step."""
        ended: list[Rollout | Failure] = list(self._failures)
        self._ids.difference_update(f.attempt_id for f in self._failures)
        self._failures = []
        if not self.num_in_flight:
            return ended
        self._admit()
        rows = self._decode()
        for row, reason in rows.items():
            request = self._running[row]
            self._ids.discard(request.work.attempt_id)
            text = self._codec.decode(request.completion_ids)
            ended.append(request.rollout(reason, text, self._engine_id))
        self._retire(rows.keys())
        self._stats["rollouts"] += len(rows)
        return ended

    def _admit(self) -> None:
        free = self.slots - len(self._running)
        if not self._waiting or (self._running and free < self._decoder.min_admit):
            return
        new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not new:
            return
        self._decoder.admit([r.context_ids for r in new], [r.max_tokens for r in new])
        for request in new:
            request.start()
        self._running += new
        self._unread.admit(new)
        self._set_temperatures()

    def _decode(self) -> dict[int, FinishReason]:
        """One token for every row; the rows that ended, with their reason."""
        tokens = torch.from_numpy(self._unread.last).to(self._decoder.device)
        ids, logprobs = sample(self._decoder.decode(tokens), self._temperatures, self._generator)
        self._stats["decode_steps"] += 1
        self._stats["tokens"] += len(self._running)
        ended: dict[int, FinishReason] = {}
        for row in self._unread.add(ids.cpu().numpy(), logprobs.cpu().numpy()):
            request = self._read(row)
            if reason := request.finish_reason(self._codec.eos_ids):
                ended[row] = reason
            elif (due := request.due_interruption()) and due.thought_end not in self._codec.decode(
                request.completion_ids
            ):
                request.interrupt(due.answer_tokens)
            self._unread.looked(row, request)
        return ended

    def _read(self, row: int) -> Request:
        assert self._policy_version is not None, "weights are loaded before anything is sampled"
        self._unread.read(row, self._running[row], self._policy_version)
        return self._running[row]

    def _retire(self, rows: Collection[int]) -> None:
        if rows:
            order = self._decoder.retire(rows)
            self._running = [self._running[i] for i in order]
            self._unread.keep(order)
            self._set_temperatures()

    def _set_temperatures(self) -> None:
        values = [[r.work.sampling.temperature] for r in self._running]
        self._temperatures = torch.tensor(values, device=self._decoder.device)

    @property
    def num_in_flight(self) -> int:
        return len(self._ids)

    def stats(self) -> dict[str, float]:
        return {**self._stats, "slots_used": float(len(self._running))}

    def close(self) -> None:
        self.cancel(list(self._ids))


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / T) by the Gumbel-max trick; the logprobs are of that same full distribution.

    `logits` [rows, vocab], `temperatures` [rows, 1]; the answers are int64 and float32 [rows]. argmax(logp - log E)
    with E ~ Exp(1) is an exact draw, since -log E is Gumbel (Maddison, Tarlow and Minka 2014, arXiv:1411.0030).
    """
    logprobs = torch.log_softmax(logits.float() / temperatures, dim=-1)
    noise = torch.empty_like(logprobs).exponential_(generator=generator).log_()
    ids = (logprobs - noise).argmax(dim=-1, keepdim=True)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)
