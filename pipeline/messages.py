"""Wire types: what crosses a socket, and nothing else.

All are frozen msgspec Structs encoded as msgpack arrays, so a field may be appended (with a default) but never moved or
removed. Token ids and logprobs cross as packed little-endian bytes, which decode in microseconds at any length.
Rewards cross the wire, not advantages: a recorded run can be replayed under another estimator.
"""

import itertools
import math
import os
from typing import Literal

import msgspec
import numpy as np

from pipeline.errors import WireError
from samplers.base import Problem

PROTOCOL_VERSION = 2

Role = Literal["engine", "evaluator", "verifier", "learner", "gateway"]
Purpose = Literal["train", "eval"]
FinishReason = Literal["stop", "length"]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one rollout is sampled. Training needs the full distribution, so there is no top_p, top_k or min_p here."""

    temperature: float
    max_new_tokens: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens from index `start` of the completion up to the next span were sampled under `policy_version`."""

    start: int
    policy_version: int


class ForcedSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `start` up to, not including, `end` of the completion were put in, not sampled: nothing is learnt of them.

    Their engine logprob is 0, since they were certain.
    """

    start: int
    end: int


class Prefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The completion so far of a rollout that is to be continued, as its `Rollout` had it."""

    completion_ids: bytes
    engine_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    forced_spans: tuple[ForcedSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids) // 4

    @property
    def num_sampled(self) -> int:
        return self.num_tokens - sum(span.end - span.start for span in self.forced_spans)


class Interruption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a long thought: once the completion has `position` tokens, and its text so far does not hold
    `thought_end`, the tokens of `phrase` follow and then at most `answer_tokens` sampled ones.
    """

    position: int
    phrase: str
    thought_end: str
    answer_tokens: int


class Work(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rollout to produce. `attempt_id` is unique over the run and all its restarts.

    `sampling.max_new_tokens` bounds the sampled tokens of the whole completion, those of `prefix` included; forced
    tokens come on top.
    """

    attempt_id: int
    chain_id: int
    round: int
    problem: Problem
    sampling: SamplingParams
    purpose: Purpose = "train"
    prefix: Prefix | None = None
    interruption: Interruption | None = None


