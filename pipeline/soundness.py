"""What a message from a peer must hold beyond its types: figures that can be added up, tokens that can be trained."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from pipeline.channels import Unreadable
from pipeline.errors import WireError
from pipeline.messages import (
    BatchRequest,
    FromEngine,
    Heartbeat,
    Hello,
    Judgements,
    Leave,
    PeerFailed,
    PeerWarning,
    Role,
    Rollout,
    StepDone,
    WeightsLoaded,
    Work,
    are_logprobs,
)

_MAX_SLOTS = 1 << 16
_MAX_GAUGES = 64
_MAX_NAME = 64  # characters
_MAX_CPU_S = 1e12
_MAX_TEXT = 500  # characters
# A tokenizer may put a token before the first byte of a phrase; every other holds at least one byte of it.
_EXTRA_PHRASE_TOKENS = 8
_highest, _UNSIGNED = np.maximum.reduce, np.dtype("<u4")
_FROM: dict[Role, tuple[type, ...]] = {
    "engine": get_args(FromEngine),
    "evaluator": get_args(FromEngine),
    "verifier": (Judgements, Heartbeat, PeerFailed, Leave),
    "learner": (BatchRequest, StepDone, Heartbeat, PeerFailed, PeerWarning),
    "gateway": (Heartbeat, PeerFailed, PeerWarning),
}


def check(message: Any, sender: Hello | None, newest_version: int) -> None:
    """Raise WireError unless `message` is sound and one that its sender may send; None is one who has yet to say Hello.

    Rollouts are looked into one by one, by `check_rollout`.
    """
    kind = type(message)
    if kind is Unreadable:
        raise WireError(message.reason)
    if kind is Hello:
        check_slots(message.slots)
    elif sender is None or kind not in _FROM[sender.role]:
        who = sender.role if sender is not None else "stranger"
        raise WireError(f"it sent {kind.__name__}, which no {who} sends", "role")
    elif kind is Heartbeat:
        check_heartbeat(message)
    elif kind is WeightsLoaded:
        check_loaded(message, newest_version)


def are_sound(rollouts: Sequence[Rollout], vocab_size: int) -> bool:
    """Whether `check_rollout` has nothing against the arrays of any of them.

    It looks at all logprobs and at all ids together: to look at those of one short rollout is nearly all overhead.
    """
    try:
        for rollout in rollouts:
            if not rollout.has_usual_form:
                rollout.check_form()
    except WireError:
        return False
    ids = [part for r in rollouts for part in (r.prompt_ids, r.completion_ids)] if vocab_size else []
    return are_logprobs(b"".join([r.engine_logprobs for r in rollouts])) and _largest_id(b"".join(ids)) < vocab_size


def check_rollout(
    rollout: Rollout, work: Work, newest_version: int, vocab_size: int, is_seen_into: bool = False
) -> None:
    """Raise WireError unless `rollout` can be what became of `work`.

    `newest_version` is the newest that any engine can have; token ids are below `vocab_size` (0: not known), or the
    learner's embedding has no row for them. `is_seen_into`: `are_sound` has looked at its arrays.
    """
    if not is_seen_into:
        rollout.check()
    if rollout.chain_id != work.chain_id or rollout.round != work.round:
        raise _unsound(rollout, f"it says that it is of chain {rollout.chain_id}, round {rollout.round}", "attempt")
    for span in rollout.version_spans:
        if not 0 <= span.policy_version <= newest_version:
            raise _unsound(rollout, f"it claims weights {span.policy_version}, of {newest_version}", "versions")
    if not rollout.prompt_ids:
        raise _unsound(rollout, "it has no prompt", "lengths")
    if vocab_size and not is_seen_into:
        largest = _largest_id(rollout.prompt_ids + rollout.completion_ids)
        if largest >= vocab_size:
            raise _unsound(rollout, f"token {largest} is not among the model's {vocab_size}", "vocabulary")
    num_tokens = len(rollout.completion_ids) // 4
    if num_tokens > work.sampling.max_new_tokens or rollout.forced_spans or work.prefix is not None:
        _check_extent(rollout, work)


def _largest_id(packed: bytes) -> int:
    """-1 where there is none. Read without a sign, so that one comparison also finds those below 0."""
    return int(_highest(np.frombuffer(packed, dtype=_UNSIGNED))) if packed else -1


def _unsound(rollout: Rollout, words: str, kind: str) -> WireError:
    return WireError(f"attempt {rollout.attempt_id}: {words}", kind)


def _check_extent(rollout: Rollout, work: Work) -> None:
    prefix, due, most = work.prefix, work.interruption, work.sampling.max_new_tokens
    if rollout.num_sampled > most:
        raise _unsound(rollout, f"{rollout.num_sampled} tokens were sampled, and {most} asked for", "lengths")
    if prefix is not None and not (
        rollout.completion_ids.startswith(prefix.completion_ids)
        and rollout.engine_logprobs.startswith(prefix.engine_logprobs)
    ):
        raise _unsound(rollout, "it does not begin with the tokens that it was to go on with", "prefix")
    most_forced = len(due.phrase.encode()) + _EXTRA_PHRASE_TOKENS if due is not None else 0
    most_forced += prefix.num_tokens - prefix.num_sampled if prefix is not None else 0
    if rollout.num_tokens - rollout.num_sampled > most_forced:
        raise _unsound(rollout, "more tokens were forced than an interruption has", "forced")


def check_heartbeat(message: Heartbeat) -> None:
    """Raise WireError unless its figures can be added up and shown."""
    is_time = 0.0 <= message.cpu_s < _MAX_CPU_S
    is_short = len(message.stats) <= _MAX_GAUGES and all(len(name) <= _MAX_NAME for name in message.stats)
    if not (is_time and is_short and all(map(math.isfinite, message.stats.values()))):
        raise WireError("a heartbeat has too many figures, or one out of all bounds", "figures")


def check_loaded(message: WeightsLoaded, newest_version: int) -> None:
    """Raise WireError unless these can be weights that an engine loaded."""
    if not (math.isfinite(message.stall_s) and math.isfinite(message.canary_error)):
        raise WireError(f"weights {message.policy_version}: a figure of their load is not finite", "figures")
    if not 0 <= message.policy_version <= newest_version:
        raise WireError(f"weights {message.policy_version} were loaded, of {newest_version}", "versions")
    check_slots(message.slots)


def check_slots(slots: int) -> None:
    if not 0 <= slots <= _MAX_SLOTS:
        raise WireError(f"{slots} slots are no number of rollouts that one engine runs", "figures")


def one_line(text: str) -> str:
    """As much of what a peer wrote as belongs into a warning: one line, and nothing that steers a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT]).split())
