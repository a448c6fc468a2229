"""The second half of the `Engine` contract: completions that are continued and completions that are interrupted."""

import numpy as np
import pytest
import torch
from engine_bench import SLOTS, Bench, bench_fixture
from tiny_models import MAX_POSITIONS, save_model_dir, teacher_forced, work

from pipeline.engines.base import Failure
from pipeline.errors import EngineError
from pipeline.messages import Interruption, Rollout
from pipeline.tokenization import PromptCodec

torch.set_num_threads(1)
REAL = [("embedded", "qwen2"), ("transformers", "mistral")]
ALL = [*REAL, ("fake", "qwen2")]
PHRASE = "abcabc"  # a token a letter for the tiny tokenizer, one word for the fake engine
INTERRUPTION = Interruption(position=5, phrase=PHRASE, thought_end="}", answer_tokens=3)

bench = bench_fixture(ALL)
real = bench_fixture(REAL)


def truncated(bench: Bench, max_new_tokens: int, count: int = 12) -> list[Rollout]:
    """Rollouts that the limit cut short, as one round leaves them."""
    bench.engine.submit([work(i, "abc"[: 1 + i % 3], max_new_tokens) for i in range(count)])
    cut = [r for r in bench.drain() if r.finish_reason == "length"]
    assert len(cut) > 1
    return cut


def test_a_continued_rollout_begins_with_its_prefix_untouched(bench):
    cut = truncated(bench, 3)
    bench.engine.load_weights(bench.notice(4))
    bench.engine.submit([work(100 + r.attempt_id, _prompt(r), 9, prefix=r.as_prefix()) for r in cut])
    continued = {r.attempt_id - 100: r for r in bench.drain()}
    assert set(continued) == {r.attempt_id for r in cut}
    for before in cut:
        after = continued[before.attempt_id]
        after.check()
        assert after.completion_ids.startswith(before.completion_ids)
        assert after.engine_logprobs.startswith(before.engine_logprobs)
        assert after.prompt_ids == before.prompt_ids
        assert 3 < after.num_tokens <= 9
        assert [(s.start, s.policy_version) for s in after.version_spans] == [(0, 0), (3, 4)]
        assert after.forced_spans == ()
        assert after.num_tokens == 9 or after.finish_reason == "stop"


def test_a_rollout_in_parts_is_the_one_that_was_never_cut(bench, tmp_path, request):
    """One request at a time: then both engines have drawn the same random numbers when the second part begins."""
    again = Bench(tmp_path / "again", *request.node.callspec.params["bench"])
    for seed in range(4):  # some end before the cut
        whole, first = work(seed, "abc", 16), work(seed, "abc", 4)
        bench.engine.submit([whole])
        (uncut,) = bench.drain()
        again.engine.submit([first])
        (part,) = again.drain()
        if part.finish_reason == "length":
            again.engine.submit([work(seed, "abc", 16, prefix=part.as_prefix())])
            (part,) = again.drain()
        assert part.completion_array().tolist() == uncut.completion_array().tolist()
        np.testing.assert_allclose(part.logprob_array(), uncut.logprob_array(), atol=1e-4)
        assert (part.version_spans, part.finish_reason, part.text) == (
            uncut.version_spans,
            uncut.finish_reason,
            uncut.text,
        )


def test_continued_and_fresh_rollouts_run_side_by_side(real):
    cut = truncated(real, 4)
    real.engine.submit([work(100 + r.attempt_id, _prompt(r), 12, prefix=r.as_prefix()) for r in cut])
    real.engine.submit([work(i, "abc"[: 1 + i % 3]) for i in range(9)])
    for rollout in real.drain():
        prompt, completion = rollout.prompt_array().tolist(), rollout.completion_array().tolist()
        expected = teacher_forced(real.model, prompt + completion)[len(prompt) - 1 :]
        np.testing.assert_allclose(rollout.logprob_array(), expected, atol=1e-4)


def test_a_completion_that_could_outgrow_the_model_fails_for_good(real):
    (cut, *_) = truncated(real, 3)
    room = MAX_POSITIONS - len(cut.prompt_array())
    real.engine.submit(
        [
            work(100, _prompt(cut), room + 1, prefix=cut.as_prefix()),
            work(101, _prompt(cut), room - len(PHRASE) + 1, interruption=INTERRUPTION),
            work(102, _prompt(cut), room - len(PHRASE), interruption=INTERRUPTION),
        ]
    )
    ended = {e.attempt_id: e for e in real.drain()}
    assert [isinstance(ended[i], Failure) for i in (100, 101, 102)] == [True, True, False]


