"""Random models of a few thousand parameters, their tokenizer, and the slow reference that engines are held against."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from pipeline.messages import Interruption, Prefix, Rollout, SamplingParams, WeightsNotice, Work
from pipeline.weights import WeightPublisher
from samplers.base import Problem

TOKENS = ("<pad>", "<eos>", "<unk>", "\\boxed{", "}", *"abcdefghijklmno")
MAX_POSITIONS = 64
_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_config(kind: str) -> Any:
    match kind:
        case "qwen2":
            return Qwen2Config(**_SIZES, tie_word_embeddings=True)
        case "qwen3":
            return Qwen3Config(**_SIZES, tie_word_embeddings=False, head_dim=8)
        case "llama":
            return LlamaConfig(
                **_SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE
            )
        case "mistral":  # a sliding window, which the embedded engine leaves to transformers
            return MistralConfig(**_SIZES, sliding_window=6)
        case "gpt2":
            return GPT2Config(vocab_size=len(TOKENS), n_positions=MAX_POSITIONS, n_embd=24, n_layer=2, n_head=4)
    raise ValueError(kind)


def tiny_model(kind: str, seed: int) -> PreTrainedModel:
    """Weights wide enough that logprobs differ by several nats between tokens and between seeds."""
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name or "ln_" in name else 0.25 * noise)
    return model


def save_model_dir(directory: Path, kind: str, has_eos: bool = True, max_positions: int = MAX_POSITIONS) -> Path:
    """Config and tokenizer without weights, as the learner leaves them for engines."""
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<eos>|\\boxed\{|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "unk_token": "<unk>"} | ({"eos_token": "<eos>"} if has_eos else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    config = tiny_config(kind)
    config.max_position_embeddings = max_positions
    config.architectures = [type(tiny_model(kind, seed=0)).__name__]
    config.save_pretrained(directory)
    return directory


def teacher_forced(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Logprobs of ids[1:] given the tokens before each, shape [T-1]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].float() / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).numpy()


def kept_cache_logprobs(versions: Mapping[int, PreTrainedModel], rollout: Rollout, temperature: float) -> np.ndarray:
    """The completion's logprobs, each under its own version, over one cache that is never recomputed.

    One pass a span: it reads the token before the span and those in it but the last, which is what an engine reads
    while it samples the span.
    """
    any_model = next(iter(versions.values()))
    cache_name = "cache" if "cache" in inspect.signature(any_model.forward).parameters else "past_key_values"
    cache = DynamicCache(config=any_model.config)
    completion = rollout.completion_array().tolist()
    ends = [span.start for span in rollout.version_spans[1:]] + [len(completion)]
    read = rollout.prompt_array().tolist()
    logprobs = []
    with torch.inference_mode():
        for span, end in zip(rollout.version_spans, ends, strict=True):
            ids = read + completion[span.start : end - 1]
            inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "use_cache": True, cache_name: cache}
            logits = versions[span.policy_version](**inputs).logits[0, -(end - span.start) :].float()
            tokens = torch.tensor(completion[span.start : end])[:, None]
            logprobs += torch.log_softmax(logits / temperature, -1).gather(1, tokens).squeeze(1).tolist()
            read = [completion[end - 1]]
    return np.array(logprobs, dtype=np.float32)


def publish(publisher: WeightPublisher, model: PreTrainedModel, version: int, model_dir: Path) -> WeightsNotice:
    canary = list(range(3, 3 + 16))
    return publisher.publish(model.state_dict(), version, model_dir, canary, teacher_forced(model, canary))


def work(
    attempt_id: int,
    prompt: str,
    max_new_tokens: int = 12,
    temperature: float = 1.0,
    prefix: Prefix | None = None,
    interruption: Interruption | None = None,
) -> Work:
    problem = Problem(f"p/{prompt}", "tiny", prompt, "")
    sampling = SamplingParams(temperature, max_new_tokens)
    return Work(attempt_id, attempt_id // 4, 0, problem, sampling, "train", prefix, interruption)
