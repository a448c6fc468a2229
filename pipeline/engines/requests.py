"""The record of one attempt while an engine samples it."""

import time
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from pipeline.messages import (
    FinishReason,
    ForcedSpan,
    Interruption,
    Rollout,
    VersionSpan,
    Work,
    pack_ids,
    pack_logprobs,
)
from pipeline.tokenization import PromptCodec


def open_request(work: Work, codec: PromptCodec) -> "Request":
    phrase = codec.encode_phrase(work.interruption.phrase) if work.interruption is not None else ()
    return Request(work, codec.encode(work.problem.prompt), phrase)


def why_impossible(request: "Request", max_tokens: int, whose: str) -> str:
    """Why an engine with room for `max_tokens`, prompt included, can never run this; empty if it can. `whose` names
    that room: "the model's 64 positions".
    """
    problem, num_prompt = request.work.problem.problem_id, len(request.prompt_ids)
    if not num_prompt:
        return f"problem {problem}: its prompt has no tokens"
    if request.max_tokens > max_tokens:
        new = request.max_tokens - num_prompt
        return f"problem {problem}: {num_prompt} prompt tokens and {new} new ones exceed {whose}"
    return ""


class Request:
    """Grows by one token at a time, from the work's prefix if it has one, and becomes a `Rollout`.

    `phrase_ids` are the tokens of the work's interruption, if it has one.
    """

    __slots__ = (
        "_due",
        "_forced",
        "_free_from",
        "_ids",
        "_limit",
        "_logprobs",
        "_num_forced",
        "_pending",
        "_spans",
        "_started_ns",
        "phrase_ids",
        "prompt_ids",
        "work",
    )

    def __init__(self, work: Work, prompt_ids: list[int], phrase_ids: Sequence[int] = ()):
        self.work = work
        self.prompt_ids = prompt_ids
        self.phrase_ids = phrase_ids
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._forced: list[ForcedSpan] = []
        if work.prefix is not None:
            self._ids = np.frombuffer(work.prefix.completion_ids, dtype="<i4").tolist()
            self._logprobs = np.frombuffer(work.prefix.engine_logprobs, dtype="<f4").tolist()
            self._spans = list(work.prefix.version_spans)
            self._forced = list(work.prefix.forced_spans)
        self._num_forced = sum(span.end - span.start for span in self._forced)
        self._free_from = self._forced[-1].end if self._forced else 0  # no forced token from here on
        self._limit = work.sampling.max_new_tokens  # of sampled tokens
        self._due = None if self._forced else work.interruption
        self._pending: deque[int] = deque()  # forced tokens still to come
        self._started_ns = 0
        assert self.num_sampled < self._limit, f"attempt {work.attempt_id}: its prefix leaves nothing to sample"

    @property
    def max_tokens(self) -> int:
        """Most tokens that prompt and completion can come to."""
        limit = self.work.sampling.max_new_tokens
        return len(self.prompt_ids) + limit + self._num_forced + len(self.phrase_ids)

    @property
    def context_ids(self) -> list[int]:
        """What the policy has read when it samples the next token."""
        return self.prompt_ids + self._ids

    @property
    def last_token(self) -> int:
        """The token that the next forward pass reads."""
        return self._ids[-1] if self._ids else self.prompt_ids[-1]

    @property
    def completion_ids(self) -> list[int]:
        return self._ids

    @property
    def num_sampled(self) -> int:
        return len(self._ids) - self._num_forced

    @property
    def num_until_look(self) -> int:
        """Tokens that may be sampled, none of them an end token, before the next can only be chosen with what
        `finish_reason` and `due_interruption` say; at least 1.
        """
        if self._pending:
            return 1
        left = self._limit - self.num_sampled
        return left if self._due is None else min(left, max(1, self._due.position - len(self._ids)))

    def start(self) -> None:
        self._started_ns = time.time_ns()

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], policy_version: int) -> None:
        """Take the next tokens that one version sampled; while forced ones are to come, one at a time, as each of them
        takes the place of one.
        """
        if not self._spans or self._spans[-1].policy_version != policy_version:
            self._spans.append(VersionSpan(len(self._ids), policy_version))
        if self._pending:
            assert len(ids) == 1, f"attempt {self.work.attempt_id}: {len(ids)} tokens in the place of a forced one"
            ids, logprobs = (self._pending.popleft(),), (0.0,)
            self._num_forced += 1
        self._ids += ids
        self._logprobs += logprobs

    def finish_reason(self, eos_ids: Collection[int]) -> FinishReason | None:
        """Why the completion is over, or None while it is not."""
        if len(self._ids) <= self._free_from:
            return None  # the phrase may hold an end token, and an answer is still to come
        if self._ids[-1] in eos_ids:
            return "stop"
        return "length" if self.num_sampled >= self._limit else None

    def due_interruption(self) -> Interruption | None:
        """The interruption whose turn has come, once; the caller reads the text and calls `interrupt` or does not."""
        if self._due is None or len(self._ids) < self._due.position:
            return None
        due, self._due = self._due, None
        return due

    def interrupt(self, answer_tokens: int) -> None:
        """Let the phrase follow, and then at most `answer_tokens` sampled ones."""
        start = len(self._ids)
        self._pending.extend(self.phrase_ids)
        self._free_from = start + len(self.phrase_ids)
        self._forced.append(ForcedSpan(start, self._free_from))
        self._limit = min(self._limit, self.num_sampled + answer_tokens)

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
            forced_spans=tuple(self._forced),
        )
