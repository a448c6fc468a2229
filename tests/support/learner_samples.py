"""Tiny policies and hand-made groups for the learner's tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.qwen2 import Qwen2ForCausalLM

from learner.model import completion_logprobs
from learner.packing import TokenBatch, collate
from pipeline.messages import Group, Rollout, Verdict, VersionSpan, pack_ids, pack_logprobs
from samplers.base import Problem

VOCAB_SIZE = 13
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}

torch.set_num_threads(1)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, kind: str = "qwen2") -> PreTrainedModel:
    """A random model of a few thousand parameters; large enough weights that its logits are not all alike."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    if dtype == torch.float64:
        keep_float64(model)
    return model.to(dtype).eval()


def keep_float64(model: PreTrainedModel) -> None:
    """Norms in float64, where the library's are always in float32: what a gradient does not depend on then shows far
    below the rounding of float32.
    """
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if hasattr(norm, "variance_epsilon"):
                exact = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(module, name, exact)


def logprobs_and_kept_bytes(model: PreTrainedModel, batch: TokenBatch, temperature: float) -> tuple[torch.Tensor, int]:
    """Logprobs of the targets, [T], and the bytes that their graph keeps for the backward pass beside the weights;
    outside the chunks of the head, if there are several.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = completion_logprobs(model, batch, temperature)
    return logprobs, sum(kept.values())


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(digit): 3 + digit for digit in range(10)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tiny_model_dir(directory: Path, seed: int = 0) -> Path:
    tiny_model(seed, torch.float32).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def own_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """What an engine with these very weights would report: shape [T]."""
    if not len(completion):
        return np.zeros(0)
    with torch.no_grad():
        batch = collate([np.asarray(prompt)], [np.asarray(completion)])
        return completion_logprobs(model, batch, temperature)[0].numpy()


def make_rollout(
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float] | np.ndarray,
    *,
    attempt_id: int = 0,
    engine_id: str = "engine-0",
    versions: Sequence[tuple[int, int]] = ((0, 0),),
    truncated: bool = False,
) -> Rollout:
    """`versions` are (start, policy_version) spans."""
    spans = tuple(VersionSpan(start, version) for start, version in versions) if len(completion) else ()
    return Rollout(
        attempt_id=attempt_id,
        chain_id=0,
        round=0,
        prompt_ids=pack_ids(prompt),
        completion_ids=pack_ids(completion),
        engine_logprobs=pack_logprobs(logprobs),
        version_spans=spans,
        finish_reason="length" if truncated else "stop",
        text="",
        engine_id=engine_id,
        started_ns=0,
        finished_ns=1,
    )


def make_group(rollouts: Sequence[Rollout], kept_rewards: Sequence[float], lost_rewards: Sequence[float] = ()) -> Group:
    """A chain whose first draws, `lost_rewards`, are not kept."""
    verdicts = tuple(Verdict("correct" if reward else "incorrect", reward) for reward in kept_rewards)
    chain_rewards = (*lost_rewards, *kept_rewards)
    first = len(lost_rewards)
    return Group(
        chain_id=0,
        problem=Problem("p", "test", "1", "1"),
        rollouts=tuple(rollouts),
        verdicts=verdicts,
        draw_indices=tuple(range(first, first + len(rollouts))),
        chain_rewards=chain_rewards,
        round_sizes=(len(chain_rewards),),
    )


def random_groups(
    model: PreTrainedModel,
    seed: int,
    num_groups: int = 4,
    group_size: int = 4,
    temperature: float = 1.0,
    drift: float = 0.0,
) -> list[Group]:
    """Mixed groups of random lengths; engine logprobs are the model's own plus normal noise of scale `drift`."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        prompt = rng.integers(3, VOCAB_SIZE, size=rng.integers(1, 6))
        rollouts = []
        for number in range(group_size):
            completion = rng.integers(0, VOCAB_SIZE, size=rng.integers(1, 12))
            logprobs = own_logprobs(model, prompt, completion, temperature)
            logprobs = logprobs + drift * rng.normal(size=completion.size)
            rollouts.append(make_rollout(prompt, completion, logprobs, attempt_id=index * group_size + number))
        rewards = [float(number % 2 == 0) for number in range(group_size)]
        groups.append(make_group(rollouts, rewards, lost_rewards=[0.0, 0.0]))
    return groups
