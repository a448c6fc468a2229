"""The record of one attempt while an engine samples it."""

import time
from collections.abc import Collection

from pipeline.messages import FinishReason, Rollout, VersionSpan, Work, pack_ids, pack_logprobs


class Request:
    """Grows by one token at a time and becomes a `Rollout`."""

    __slots__ = ("_ids", "_logprobs", "_spans", "_started_ns", "prompt_ids", "work")

    def __init__(self, work: Work, prompt_ids: list[int]):
        self.work = work
        self.prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._started_ns = 0

    @property
    def max_tokens(self) -> int:
        """Most tokens that prompt and completion can come to."""
        return len(self.prompt_ids) + self.work.sampling.max_new_tokens

    @property
    def last_token(self) -> int:
        """The token that the next forward pass reads."""
        return self._ids[-1] if self._ids else self.prompt_ids[-1]

    def start(self) -> None:
        self._started_ns = time.time_ns()

    def append(self, token: int, logprob: float, policy_version: int) -> None:
        if not self._spans or self._spans[-1].policy_version != policy_version:
            self._spans.append(VersionSpan(len(self._ids), policy_version))
        self._ids.append(token)
        self._logprobs.append(logprob)

    def finish_reason(self, eos_ids: Collection[int]) -> FinishReason | None:
        """Why the completion is over, or None while it is not."""
        if self._ids[-1] in eos_ids:
            return "stop"
        return "length" if len(self._ids) >= self.work.sampling.max_new_tokens else None

    @property
    def completion_ids(self) -> list[int]:
        return self._ids

    def rollout(self, finish_reason: FinishReason, text: str, engine_id: str) -> Rollout:
        return Rollout(
            attempt_id=self.work.attempt_id,
            chain_id=self.work.chain_id,
            round=self.work.round,
            prompt_ids=pack_ids(self.prompt_ids),
            completion_ids=pack_ids(self._ids),
            engine_logprobs=pack_logprobs(self._logprobs),
            version_spans=tuple(self._spans),
            finish_reason=finish_reason,
            text=text,
            engine_id=engine_id,
            started_ns=self._started_ns,
            finished_ns=time.time_ns(),
        )
