"""Loading a policy, and its logprobs against a plain forward of the whole model."""

import json
import shutil

import numpy as np
import pytest
import torch
from learner_samples import VOCAB_SIZE, tiny_model, tiny_model_dir
from transformers import AutoConfig, AutoTokenizer

from learner import model as policy
from learner.model import (
    canary_batch,
    check_head,
    completion_logprobs,
    export_model_dir,
    load_model,
    save_tokenizer,
)
from learner.packing import collate
from pipeline.errors import ConfigError
from pipeline.model_path import resolve_model_path

ROWS = [([3, 4, 5], [6, 7, 1]), ([8], [9, 10, 11, 12, 3]), ([4, 4, 4, 4], [1])]


def arrays(rows):
    return [np.asarray(prompt) for prompt, _ in rows], [np.asarray(completion) for _, completion in rows]


def plain_logprobs(model, prompt, completion, temperature):
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    distribution = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = distribution[torch.arange(len(completion)), torch.tensor(completion)]
    return logprobs, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_logprobs_and_entropies_equal_a_plain_forward(kind, temperature):
    model = tiny_model(kind=kind)
    logprobs, entropies = completion_logprobs(model, collate(*arrays(ROWS)), temperature)
    expected = [plain_logprobs(model, *row, temperature) for row in ROWS]
    torch.testing.assert_close(logprobs, torch.cat([e[0] for e in expected]), rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, torch.cat([e[1] for e in expected]), rtol=0, atol=1e-12)
    assert logprobs.requires_grad and not entropies.requires_grad


def test_temperature_changes_the_logprobs():
    model, batch = tiny_model(), collate(*arrays(ROWS))
    warm, cold = (completion_logprobs(model, batch, temperature)[0] for temperature in (1.0, 0.6))
    assert (warm - cold).abs().max() > 0.1


@pytest.mark.parametrize("max_logits", [1, 2 * VOCAB_SIZE, 4 * VOCAB_SIZE + 1])
def test_chunks_change_neither_logprobs_nor_gradients(max_logits):
    results = []
    for limit in (max_logits, policy.MAX_LOGITS):
        model = tiny_model()
        logprobs, entropies = completion_logprobs(model, collate(*arrays(ROWS)), 0.7, max_logits=limit)
        (logprobs * torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64)).sum().backward()
        results.append((logprobs, entropies, *(p.grad for p in model.parameters())))
    for chunked, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-12)


def test_the_logits_in_memory_are_bounded(monkeypatch):
    rows_seen = []
    plain = policy._head_logprobs

    def recording(hidden, *args):
        rows_seen.append(hidden.shape[0])
        return plain(hidden, *args)

    monkeypatch.setattr(policy, "_head_logprobs", recording)
    completion_logprobs(tiny_model(), collate(*arrays(ROWS)), 1.0, max_logits=3 * VOCAB_SIZE)[0].sum().backward()
    assert max(rows_seen) == 3
    assert sum(rows_seen) == 2 * 9  # every position twice: forward, and recomputed in the backward pass


def test_logits_are_float32_in_a_model_of_lower_precision():
    logprobs, entropies = completion_logprobs(tiny_model(dtype=torch.bfloat16), collate(*arrays(ROWS)), 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32


def test_a_loaded_directory_is_float32_in_evaluation_mode(tmp_path):
    directory = tiny_model_dir(tmp_path / "m")
    half = tiny_model(dtype=torch.float16)
    half.save_pretrained(directory)
    model, tokenizer = load_model(str(directory))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    assert tokenizer.decode(tokenizer("123")["input_ids"]).replace(" ", "") == "123"


def test_the_built_in_model_loads():
    model, _ = load_model("builtin")
    assert model.num_parameters() == 447_104


def test_exported_directory_has_everything_but_weights(tmp_path):
    model, tokenizer = load_model(str(tiny_model_dir(tmp_path / "m")))
    export_model_dir(model, tokenizer, tmp_path / "run_model")
    export_model_dir(model, tokenizer, tmp_path / "run_model")  # a restarted learner does it again
    names = {path.name for path in (tmp_path / "run_model").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.endswith((".safetensors", ".bin")) for name in names)
    assert AutoConfig.from_pretrained(tmp_path / "run_model").vocab_size == VOCAB_SIZE
    assert AutoTokenizer.from_pretrained(tmp_path / "run_model").eos_token_id == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "run_model"]


def _without_config(directory):
    (directory / "config.json").unlink()


def _without_weights(directory):
    (directory / "model.safetensors").unlink()


def _without_tokenizer(directory):
    for path in directory.glob("tokenizer*"):
        path.unlink()


def _torn_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbled_config(directory):
    (directory / "config.json").write_text("{")


def _unknown_architecture(directory):
    (directory / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))


def _another_size(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))


def _gone(directory):
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    "spoil",
    [
        _gone,
        _without_config,
        _without_weights,
        _without_tokenizer,
        _torn_weights,
        _garbled_config,
        _unknown_architecture,
        _another_size,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_cannot_be_loaded_is_a_config_error_of_one_line(spoil, tmp_path):
    directory = tiny_model_dir(tmp_path / "m")
    spoil(directory)
    with pytest.raises(ConfigError) as caught:
        load_model(str(directory))
    assert str(directory) in caught.value.message and "\n" not in caught.value.message


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"must be \.gguf"):
        load_model(str(tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(str(tmp_path / "model.gguf"))


def test_a_head_that_scales_its_logits_is_refused():
    model = tiny_model()
    check_head(model)
    model.lm_head.register_forward_hook(lambda module, args, output: 0.5 * output)
    with pytest.raises(ConfigError, match="qwen2"):
        check_head(model)


def test_canary_ids_depend_on_the_vocabulary_only():
    first, _ = canary_batch(tiny_model(seed=0))
    second, batch = canary_batch(tiny_model(seed=1))
    assert first.tolist() == second.tolist() and first.shape == (policy.CANARY_TOKENS,)
    assert len(set(first.tolist())) == VOCAB_SIZE and int(first.max()) < VOCAB_SIZE
    assert batch.targets.tolist() == second[1:].tolist()


def test_a_tokenizer_is_saved_as_it_was_loaded(tmp_path):
    """transformers replaces the pre-tokenizer of a qwen2 directory by its own; saving that would corrupt the user's."""
    for source, target in [("one", "two"), ("two", "two")]:
        (tmp_path / "one").mkdir(exist_ok=True)
        original = (resolve_model_path("builtin") / "tokenizer.json").read_bytes()
        (tmp_path / "one" / "tokenizer.json").write_bytes(original)
        (tmp_path / "one" / "config.json").write_text('{"model_type": "qwen2"}')
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / source)
        save_tokenizer(tokenizer, tmp_path / target)
        (tmp_path / target / "config.json").write_text('{"model_type": "qwen2"}')
        assert (tmp_path / target / "tokenizer.json").read_bytes() == original
