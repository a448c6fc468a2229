"""What the shared contract does not see: weights that change between tokens, slots, shared prompts, sampling."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from tiny_models import (
    kept_cache_logprobs,
    publish,
    save_model_dir,
    teacher_forced,
    tiny_config,
    tiny_model,
    work,
)

from pipeline.engines.batching import BatchingEngine, sample
from pipeline.engines.embedded.cache import KVCache
from pipeline.engines.embedded.decoder import EmbeddedDecoder
from pipeline.engines.embedded.shape import ModelShape, why_not_covered
from pipeline.engines.embedded.weights import rotations
from pipeline.engines.transformers_engine import TransformersDecoder
from pipeline.tokenization import PromptCodec
from pipeline.weights import WeightPublisher

torch.set_num_threads(1)
on_cpu = partial(TransformersDecoder, device=torch.device("cpu"))
PROMPTS = ("a", "bc", "bc", "defgh", "ijklmnoabc")


def make(directory, decoder_class, kind: str, slots: int, has_eos: bool = True):
    model_dir = save_model_dir(directory / "model", kind, has_eos)
    codec = PromptCodec(model_dir)
    decoder = decoder_class(tiny_config(kind), slots)
    return (
        BatchingEngine(decoder, codec, slots, seed=3, engine_id="e"),
        WeightPublisher(directory / "weights"),
        model_dir,
    )


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gpt2", "mistral"])
def test_weights_change_in_flight_and_every_logprob_is_of_its_own_version(tmp_path, kind, monkeypatch):
    """Random arrivals, cancellations and loads; each rollout is recomputed under its versions, over one kept cache."""
    monkeypatch.setattr("pipeline.weights.PIECE_BYTES", 1 << 10)  # so that a tensor comes in several parts
    monkeypatch.setattr("pipeline.weights.STREAM_BYTES", 0)  # as large ones are copied
    decoder = on_cpu if kind in ("gpt2", "mistral") else EmbeddedDecoder
    engine, publisher, model_dir = make(tmp_path, decoder, kind, slots=5, has_eos=False)
    versions = {v: tiny_model(kind, seed=v) for v in range(4)}
    engine.load_weights(publish(publisher, versions[0], 0, model_dir))
    rng = random.Random(kind)
    next_id, version, ended, cancelled = 0, 0, [], set()
    for step in range(32):
        if rng.random() < 0.5:
            count = rng.randint(1, 3)
            prompt = rng.choice(PROMPTS)
            engine.submit([work(next_id + i, prompt, rng.randint(1, 16), temperature=0.8) for i in range(count)])
            next_id += count
        if rng.random() < 0.1 and next_id:
            victim = rng.randrange(next_id)
            if victim not in {r.attempt_id for r in ended}:
                engine.cancel([victim])
                cancelled.add(victim)
        if step % 9 == 8:
            version += 1
            engine.load_weights(publish(publisher, versions[version], version, model_dir))
        ended += engine.step()
    while engine.num_in_flight:
        ended += engine.step()
    assert sorted(r.attempt_id for r in ended) == sorted(set(range(next_id)) - cancelled)
    assert max(len(r.version_spans) for r in ended) >= 2
    assert {v for r in ended for v in r.version_array().tolist()} == set(versions)
    for rollout in ended:
        rollout.check()
        np.testing.assert_allclose(
            rollout.logprob_array(), kept_cache_logprobs(versions, rollout, 0.8), atol=1e-4, rtol=0
        )


def test_a_freed_slot_is_filled_before_the_next_token(tmp_path):
    engine, publisher, model_dir = make(tmp_path, EmbeddedDecoder, "qwen2", slots=3, has_eos=False)
    engine.load_weights(publish(publisher, tiny_model("qwen2", 0), 0, model_dir))
    engine.submit([work(i, "ab", max_new_tokens=1 + i % 4) for i in range(20)])
    tokens = sum(1 + i % 4 for i in range(20))
    steps = 0
    while engine.num_in_flight:
        engine.step()
        steps += 1
    # Full at every step but the last few, when fewer than three attempts are left.
    assert steps <= tokens / 3 + 3


def test_prompts_wait_until_some_can_be_computed_together(tmp_path, monkeypatch):
    engine, publisher, model_dir = make(tmp_path, EmbeddedDecoder, "qwen2", slots=64, has_eos=False)
    admitted = []
    original = EmbeddedDecoder.admit

    def counting(self, prompts, max_tokens):
        admitted.append(len(prompts))
        original(self, prompts, max_tokens)

    monkeypatch.setattr(EmbeddedDecoder, "admit", counting)
    engine.load_weights(publish(publisher, tiny_model("qwen2", 0), 0, model_dir))
    engine.submit([work(i, PROMPTS[i % 5], max_new_tokens=1 + i % 31) for i in range(128)])  # two or three end a step
    while engine.num_in_flight:
        engine.step()
    assert sum(admitted) == 128
    assert admitted[0] == 64
    assert min(admitted[1:-1]) >= 4  # a sixteenth of the slots; behind the last prompts there are no more


def test_prompts_shared_with_a_running_row_are_not_computed_again(tmp_path, monkeypatch):
    engine, publisher, model_dir = make(tmp_path, EmbeddedDecoder, "qwen2", slots=8, has_eos=False)
    prefilled = []
    original = EmbeddedDecoder._prefill
    monkeypatch.setattr(
        EmbeddedDecoder, "_prefill", lambda self, p, rows: (prefilled.extend(p), original(self, p, rows))[1]
    )
    model = tiny_model("qwen2", 0)
    engine.load_weights(publish(publisher, model, 0, model_dir))
    engine.submit([work(i, "abcd") for i in range(3)] + [work(3, "efgh")])
    engine.step()
    assert len(prefilled) == 2
    engine.submit([work(4, "abcd")])
    engine.step()
    assert len(prefilled) == 2
    engine.load_weights(publish(publisher, model, 1, model_dir))
    engine.submit([work(5, "abcd")])  # the running rows' prompt was computed under older weights
    engine.step()
    assert len(prefilled) == 3


def test_long_prompts_are_prefilled_in_bounded_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.engines.embedded.decoder._PREFILL_TOKENS", 8)
    engine, publisher, model_dir = make(tmp_path, EmbeddedDecoder, "qwen2", slots=8)
    model = tiny_model("qwen2", 0)
    engine.load_weights(publish(publisher, model, 0, model_dir))
    engine.submit([work(i, "abcdefghijklmno"[: 2 + i] * (1 + i % 2)) for i in range(8)])
    while engine.num_in_flight:
        for rollout in engine.step():
            ids = rollout.prompt_array().tolist() + rollout.completion_array().tolist()
            expected = teacher_forced(model, ids)[-rollout.num_tokens :]
            np.testing.assert_allclose(rollout.logprob_array(), expected, atol=1e-4)


def test_a_draw_follows_the_distribution_whose_logprobs_it_reports():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    for temperature in (1.0, 0.6):
        num_draws = 20_000
        ids, logprobs = sample(logits.expand(num_draws, -1), torch.full((num_draws, 1), temperature), generator)
        ids, logprobs = ids.numpy(), logprobs.numpy()
        expected = torch.softmax(logits / temperature, 0).numpy()
        counts = np.bincount(ids, minlength=4)
        # Five standard deviations of a binomial; the seed is fixed.
        assert (np.abs(counts - num_draws * expected) < 5 * np.sqrt(num_draws * expected)).all()
        np.testing.assert_allclose(np.exp(logprobs), expected[ids], atol=1e-6)


def test_the_cache_grows_and_keeps_its_contents():
    cache = KVCache(num_layers=1, slots=2, num_kv_heads=1, head_dim=2)
    first, second = cache.take(), cache.take()
    cache.reserve(3)
    cache.write_prompts(0, [first], torch.tensor([1.0, 2.0])[None, :, None, None].expand(1, 2, 2, 2))
    cache.reserve(5)
    cache.reserve(4)
    [(keys, values)] = cache.layers
    assert keys.shape == values.shape == (2, 1, 5, 2)
    assert keys[first, 0].tolist() == values[first, 0].tolist() == [[1, 1], [2, 2], [0, 0], [0, 0], [0, 0]]
    assert not keys[second].any()
    cache.copy(first, [second], 1)
    assert keys[second, 0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    cache.give_back(first)
    assert cache.take() == first


def test_rotations_are_not_computed_anew_at_every_token_of_a_longest_row(tmp_path, monkeypatch):
    computed = []
    monkeypatch.setattr(
        "pipeline.engines.embedded.decoder.rotations", lambda c, num: (computed.append(num), rotations(c, num))[1]
    )
    engine, publisher, model_dir = make(tmp_path, EmbeddedDecoder, "qwen2", slots=1, has_eos=False)
    engine.load_weights(publish(publisher, tiny_model("qwen2", 0), 0, model_dir))
    engine.submit([work(0, "ab", max_new_tokens=60)])
    while engine.num_in_flight:
        engine.step()
    assert len(computed) <= 3


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_the_expected_tensors_are_those_of_the_transformers_model(kind):
    model = tiny_model(kind, 0)
    names = {n: tuple(t.shape) for n, t in model.named_parameters()}
    assert ModelShape.of(tiny_config(kind)).tensors() == names


def test_what_the_engine_would_get_wrong_is_not_covered():
    assert why_not_covered(tiny_config("qwen2")) is None
    assert "gpt2" in (why_not_covered(tiny_config("gpt2")) or "")
    sliding = tiny_config("qwen3")
    sliding.layer_types = ["full_attention", "sliding_attention"]
    assert "sliding" in (why_not_covered(sliding) or "")
    gelu = tiny_config("llama")
    gelu.hidden_act = "gelu"
    assert "gelu" in (why_not_covered(gelu) or "")
    dynamic = tiny_config("qwen2")
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert "dynamic" in (why_not_covered(dynamic) or "")