def test_an_interruption_puts_the_phrase_in_and_bounds_the_answer(bench):
    bench.engine.submit([work(i, "abc"[: 1 + i % 3], 30, interruption=INTERRUPTION) for i in range(16)])
    ended = bench.drain()
    interrupted = [r for r in ended if r.forced_spans]
    assert len(interrupted) > 1
    for rollout in ended:
        rollout.check()
        assert rollout.forced_spans or rollout.num_tokens <= 5 or "}" in rollout.text
    for rollout in interrupted:
        (span,) = rollout.forced_spans
        assert span.start == INTERRUPTION.position
        assert (rollout.logprob_array()[span.start : span.end] == 0).all()
        assert rollout.sampled_array().sum() == rollout.num_sampled == rollout.num_tokens - (span.end - span.start)
        assert 1 <= rollout.num_tokens - span.end <= INTERRUPTION.answer_tokens
        is_cut = rollout.num_tokens - span.end == INTERRUPTION.answer_tokens
        assert rollout.finish_reason == "stop" or is_cut


def test_forced_tokens_are_the_phrase_and_the_answer_follows_from_them(real):
    """And a thought that has said its own end is left alone."""
    codec = PromptCodec(real.model_dir)
    real.engine.submit([work(i, "ab", 20, interruption=INTERRUPTION) for i in range(24)])
    ended = real.drain()
    assert {bool(r.forced_spans) for r in ended if r.num_tokens > INTERRUPTION.position} == {True, False}
    for rollout in ended:
        prompt, completion = rollout.prompt_array().tolist(), rollout.completion_array().tolist()
        thought = codec.decode(completion[: INTERRUPTION.position])
        if rollout.num_tokens > INTERRUPTION.position:
            assert bool(rollout.forced_spans) == (INTERRUPTION.thought_end not in thought)
        for span in rollout.forced_spans:
            assert completion[span.start : span.end] == codec.encode_phrase(PHRASE)
            assert PHRASE in rollout.text
        expected = teacher_forced(real.model, prompt + completion)[len(prompt) - 1 :]
        sampled = rollout.sampled_array()
        np.testing.assert_allclose(rollout.logprob_array()[sampled], expected[sampled], atol=1e-4)


def test_an_end_token_within_the_phrase_does_not_end_the_completion(real):
    phrase = Interruption(position=2, phrase="a<eos>", thought_end="}", answer_tokens=2)
    real.engine.submit([work(i, "ab", 20, interruption=phrase) for i in range(12)])
    interrupted = [r for r in real.drain() if r.forced_spans]
    assert interrupted
    assert all(r.num_tokens > r.forced_spans[0].end for r in interrupted)


def test_a_prefix_past_the_position_is_interrupted_at_once_and_only_once(bench):
    cut = truncated(bench, 8, count=24)
    bench.engine.submit(
        [work(100 + r.attempt_id, _prompt(r), 12, prefix=r.as_prefix(), interruption=INTERRUPTION) for r in cut]
    )
    interrupted = [r for r in bench.drain() if r.forced_spans]
    assert interrupted
    assert {r.forced_spans[0].start for r in interrupted} == {9}
    again = [r for r in interrupted if r.finish_reason == "length"]
    bench.engine.submit(
        [work(r.attempt_id, _prompt(r), 20, prefix=r.as_prefix(), interruption=INTERRUPTION) for r in again]
    )
    ended = {r.attempt_id: r for r in bench.drain()}
    assert ended
    for before in again:
        assert ended[before.attempt_id].forced_spans == before.forced_spans
        assert ended[before.attempt_id].num_sampled <= 20


def test_weights_that_change_within_the_phrase_start_a_span_there(bench):
    early = Interruption(position=2, phrase="abc", thought_end="}", answer_tokens=4)
    bench.engine.submit([work(i, "ab", 20, interruption=early) for i in range(SLOTS)])
    ended = []
    for _ in range(3):
        ended += bench.engine.step()
    bench.engine.load_weights(bench.notice(2))
    ended += bench.drain()
    interrupted = [r for r in ended if r.forced_spans]
    assert interrupted
    for rollout in interrupted:
        assert rollout.forced_spans[0].start == 2
        assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0), (3, 2)]


def test_a_phrase_that_the_vocabulary_cannot_spell_is_refused(tmp_path):
    codec = PromptCodec(save_model_dir(tmp_path / "model", "qwen2"))
    assert codec.decode(codec.encode_phrase(PHRASE)) == PHRASE
    for phrase in ("", "xyz"):
        with pytest.raises(EngineError, match="phrase"):
            codec.encode_phrase(phrase)


def _prompt(rollout: Rollout) -> str:
    """Of the prompts above the one that this rollout answers."""
    return "abc"[: len(rollout.prompt_array())]