def pack_ids(ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_logprobs(logprobs) -> bytes:
    return np.asarray(logprobs, dtype="<f4").tobytes()


class Rollout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One completion with the engine's own logprobs (behaviour policy, after temperature) and version spans.

    `prompt_ids`, `completion_ids`: packed int32, shapes [P] and [T]; `completion_ids` includes the end token when
    `finish_reason` is "stop". `engine_logprobs`: packed float32, shape [T]. Spans are run-length over the completion,
    the first starting at 0; an empty completion has none. `forced_spans`: what was put in by an interruption. `text` is
    for the verifier: empty from the verdict on.
    """

    attempt_id: int
    chain_id: int
    round: int
    prompt_ids: bytes
    completion_ids: bytes
    engine_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str
    engine_id: str
    started_ns: int
    finished_ns: int
    forced_spans: tuple[ForcedSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.completion_ids) // 4

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy chose itself."""
        num_forced = sum([span.end - span.start for span in self.forced_spans]) if self.forced_spans else 0
        return len(self.completion_ids) // 4 - num_forced

    @property
    def oldest_version(self) -> int | None:
        spans = self.version_spans
        return spans[0].policy_version if len(spans) == 1 else min((s.policy_version for s in spans), default=None)

    @property
    def newest_version(self) -> int | None:
        spans = self.version_spans
        return spans[0].policy_version if len(spans) == 1 else max((s.policy_version for s in spans), default=None)

    def prompt_array(self) -> np.ndarray:
        return np.frombuffer(self.prompt_ids, dtype="<i4")

    def completion_array(self) -> np.ndarray:
        return np.frombuffer(self.completion_ids, dtype="<i4")

    def logprob_array(self) -> np.ndarray:
        return np.frombuffer(self.engine_logprobs, dtype="<f4")

    def version_array(self) -> np.ndarray:
        """Policy version of each completion token, int32, shape [T]."""
        out = np.empty(self.num_tokens, dtype=np.int32)
        for span in self.version_spans:
            out[span.start :] = span.policy_version
        return out

    def sampled_array(self) -> np.ndarray:
        """Whether each completion token was sampled, not forced: bool, shape [T]."""
        out = np.ones(self.num_tokens, dtype=bool)
        for span in self.forced_spans:
            out[span.start : span.end] = False
        return out

    def as_prefix(self) -> Prefix:
        return Prefix(self.completion_ids, self.engine_logprobs, self.version_spans, self.forced_spans)

    @property
    def has_usual_form(self) -> bool:
        """Whether `check_form` has nothing to say, as one look tells of most: tokens of one version, none forced."""
        size, spans = len(self.completion_ids), self.version_spans
        is_whole = size == len(self.engine_logprobs) and not size % 4 and not len(self.prompt_ids) % 4
        return is_whole and size > 0 and len(spans) == 1 and spans[0].start == 0 and not self.forced_spans

    def check(self) -> None:
        """Raise WireError unless lengths agree, spans are ordered and every logprob is finite and not above 0."""
        self.check_form()
        if not are_logprobs(self.engine_logprobs):
            raise WireError(f"attempt {self.attempt_id}: an engine logprob is not finite or is above 0", "logprobs")

    def check_form(self) -> None:
        """The same without a look at the logprobs themselves."""
        size = len(self.completion_ids)
        if size % 4 or len(self.prompt_ids) % 4 or len(self.engine_logprobs) != size:
            raise WireError(f"attempt {self.attempt_id}: tokens and logprobs have different lengths", "lengths")
        if not (size and len(self.version_spans) == 1 and self.version_spans[0].start == 0):  # most have one version
            self._check_versions(size // 4)
        if self.forced_spans:
            self._check_forced(size // 4)

    def _check_versions(self, num_tokens: int) -> None:
        starts = [s.start for s in self.version_spans]
        if starts[:1] != ([0] if num_tokens else []) or not _ascend(starts):
            raise WireError(f"attempt {self.attempt_id}: version spans do not cover it in order", "versions")
        if starts and starts[-1] >= num_tokens:
            raise WireError(f"attempt {self.attempt_id}: a version span starts after the last token", "versions")

    def _check_forced(self, num_tokens: int) -> None:
        edges = [edge for span in self.forced_spans for edge in (span.start, span.end)]
        if edges[0] < 0 or not _ascend(edges) or edges[-1] > num_tokens:
            raise WireError(f"attempt {self.attempt_id}: forced spans are not in order within it", "forced")


def are_logprobs(packed: bytes) -> bool:
    """Whether all are finite and at most 0; the tolerance admits fp32 rounding of log-softmax at probability 1."""
    logprobs = np.frombuffer(packed, dtype="<f4")
    # No comparison with NaN is true.
    return not packed or bool(-math.inf < _lowest(logprobs) and _highest(logprobs) <= 1e-4)


_lowest, _highest = np.minimum.reduce, np.maximum.reduce


def _ascend(numbers: list[int]) -> bool:
    """Whether each is larger than the one before."""
    return all(a < b for a, b in itertools.pairwise(numbers))


class Verdict(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A verifier's one answer about one rollout.

    `unknown` (timeout, crash, oversize) is sampled again, never trained on and never counted as a failure.
    """

    outcome: Literal["correct", "incorrect", "unknown"]
    reward: float
    extracted: str = ""
    elapsed_s: float = 0.0
    detail: str = ""

    def check(self) -> None:
        if not math.isfinite(self.reward):
            raise WireError("a verdict's reward is not finite", "reward")


class Judgement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    attempt_id: int
    verdict: Verdict


class VerifyJob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    attempt_id: int
    problem: Problem
    text: str
    truncated: bool


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is trained together: the kept rollouts of one chain, with the rewards of the whole chain.

    `rollouts[i]` was judged `verdicts[i]` and was draw number `draw_indices[i]` of the chain. `chain_rewards` holds
    every judged attempt of the chain in launch order, also those whose rollout aged out, and `round_sizes` how
    they split into rounds, so any baseline can be computed from the group alone.
    """

    chain_id: int
    problem: Problem
    rollouts: tuple[Rollout, ...]
    verdicts: tuple[Verdict, ...]
    draw_indices: tuple[int, ...]
    chain_rewards: tuple[float, ...]
    round_sizes: tuple[int, ...]

    @property
    def num_attempts(self) -> int:
        return len(self.chain_rewards)

    @property
    def reward_sum(self) -> float:
        return math.fsum(self.chain_rewards)


class WeightsNotice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weights of `policy_version` lie at `path`; `checksum` is xxh3_64 (hex) of the file's bytes.

    `canary_logprobs` (packed float32, shape [T-1]) are the learner's logprobs at temperature 1 of
    `canary_ids[1:]` given the tokens before each; an engine that loaded the right bytes reproduces them.
    `model_dir` holds config and tokenizer (no weights). Token ids are below `vocab_size` (0: not known).
    """

    policy_version: int
    path: str
    checksum: str
    num_bytes: int
    model_dir: str
    canary_ids: bytes
    canary_logprobs: bytes
    vocab_size: int = 0


# --- peers to coordinator ---------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="hello"):
    """First message of a peer and its answer to `Identify`.

    `boot_id` is new at every process start; `slots` is how many attempts (or verify jobs) it can hold at once. A peer
    on another machine has pid 0 here, `host` says where it is, and `via` is the boot id of the gateway that speaks for
    it. A gateway's own `host` is the address it listens at. Remote engines of one `store` share what they fetch,
    and pass it on to others at `relay`. One that something starts again when it dies has a number of its own, `place`:
    a Hello of the same place and role says that the one before it is dead.
    """

    role: Role
    name: str
    boot_id: str
    pid: int
    slots: int
    protocol: int = PROTOCOL_VERSION
    host: str = ""
    via: str = ""
    store: str = ""
    relay: str = ""
    place: int = -1


class Rollouts(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="rollouts"):
    rollouts: tuple[Rollout, ...]


class AttemptFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="attempt_failed"):
    """The engine could not run this attempt. Not retryable means the problem itself cannot run (prompt too long)."""

    attempt_id: int
    reason: str
    retryable: bool


class Judgements(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="judgements"):
    judgements: tuple[Judgement, ...]


class WeightsLoaded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="weights_loaded"):
    """An engine serves `policy_version`. `canary_error` is the largest absolute logprob difference.

    `slots` is how many attempts it holds at once, where it knows that better than when it said Hello (0: it does not).
    """

    policy_version: int
    stall_s: float
    canary_error: float
    num_in_flight: int
    slots: int = 0


class WeightsRefused(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="weights_refused"):
    """An engine could not load `policy_version`, twice, and goes on with what it serves, if anything."""

    policy_version: int
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="heartbeat"):
    """Sent from the peer's main loop about once a second; `stats` are gauges for the dashboard.

    `cpu_s`: CPU seconds of the process that makes the message, since it started.
    """

    stats: dict[str, float]
    cpu_s: float = msgspec.field(default_factory=lambda: sum(os.times()[:4]))


class BatchRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="batch_request"):
    """The learner, now at `policy_version`, wants one batch (a credit)."""

    policy_version: int


class StepDone(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="step_done"):
    """One optimizer step finished (or, at start, none yet: `metrics` is empty and `policy_version` is the start).

    `checkpoint` names the directory, not yet complete, where the learner wrote its part of a checkpoint, of a version
    that it has announced before; the coordinator adds its own part and publishes it by rename. `warning` is one line
    when the learner refused to update on this batch or distrusts its logprobs.
    """

    policy_version: int
    weights: WeightsNotice
    metrics: dict[str, float]
    checkpoint: str | None = None
    warning: str = ""


class PeerFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="peer_failed"):
    """The peer cannot go on; `reason` is one line for the user."""

    reason: str


class Leave(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="leave"):
    """The peer that said Hello with `boot_id` takes nothing more and gives back what it holds.

    With the boot id, because a later Hello under the same name may come over another connection, and first.
    """

    boot_id: str


class PeerWarning(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="peer_warning"):
    """One line for the user; nothing has to change for it."""

    text: str


FromEngine = Rollouts | AttemptFailed | WeightsLoaded | WeightsRefused | Heartbeat | PeerFailed | Leave
FromPeer = Hello | FromEngine | Judgements | BatchRequest | StepDone | PeerWarning

# --- coordinator to peers ---------------------------------------------------------------------------------------------


class WorkItems(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="work"):
    items: tuple[Work, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cancel"):
    """Stop these attempts; nothing is sent back for them."""

    attempt_ids: tuple[int, ...]


class NewWeights(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="weights"):
    notice: WeightsNotice


class VerifyJobs(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="verify"):
    jobs: tuple[VerifyJob, ...]


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="batch"):
    """Groups for one optimizer step. `num_attempts` is the number of rollouts launched to obtain them; where a batch
    does not count attempts, without those of chains that were dropped.
    """

    groups: tuple[Group, ...]
    num_attempts: int
    checkpoint: bool


class Identify(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="identify"):
    """The coordinator does not know this peer (it restarted): say Hello again."""


class Stop(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="stop"):
    """Finish and exit 0. A learner first writes its part of a checkpoint if `checkpoint` names a directory."""

    checkpoint: str | None = None


class Save(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="save"):
    """The answer to a BatchRequest when a checkpoint is wanted now: the learner writes its part to that directory."""

    checkpoint: str


class SetLearningRate(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="set_lr"):
    """From the next optimizer step on, `lr` replaces learner.lr."""

    lr: float


class PublishAgain(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="publish_again"):
    """An engine found the weights of `policy_version` damaged. A learner that has newer ones by now ignores it."""

    policy_version: int


ToPeer = WorkItems | Cancel | NewWeights | VerifyJobs | Batch | Identify | Stop | Save | SetLearningRate | PublishAgain
