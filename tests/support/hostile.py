"""What a worker could send instead of a rollout: each with the word under which it is refused."""

import math
from collections.abc import Callable

from msgspec.structs import replace

from pipeline.messages import ForcedSpan, Rollout, VersionSpan, pack_ids, pack_logprobs


def _with_logprob(value: float) -> Callable[[Rollout], Rollout]:
    def spoil(r: Rollout) -> Rollout:
        return replace(r, engine_logprobs=pack_logprobs([value, *r.logprob_array()[1:]]))

    return spoil


def _with_token(token: int) -> Callable[[Rollout], Rollout]:
    return lambda r: replace(r, completion_ids=pack_ids([*r.completion_array()[:-1], token]))


def _with_spans(*spans: tuple[int, int]) -> Callable[[Rollout], Rollout]:
    return lambda r: replace(r, version_spans=tuple(VersionSpan(*span) for span in spans))


def _longer(r: Rollout, num_tokens: int) -> Rollout:
    ids, logprobs = pack_ids([1] * num_tokens), pack_logprobs([-1.0] * num_tokens)
    return replace(r, completion_ids=ids, engine_logprobs=logprobs)


SPOILS: list[tuple[str, Callable[[Rollout], Rollout]]] = [
    ("logprobs", _with_logprob(math.nan)),
    ("logprobs", _with_logprob(-math.inf)),
    ("logprobs", _with_logprob(0.5)),
    ("lengths", lambda r: replace(r, engine_logprobs=r.engine_logprobs[:-4])),
    ("lengths", lambda r: replace(r, completion_ids=r.completion_ids[:-1])),
    ("lengths", lambda r: replace(r, prompt_ids=r.prompt_ids[:-3])),
    ("lengths", lambda r: replace(r, prompt_ids=b"")),
    ("lengths", lambda r: _longer(r, 5000)),
    ("vocabulary", _with_token(1 << 30)),
    ("vocabulary", _with_token(-1)),
    ("vocabulary", lambda r: replace(r, prompt_ids=pack_ids([1, 1 << 20]))),
    ("versions", _with_spans()),
    ("versions", _with_spans((1, 0))),
    ("versions", _with_spans((0, 0), (0, 0))),
    ("versions", _with_spans((0, 0), (1 << 40, 0))),
    ("versions", _with_spans((0, 1 << 40))),
    ("versions", _with_spans((0, -1))),
    ("forced", lambda r: replace(r, forced_spans=(ForcedSpan(0, 1),))),
    ("forced", lambda r: replace(r, forced_spans=(ForcedSpan(-1, 1 << 60),))),
    ("attempt", lambda r: replace(r, chain_id=r.chain_id + 1)),
    ("attempt", lambda r: replace(r, round=-1)),
]
