"""Passes in which rollouts share their prompt, against passes in which each has a row of its own."""

import learner_samples
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_samples import VOCAB_SIZE, keep_float64, logprobs_and_kept_bytes, random_groups, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from learner import shared_prompts
from learner.learner import Learner
from learner.model import checkpoint_layers, completion_logprobs, export_model_dir, load_model, share_prompts
from learner.packing import BLOCK_FILL, collate, micro_batches
from learner.shared_prompts import shares_prompts
from pipeline.learner_config import KlConfig, LearnerConfig

ANY_KIND = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "head_dim": 4}
SIZES = learner_samples.SIZES | ANY_KIND | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = st.integers(3, VOCAB_SIZE - 1)


def tokens_read(model):
    """How many tokens each pass of `model` reads from now on, padding included."""
    read = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    return read


def model_of(kind: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES))
    keep_float64(model)
    return model.double().eval()


def gradient_of(model, batch, dtype=torch.float32):
    """Logprobs of the targets and the gradient of their sum, each weighed differently."""
    model.zero_grad()
    logprobs, entropies = completion_logprobs(model, batch, 0.7, dtype=dtype)
    weights = torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), entropies.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def some_rollouts():
    """Three prompts, two of which several rollouts begin with; one completion of a single token."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, size) for size in (5, 9, 2)]
    completions = [rng.integers(3, VOCAB_SIZE, size) for size in (1, 7, 30, 3, 12, 8, 9)]
    return collate([prompts[i] for i in (0, 1, 0, 1, 2, 0, 1)], completions)


@pytest.fixture(scope="module")
def pair():
    """The same model twice: with rows of its own for each rollout, and with prompts shared."""
    apart, together = tiny_model(kind="llama"), tiny_model(kind="llama")
    assert share_prompts(together) and not shares_prompts(apart)
    return apart, together


@settings(max_examples=40)
@given(
    prompts=st.lists(st.lists(IDS, min_size=1, max_size=6), min_size=1, max_size=3),
    rollouts=st.lists(st.tuples(st.integers(0, 2), st.lists(IDS, min_size=1, max_size=20)), min_size=1, max_size=8),
)
def test_logprobs_entropies_and_gradient_are_those_of_rollouts_apart(pair, prompts, rollouts):
    batch = collate(
        [np.array(prompts[which % len(prompts)]) for which, _ in rollouts], [np.array(ids) for _, ids in rollouts]
    )
    for theirs, ours in zip(*(gradient_of(model, batch) for model in pair), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@given(
    st.lists(
        st.tuples(st.lists(IDS, min_size=1, max_size=3), st.lists(IDS, min_size=1, max_size=30)),
        min_size=1,
        max_size=9,
    )
)
def test_a_batch_holds_prompts_once_and_its_rows_are_the_rollouts(rollouts):
    prompts, completions = [np.array(p) for p, _ in rollouts], [np.array(c) for _, c in rollouts]
    batch = collate(prompts, completions)
    once = {tuple(p) for p, _ in rollouts}
    num_inputs = sum(map(len, once)) + sum(len(c) - 1 for _, c in rollouts)
    assert batch.input_ids.shape == batch.position_ids.shape == batch.rows.places.shape == (num_inputs,)
    assert sorted(batch.rows.tokens[batch.rows.places].tolist()) == list(range(num_inputs))
    further, tokens = batch.rows.again
    assert torch.equal(batch.rows.tokens[further], tokens)
    assert further.numel() == sum(len(p) for p, _ in rollouts) - sum(map(len, once))
    found = []
    for block in batch.rows.blocks(batch.rows.tokens):
        found += [(batch.input_ids[row].tolist(), batch.position_ids[row].tolist()) for row in block]
    expected = sorted(([*p, *c[:-1]] for p, c in rollouts), key=lambda row: -len(row))
    assert len(found) == len(expected)
    for row, (ids, positions) in zip(expected, found, strict=True):
        assert ids[: len(row)] == row and positions[: len(row)] == list(range(len(row)))
        assert len(row) >= BLOCK_FILL * len(ids), "what a block pads"
    assert batch.targets.tolist() == [token for _, c in rollouts for token in c]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "olmo2", "gemma", "phi", "gpt2", "gpt_neox", "opt"])
def test_architectures_that_share(kind):
    model, batch = model_of(kind), some_rollouts()
    apart = gradient_of(model, batch)
    assert share_prompts(model)
    for theirs, ours in zip(apart, gradient_of(model, batch), strict=True):
        # Not all norms of all kinds are in float64.
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gemma3_text", "cohere2", "bloom", "mamba"])
def test_windows_softcaps_linear_biases_and_recurrences_do_not(kind):
    """The default configs of the first four have windows; they may be longer than what a trial would see."""
    model, batch = model_of(kind), some_rollouts()
    before, apart = model.config._attn_implementation, gradient_of(model, batch)
    assert not share_prompts(model) and not shares_prompts(model)
    assert model.config._attn_implementation == before
    for theirs, ours in zip(apart, gradient_of(model, batch), strict=True):
        assert torch.equal(ours, theirs)


def test_an_architecture_that_looks_back_past_its_attention_is_found_out():
    model = tiny_model(kind="llama")
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1 * args[0].roll(1, dims=1), *args[1:]))
    assert not share_prompts(model)
    hook.remove()
    assert share_prompts(model)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_trial_judges_hidden_states_by_their_own_length(scale):
    """The last norm of a model decides how long they are, and the head makes up for it."""
    model = tiny_model(dtype=torch.float32, kind="llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    layer = model.model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1 * args[0].roll(1, dims=1), *args[1:]))
    assert not share_prompts(model)
    hook.remove()
    assert share_prompts(model)


def test_a_trial_without_numbers_shows_nothing():
    model = tiny_model(dtype=torch.float32, kind="llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    assert not share_prompts(model)


@pytest.mark.parametrize("num_positions", [2, 3, 5, 16, 33])
def test_a_trial_has_no_more_positions_than_the_model(num_positions):
    sizes = SIZES | {"n_positions": num_positions, "max_position_embeddings": num_positions}
    config = AutoConfig.for_model("gpt2", **sizes)
    assert share_prompts(AutoModelForCausalLM.from_config(config).eval())


def test_an_architecture_that_takes_no_further_arguments_is_left_as_it_is(monkeypatch):
    model = tiny_model(kind="llama")
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda input_ids, use_cache: forward(input_ids, use_cache=use_cache))
    batch = some_rollouts()
    assert not share_prompts(model)
    assert gradient_of(model, batch)[2].norm() > 0


def test_a_model_that_shares_still_masks_and_pads_as_any_other():
    model, ids = tiny_model(kind="llama"), torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=mask).logits
    assert share_prompts(model)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, before)


def test_what_is_exported_and_saved_says_nothing_of_it(tmp_path):
    model, tokenizer = load_model("builtin")
    assert share_prompts(model)
    export_model_dir(model, tokenizer, tmp_path / "model")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    for directory in ("model", "saved"):
        assert "ngu" not in (tmp_path / directory / "config.json").read_text()
    assert not shares_prompts(load_model(str(tmp_path / "saved"))[0])


def test_layers_computed_again_and_layers_in_bfloat16_share_as_well():
    batch = some_rollouts()
    plain, again = tiny_model(kind="llama"), tiny_model(kind="llama")
    checkpoint_layers(again)
    assert share_prompts(plain) and share_prompts(again)
    for theirs, ours in zip(gradient_of(plain, batch), gradient_of(again, batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    apart, together = (tiny_model(dtype=torch.float32, kind="llama") for _ in range(2))
    assert share_prompts(together)
    exact = gradient_of(apart, batch, torch.float32)[2]
    rounded = [(gradient_of(model, batch, torch.bfloat16)[2] - exact).norm() for model in (apart, together)]
    assert 0 < rounded[1] < 1.5 * rounded[0], "no worse than without"


def test_what_a_prompt_gets_back_from_many_rollouts_is_not_summed_in_bfloat16():
    num = 400  # where one more is less than a step of bfloat16 from 256 on
    tokens = torch.zeros(num, dtype=torch.int64)
    again = torch.stack([torch.arange(1, num), tokens[1:]])
    x = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
    shared_prompts._Spread.apply(x, tokens, tokens[:1], again).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[400.0] * 3]


def test_a_step_reads_a_prompt_once_and_its_budget_has_no_padding():
    groups = random_groups(tiny_model(), seed=1, num_groups=3, group_size=6)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_inputs = sum(len(r.prompt_array()) + r.num_tokens - 1 for r in rollouts)
    reference = tiny_model(seed=1).requires_grad_(False)
    config = LearnerConfig(micro_batch_tokens=num_inputs, kl=KlConfig(coef=0.1))
    learner = Learner(tiny_model(), config, 1.0, reference=reference)
    read = tokens_read(learner.model), tokens_read(reference)
    learner.step(groups)
    prompts = {rollout.prompt_ids for rollout in rollouts}
    assert len(prompts) < len(rollouts)
    assert read == ([sum(len(p) // 4 for p in prompts) + sum(r.num_tokens - 1 for r in rollouts)],) * 2


@pytest.mark.parametrize("kinds", [("llama", "mistral"), ("mistral", "llama"), ("mistral", "mistral")])
def test_padding_counts_where_the_policy_or_its_reference_does_not_share(kinds):
    groups = random_groups(tiny_model(), seed=1, num_groups=3, group_size=6)
    model, reference = map(model_of, kinds)
    config = LearnerConfig(micro_batch_tokens=24, kl=KlConfig(coef=0.1))
    learner = Learner(model, config, 1.0, reference=reference.requires_grad_(False))
    read = tokens_read(model), tokens_read(reference)
    learner.step(groups)
    assert len(read[0]) == len(read[1]) > 1 and max(map(max, read)) <= 24


@pytest.mark.parametrize("wide", [{"num_key_value_heads": 4}, {"head_dim": 16}])
def test_a_pass_of_long_prompts_keeps_no_more_than_one_that_shares_nothing(wide):
    """With as many heads for keys and values as for queries, and with heads that are wider than the model."""
    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 96, "head_dim": 8, "max_position_embeddings": 512} | wide
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).eval()
    assert share_prompts(model)
    rng, budget = np.random.default_rng(0), 1024

    def kept_bytes(prompts, num_read):
        lengths = [prompt.size + num_read for prompt in prompts]
        own = [prompts[i] for i in micro_batches(lengths, budget, prompts)[0]]
        completions = [rng.integers(3, VOCAB_SIZE, num_read + 1) for _ in own]
        return logprobs_and_kept_bytes(model, collate(own, completions), 1.0)[1]

    apart = kept_bytes([rng.integers(3, VOCAB_SIZE, 54) for _ in range(16)], 10)
    shared = kept_bytes([rng.integers(3, VOCAB_SIZE, 200)] * 100, 4)
    assert 0.5 * apart < shared < 1.05 * apart
