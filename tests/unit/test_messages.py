"""Rollouts that were put together wrongly are refused, whatever sent them."""

import msgspec
import pytest

from pipeline.errors import WireError
from pipeline.messages import ForcedSpan, Rollout, VersionSpan, pack_ids, pack_logprobs


def rollout(*forced: tuple[int, int]) -> Rollout:
    spans = tuple(ForcedSpan(start, end) for start, end in forced)
    ids, logprobs = pack_ids(range(6)), pack_logprobs([-1.0, -1.0, 0.0, 0.0, -1.0, 0.0])
    return Rollout(1, 0, 0, pack_ids([9]), ids, logprobs, (VersionSpan(0, 3),), "stop", "", "e", 1, 2, spans)


def test_forced_spans_say_which_tokens_were_sampled():
    made = rollout((2, 4), (5, 6))
    made.check()
    assert made.sampled_array().tolist() == [True, True, False, False, True, False]
    assert (made.num_tokens, made.num_sampled) == (6, 3)
    prefix = made.as_prefix()
    assert (prefix.completion_ids, prefix.engine_logprobs) == (made.completion_ids, made.engine_logprobs)
    assert (prefix.version_spans, prefix.forced_spans) == (made.version_spans, made.forced_spans)


@pytest.mark.parametrize("forced", [[(2, 2)], [(3, 2)], [(2, 7)], [(4, 5), (1, 2)], [(1, 4), (3, 5)], [(-1, 2)]])
def test_forced_spans_out_of_order_are_refused(forced):
    with pytest.raises(WireError, match="forced spans"):
        rollout(*forced).check()


def test_a_rollout_from_before_forced_spans_is_still_read():
    fields = msgspec.to_builtins(rollout())[:-1]
    assert msgspec.convert(fields, Rollout).forced_spans == ()
