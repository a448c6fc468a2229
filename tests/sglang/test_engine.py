"""The contract of an engine, on the real server."""

import numpy as np
import pytest
from sglang_bench import MAX_POSITIONS, own_logprobs
from tiny_models import publish, teacher_forced, tiny_model, work

from pipeline.engines.base import Failure
from pipeline.errors import WeightError
from pipeline.messages import Interruption
from pipeline.tokenization import PromptCodec

# One process of pytest-xdist for all tests of the real server; it starts within half a minute on a quiet machine.
pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("push", ["auto", "disk"])
def test_rollouts_are_valid_and_their_logprobs_the_models_own(attach, push):
    bench = attach(push=push)
    bench.load(0)
    prompts = ["a", "bcdefg", "bcdefg", "hij", "\\boxed{k", "lmnoabcdefghi", "a"]
    bench.engine.submit([work(i, p, temperature=0.6 if i % 2 else 1.0) for i, p in enumerate(prompts * 3)])
    ended = bench.step_until(21)
    assert sorted(r.attempt_id for r in ended) == list(range(21))
    for rollout in ended:
        rollout.check()
        assert (rollout.num_tokens, rollout.finish_reason) == (12, "length")
        temperature = 0.6 if rollout.attempt_id % 2 else 1.0
        expected = own_logprobs(tiny_model("qwen2", 0), rollout, temperature)
        np.testing.assert_allclose(rollout.logprob_array(), expected, atol=1e-4)


def test_recompute_reads_what_there_is_under_the_new_weights(attach):
    bench = attach(kv="recompute")
    bench.load(0)
    bench.engine.submit([work(i, "abcdefghij", max_new_tokens=300) for i in range(8)])
    for _ in range(5):
        assert bench.engine.step() == []
    bench.load(1)
    ended = bench.step_until(8)
    assert any(len(r.version_spans) == 2 for r in ended)  # the others were still on their way to the server
    for rollout in ended:
        is_new = rollout.version_array() == 1
        for version, tokens in ((0, ~is_new), (1, is_new)):
            expected = own_logprobs(tiny_model("qwen2", version), rollout)
            np.testing.assert_allclose(rollout.logprob_array()[tokens], expected[tokens], atol=1e-4)


def test_wrong_and_misfitting_weights_never_serve(attach):
    bench = attach()
    bench.load(0)
    with pytest.raises(WeightError, match="tensor"):
        bench.engine.load_weights(publish(bench.publisher, tiny_model("qwen3", 1), 1, bench.model_dir))
    bench.engine.submit([work(i, "ab", max_new_tokens=300) for i in range(4)])
    canary = list(range(3, 19))
    honest = teacher_forced(tiny_model("qwen2", 2), canary)
    wrong = bench.publisher.publish(tiny_model("qwen2", 3).state_dict(), 2, bench.model_dir, canary, honest)
    report = bench.engine.load_weights(wrong)
    assert report.canary_error > 0.1
    bench.load(2)
    ended = []
    while bench.engine.num_in_flight:
        ended += bench.engine.step()
    assert all(isinstance(e, Failure) and e.retryable for e in ended)
    bench.engine.submit([work(9, "ab")])
    (rollout,) = bench.step_until(1)
    np.testing.assert_allclose(rollout.logprob_array(), own_logprobs(tiny_model("qwen2", 2), rollout), atol=1e-4)


def test_continued_interrupted_and_too_long(attach):
    bench = attach()
    bench.load(0)
    bench.engine.submit([work(i, "abc", max_new_tokens=6) for i in range(3)])
    cut = bench.step_until(3)
    bench.load(1)
    interruption = Interruption(position=9, phrase="abcabc", thought_end="never", answer_tokens=5)
    bench.engine.submit(
        [work(10 + i, "abc", 40, prefix=r.as_prefix(), interruption=interruption) for i, r in enumerate(cut)]
    )
    codec = PromptCodec(bench.model_dir)
    for rollout in bench.step_until(3):
        before = cut[rollout.attempt_id - 10]
        rollout.check()
        assert rollout.completion_ids.startswith(before.completion_ids)
        assert rollout.engine_logprobs.startswith(before.engine_logprobs)
        assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0), (6, 1)]
        assert [(s.start, s.end) for s in rollout.forced_spans] == [(9, 15)]
        assert rollout.completion_array()[9:15].tolist() == codec.encode_phrase("abcabc")
        assert rollout.num_tokens == 20
        new = rollout.sampled_array() & (rollout.version_array() == 1)
        expected = own_logprobs(tiny_model("qwen2", 1), rollout)
        np.testing.assert_allclose(rollout.logprob_array()[new], expected[new], atol=1e-4)
    bench.engine.submit([work(20, "a", max_new_tokens=MAX_POSITIONS)])
    (failure,) = bench.engine.step()
    assert isinstance(failure, Failure) and not failure.retryable


def test_cancelled_requests_are_gone_from_the_server(attach):
    bench = attach()
    bench.load(0)
    bench.engine.submit([work(i, "ab", max_new_tokens=480) for i in range(16)])
    for _ in range(3):
        assert bench.engine.step() == []
    bench.engine.cancel(range(16))
    assert bench.engine.num_in_flight == 0
    # All slots are free at once: else these would wait until 480 tokens of the others are done.
    bench.engine.submit([work(100 + i, "ab", max_new_tokens=4) for i in range(16)])
    assert sorted(r.attempt_id for r in bench.step_until(16)) == list(range(100, 116))
