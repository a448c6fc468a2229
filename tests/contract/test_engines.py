"""One suite over every implementation of the `Engine` seam."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_bench import ALL, REAL, SLOTS, Bench, bench_fixture
from tiny_models import MAX_POSITIONS, publish, save_model_dir, teacher_forced, tiny_model, work

from pipeline.config import EnginesConfig
from pipeline.engines.base import Failure
from pipeline.engines.registry import make_engine
from pipeline.errors import ConfigError, WeightError
from pipeline.messages import Rollout

torch.set_num_threads(1)

bench = bench_fixture(ALL)
real = bench_fixture(REAL)


def test_every_attempt_ends_once_as_a_valid_rollout(bench):
    assert bench.engine.slots == SLOTS
    assert bench.engine.step() == []
    bench.engine.submit([work(i, "abcd"[: 1 + i % 4]) for i in range(11)])
    assert bench.engine.num_in_flight == 11
    ended = bench.drain()
    assert sorted(r.attempt_id for r in ended) == list(range(11))
    for rollout in ended:
        rollout.check()
        assert 1 <= rollout.num_tokens <= 12
        assert rollout.chain_id == rollout.attempt_id // 4
        assert rollout.engine_id == "engine-9"
        assert 0 < rollout.started_ns <= rollout.finished_ns
        assert {s.policy_version for s in rollout.version_spans} == {0}
    stats = bench.engine.stats()
    assert stats["rollouts"] == 11
    assert stats["tokens"] == sum(r.num_tokens for r in ended)
    assert stats["slots_used"] == 0
    assert stats["decode_steps"] > 0
    assert bench.engine.step() == []


def test_cancelled_attempts_vanish_and_free_their_slots(bench):
    bench.engine.submit([work(i, "ab") for i in range(6)])
    finished = {r.attempt_id for r in bench.engine.step()}
    running, waiting = next(i for i in range(SLOTS) if i not in finished), 5
    bench.engine.cancel([running, waiting, 999])
    bench.engine.submit([work(10, "cd")])
    finished |= {r.attempt_id for r in bench.drain()}
    assert finished == {*range(6), 10} - {running, waiting}


def test_cancelling_everything_leaves_nothing_in_flight(bench):
    bench.engine.submit([work(i, "ab") for i in range(6)])
    bench.engine.cancel(range(6))
    assert bench.engine.num_in_flight == 0
    assert bench.engine.step() == []


def test_a_load_keeps_running_requests_and_starts_a_span(bench):
    bench.engine.submit([work(i, "abc", max_new_tokens=20) for i in range(SLOTS)])
    ended = bench.engine.step()
    report = bench.engine.load_weights(bench.notice(3))
    assert report.policy_version == 3
    assert report.stall_s >= 0
    ended += bench.drain()
    assert sorted(r.attempt_id for r in ended) == list(range(SLOTS))
    spanning = [r for r in ended if r.num_tokens > 1]
    assert spanning
    for rollout in spanning:
        rollout.check()
        assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0), (1, 3)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_models_own(real, temperature):
    prompts = ["a", "bcdefg", "bcdefg", "hij", "\\boxed{k", "lmnoabcdefghi", "a"]
    real.engine.submit([work(i, p, temperature=temperature) for i, p in enumerate(prompts)])
    for rollout in real.drain():
        prompt, completion = rollout.prompt_array().tolist(), rollout.completion_array().tolist()
        expected = teacher_forced(real.model, prompt + completion, temperature)[len(prompt) - 1 :]
        np.testing.assert_allclose(rollout.logprob_array(), expected, atol=1e-4)


def test_a_completion_ends_at_the_end_token_or_the_limit(real):
    real.engine.submit([work(i, "ab", max_new_tokens=20) for i in range(12)])
    ended = real.drain()
    assert "stop" in {r.finish_reason for r in ended}
    for rollout in ended:
        ids = rollout.completion_array().tolist()
        assert 1 not in ids[:-1]
        assert (ids[-1] == 1) == (rollout.finish_reason == "stop")
        assert "<eos>" not in rollout.text
        if rollout.finish_reason == "length":
            assert len(ids) == 20


def test_the_same_seed_gives_the_same_rollouts(tmp_path, real, request):
    again = Bench(tmp_path / "again", *request.node.callspec.params["real"])
    for made in (real, again):
        made.engine.submit([work(i, "abcdef"[: 1 + i % 5]) for i in range(9)])
    first, second = (sorted(m.drain(), key=lambda r: r.attempt_id) for m in (real, again))
    assert [r.completion_ids for r in first] == [r.completion_ids for r in second]
    assert [r.engine_logprobs for r in first] == [r.engine_logprobs for r in second]


def test_prompts_that_cannot_run_fail_for_good_and_the_rest_goes_on(real):
    longest = "a" * (MAX_POSITIONS - 12)
    real.engine.submit(
        [work(0, ""), work(1, longest + "a"), work(2, longest), work(3, "a", max_new_tokens=MAX_POSITIONS)]
    )
    ended = {e.attempt_id: e for e in real.drain()}
    for attempt_id in (0, 1, 3):
        failure = ended[attempt_id]
        assert isinstance(failure, Failure)
        assert not failure.retryable
    assert str(MAX_POSITIONS) in ended[1].reason
    assert isinstance(ended[2], Rollout)


def test_an_attempt_sent_twice_runs_once(real):
    real.engine.submit([work(0, "ab"), work(1, "ab")])
    real.engine.submit([work(1, "ab"), work(2, "ab")])
    assert sorted(r.attempt_id for r in real.drain()) == [0, 1, 2]


def test_bad_weights_are_refused_and_the_old_ones_serve(real):
    torn = real.notice(1)
    os.truncate(torn.path, torn.num_bytes - 5)
    with pytest.raises(WeightError, match="announced"):
        real.engine.load_weights(torn)
    altered = publish(real.publisher, tiny_model(real.model.config.model_type, seed=5), 2, real.model_dir)
    altered_bytes = bytearray(Path(altered.path).read_bytes())
    altered_bytes[-5] ^= 0x10
    Path(altered.path).write_bytes(altered_bytes)
    with pytest.raises(WeightError, match="checksum"):
        real.engine.load_weights(altered)
    other = tiny_model("qwen3" if real.model.config.model_type != "qwen3" else "llama", seed=1)
    with pytest.raises(WeightError, match="tensor"):
        real.engine.load_weights(publish(real.publisher, other, 2, real.model_dir))
    partial = {k: v for k, v in real.model.state_dict().items() if "norm" not in k and "ln_" not in k}
    with pytest.raises(WeightError, match="tensor"):
        real.engine.load_weights(real.publisher.publish(partial, 3, real.model_dir, [3, 4], [0.0]))
    test_logprobs_are_the_models_own(real, 1.0)


def test_the_canary_agrees_and_detects_one_wrong_tensor(real):
    assert real.report.canary_error < 1e-4
    state = dict(real.model.state_dict())
    name = next(n for n in state if n.endswith(("down_proj.weight", "mlp.c_proj.weight")))
    state[name] = 1.2 * state[name]
    canary = list(range(3, 19))
    honest = teacher_forced(real.model, canary)
    report = real.engine.load_weights(real.publisher.publish(state, 1, real.model_dir, canary, honest))
    assert report.canary_error > 1e-3
    state[name] = state[name] * float("nan")
    report = real.engine.load_weights(real.publisher.publish(state, 2, real.model_dir, canary, honest))
    assert report.canary_error == float("inf")
    with pytest.raises(WeightError, match="canary"):
        real.engine.load_weights(real.publisher.publish(state, 3, real.model_dir, canary, honest[:-1]))


def test_auto_picks_an_engine_by_architecture(tmp_path, monkeypatch):
    for kind, decoder in [
        ("qwen2", "EmbeddedDecoder"),
        ("gpt2", "TransformersDecoder"),
        ("mistral", "TransformersDecoder"),
    ]:
        model_dir = save_model_dir(tmp_path / kind, kind)
        engine = make_engine(EnginesConfig(kind="auto", slots=2), str(model_dir), 0, "auto")
        assert type(engine._decoder).__name__ == decoder
    with pytest.raises(ConfigError, match="gpt2"):
        make_engine(EnginesConfig(kind="embedded", slots=2), str(tmp_path / "gpt2"), 0, "auto")
    with pytest.raises(ConfigError, match="absent"):
        make_engine(EnginesConfig(slots=2), str(tmp_path / "absent"), 0, "auto")
    monkeypatch.setitem(sys.modules, "pipeline.engines.embedded.decoder", None)  # what another engine does without
    make_engine(EnginesConfig(kind="transformers", slots=2), str(tmp_path / "qwen2"), 0, "auto")
