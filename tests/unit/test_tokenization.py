"""Prompts become ids and completions text, exactly."""

import json

import pytest
from tiny_models import TOKENS, save_model_dir

from pipeline.errors import EngineError
from pipeline.tokenization import PromptCodec


def test_text_round_trips_and_keeps_what_answers_are_made_of(tmp_path):
    codec = PromptCodec(save_model_dir(tmp_path, "qwen2"))
    ids = codec.encode("ab\\boxed{c}")
    assert [TOKENS[i] for i in ids] == ["a", "b", "\\boxed{", "c", "}"]
    assert codec.encode("ab\\boxed{c}") == ids
    assert codec.eos_ids == {1}
    assert codec.decode([*ids, 1]) == codec.decode(ids) == "ab\\boxed{c}"
    assert codec.decode([]) == codec.decode([1]) == ""


def test_end_tokens_come_from_the_generation_config_too(tmp_path):
    save_model_dir(tmp_path, "qwen2")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [4, 7]}))
    assert PromptCodec(tmp_path).eos_ids == {1, 4, 7}
    path.write_text(json.dumps({"eos_token_id": 4}))
    assert PromptCodec(tmp_path).eos_ids == {1, 4}
    path.write_text(json.dumps({}))
    assert PromptCodec(tmp_path).eos_ids == {1}


def test_a_chat_template_is_used_unless_told_never(tmp_path):
    save_model_dir(tmp_path, "qwen2")
    template = "{% for m in messages %}a{{ m.content }}{% endfor %}{% if add_generation_prompt %}o{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    plain = PromptCodec(tmp_path, "never").encode("bc")
    assert [TOKENS[i] for i in plain] == ["b", "c"]
    assert [TOKENS[i] for i in PromptCodec(tmp_path, "auto").encode("bc")] == ["a", "b", "c", "o"]


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"tokenizer\.json") as caught:
        PromptCodec(tmp_path)
    assert not caught.value.retryable
