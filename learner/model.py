"""A policy: a Hugging Face causal language model in float32, and logprobs of completions under it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from learner.packing import TokenBatch, collate
from learner.ranks import Ranks
from learner.sharding import shard
from learner.shared_prompts import SHARED_PROMPTS, last_hidden, may_share, shares_prompts
from pipeline.errors import ConfigError
from pipeline.model_path import resolve_model_path

# Logits held at a time: 2**24 in float32 are 64 MiB, however large the vocabulary and however long the completions.
MAX_LOGITS = 1 << 24
# Tensors of that size alive at the worst moment: log-softmax, its gradient, and two that turn one into the other.
LOGITS_BUFFERS = 4
CANARY_TOKENS = 32
SHARDED_LOGPROBS, SHARDED_HIDDEN = "sharded_completion_logprobs", "sharded_completion_hidden"
# Rounding of float32 matmuls of different shapes stays well below this; a head that scales or caps its logits does not.
HEAD_TOLERANCE = 1e-3
# Of the length of a hidden state, of which rounding is a millionth or so.
HIDDEN_TOLERANCE = 1e-3


def load_model(path: str, device: torch.device | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32 master weights, on `device`, or on the GPU if there is one) and tokenizer; raises ConfigError in
    one line.

    Evaluation mode stays on in training: the ratio to the engine is only right without dropout.
    """
    found = resolve_model_path(path)
    directory, file, unpack = found, {}, {}
    if found.is_file():
        directory, file = found.parent, {"gguf_file": found.name}
        # Packed blocks cannot be trained, and a model that remembers having had them cannot be saved.
        unpack = {"quantization_config": GgufConfig(dequantize=True)}
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True, **file, **unpack
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, **file)
    except Exception as e:  # transformers, safetensors and tokenizers each raise kinds of their own for a bad file
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ConfigError(f"model.path {path}: cannot be loaded as a causal language model: {reason}") from e
    model, info = loaded
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise ConfigError(f"model.path {path}: {len(absent)} weights are missing or misshapen, such as {absent[0]}")
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes of absent files
        raise ConfigError(f"model.path {path}: the tokenizer is missing or empty (tokenizer.json)")
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    check_head(model)
    return model, tokenizer


def find_model(path: str) -> tuple[Path, list[Path]]:
    """What [model] path leads to, and the files that make it up; raises ConfigError when there is nothing to load."""
    found = resolve_model_path(path)
    return found, [found] if found.is_file() else sorted(file for file in found.iterdir() if file.is_file())


def peak_bytes(num_parameters: int, kept_bytes: int, num_targets: int, vocab_size: int) -> int:
    """What one forward and backward pass adds to a float32 model at its worst moment, in bytes.

    4 P for the gradients of P parameters, the activations that the decoder layers keep (`kept_bytes`), and
    LOGITS_BUFFERS x 4 B x min(N V, MAX_LOGITS) for the head, however many of the N targets there are.
    """
    logits = min(num_targets * vocab_size, max(MAX_LOGITS, vocab_size))
    return 4 * num_parameters + kept_bytes + LOGITS_BUFFERS * 4 * logits


def export_model_dir(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config, generation config and tokenizer, but no weights, for the engines; complete or not there at all."""
    if directory.exists():
        return  # a restarted learner trains the same model, and engines may be reading it
    partial = directory.with_name(f".{directory.name}.partial")
    model.config.architectures = [type(model).__name__]  # a model read from a .gguf file has none
    model.config.save_pretrained(partial)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(partial)
    save_tokenizer(tokenizer, partial)
    partial.rename(directory)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer with the very `tokenizer.json` it was loaded from.

    transformers 5 puts the architecture's usual pre-tokenizer in place of a custom one and would save that.
    """
    original = Path(tokenizer.name_or_path) / "tokenizer.json"
    exact = original.read_bytes() if original.is_file() else None  # before saving: it may lie where it is saved to
    tokenizer.save_pretrained(directory)
    if exact is not None:
        (directory / "tokenizer.json").write_bytes(exact)


def completion_hidden(model: PreTrainedModel, batch: TokenBatch, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, H] last hidden states at `batch.positions`, from which the targets are predicted, computed in `dtype`."""
    sharded = getattr(model, SHARDED_HIDDEN, None)
    return sharded(batch, dtype) if sharded is not None else _hidden(model, batch, dtype)


def share_prompts(model: PreTrainedModel) -> bool:
    """From now on compute what rollouts have in common once, if `model` then computes the same; whether it does.

    An architecture may look from token to token by other ways than its attention, which only trying shows.
    """
    if not may_share(model):
        return False
    ids = canary_batch(model)[0].cpu().numpy()
    half = len(ids) // 2  # no rollout of the trial is longer than the canary: there may be no more positions
    completions = [ids[half:], ids[: half // 2 + 1], ids[1:]]
    batch = collate([ids[:half], ids[:half], ids[:1]], completions).to(model.device)
    before: Any = model.config._attn_implementation
    with torch.no_grad():
        apart = completion_hidden(model, batch)
        try:
            model.set_attn_implementation(SHARED_PROMPTS)
            together = completion_hidden(model, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever an architecture makes of arguments that it does not know
            together = torch.full_like(apart, torch.nan)
    # The scale of hidden states is the model's own: some are a hundred times as long as others.
    errors, lengths = (torch.linalg.vector_norm(x, dim=-1) for x in (together - apart, apart))
    if shares_prompts(model) and bool((errors <= HIDDEN_TOLERANCE * lengths).all()):
        return True
    model.set_attn_implementation(before)
    return False


def _hidden(model: PreTrainedModel, batch: TokenBatch, dtype: torch.dtype) -> Tensor:
    with torch.autocast(batch.input_ids.device.type, dtype, enabled=dtype != torch.float32):
        hidden = last_hidden(model, batch) if shares_prompts(model) else _padded(model, batch)
    return hidden.index_select(0, batch.positions)


def _padded(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """[N, H] last hidden states, from one row for each rollout, padded to the longest of all."""
    widest = max(width for _, width in batch.rows.shapes)
    blocks = batch.rows.blocks(batch.rows.tokens)
    table = torch.cat([pad(block, (0, widest - block.shape[1]), value=-1) for block in blocks])
    hidden = model.base_model(input_ids=batch.input_ids[table.clamp(min=0)], use_cache=False).last_hidden_state
    return hidden[table >= 0].index_select(0, batch.rows.places)


def completion_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    temperature: float,
    max_logits: int = MAX_LOGITS,
    entropy_gradient: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """log pi_T(y_t | prompt, y_<t) of every target, and the entropy of the distribution it was drawn from, in nats.

    pi_T is softmax(logits / temperature) over the full vocabulary, as the engine samples it, from float32 logits (in a
    float64 model: float64). Only completion positions go through the head. At most `max_logits` logits exist at a
    time: beyond that the positions are cut into chunks whose logits are recomputed in the backward pass. Of a float32
    model, everything before the head is computed in `dtype` (autocast).

    Returns:
        [N] logprobs with gradient, [N] entropies without unless `entropy_gradient`, in the order of `batch.targets`.
    """
    sharded = getattr(model, SHARDED_LOGPROBS, None)
    if sharded is not None:
        return sharded(batch, temperature, max_logits, entropy_gradient, dtype)
    return _completion_logprobs(model, batch, temperature, max_logits, entropy_gradient, dtype)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the inputs of each decoder layer for the backward pass, which computes the rest again.

    transformers does so in training mode alone, and that would turn dropout on. Raises ConfigError for an architecture
    whose layers are not marked.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"learner.gradient_checkpointing: not supported for model type {model.config.model_type!r}")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard_policy(model: PreTrainedModel, ranks: Ranks) -> None:
    """Split `model` over the ranks in place; from then on all of them call `completion_logprobs` at the same time."""
    share_prompts(model)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropies = _completion_logprobs(*args)
        return logprobs.clone(), entropies.clone()  # FSDP2 hangs its hooks on the outputs, which must not be views

    shard(model, ranks, {SHARDED_LOGPROBS: forward, SHARDED_HIDDEN: _hidden})


def _completion_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    temperature: float,
    max_logits: int,
    entropy_gradient: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    assert batch.positions.shape == batch.targets.shape and batch.positions.ndim == 1
    hidden = _hidden(model, batch, dtype)
    head: Any = model.get_output_embeddings()
    chunk = max(1, max_logits // head.weight.shape[0])
    if hidden.shape[0] <= chunk:
        return _head_logprobs(hidden, head.weight, head.bias, batch.targets, temperature, entropy_gradient)
    parts: list[tuple[Tensor, Tensor]] = [
        checkpoint(
            _head_logprobs, part, head.weight, head.bias, targets, temperature, entropy_gradient, use_reentrant=False
        )
        for part, targets in zip(hidden.split(chunk), batch.targets.split(chunk), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])


def _head_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = logits / temperature
    all_logprobs = torch.log_softmax(logits, dim=-1)
    del logits  # each of these is a whole chunk of logits: see LOGITS_BUFFERS
    logprobs = all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A token of probability 0 adds 0, not 0 * inf, and its gradient likewise.
        finite = all_logprobs.clamp(min=torch.finfo(dtype).min)
        entropies = -torch.linalg.vecdot(finite.exp(), finite)
    return logprobs, entropies


def num_token_ids(model: PreTrainedModel) -> int:
    """Rows of the embedding: a token id is below this, in a vocabulary that may be smaller."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def canary_batch(model: PreTrainedModel) -> tuple[Tensor, TokenBatch]:
    """Token ids, [T] int64, that depend on the vocabulary only, and the batch that predicts all but the first."""
    num_ids = num_token_ids(model)
    length = min(CANARY_TOKENS, getattr(model.config, "max_position_embeddings", CANARY_TOKENS))
    ids = (torch.arange(length, dtype=torch.int64) * 7919 + 1) % num_ids  # a prime step visits distinct tokens
    batch = collate([ids[:1].numpy()], [ids[1:].numpy()])
    return ids.to(model.device), batch.to(model.device)


def load_reference(path: str, model: PreTrainedModel) -> PreTrainedModel:
    """The frozen model that `model` is held near to; raises ConfigError where their vocabularies differ."""
    reference, _ = load_model(path, model.device)
    theirs, ours = num_token_ids(reference), num_token_ids(model)
    if theirs != ours:
        raise ConfigError(f"learner.kl.reference {path}: its vocabulary has {theirs} tokens, the policy's {ours}")
    return reference.requires_grad_(False)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ConfigError when the model's logits are not a plain linear map of its last hidden state.

    Some architectures scale or soft-cap their logits after the head; `completion_logprobs` would be silently wrong.
    """
    ids, batch = canary_batch(model)
    ours, _ = completion_logprobs(model, batch, 1.0)
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].to(ours.dtype)
    theirs = torch.log_softmax(logits, dim=-1).gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
    if not torch.allclose(ours, theirs, atol=HEAD_TOLERANCE, rtol=0.0, equal_nan=True):
        kind = model.config.model_type
        raise ConfigError(f"model type {kind!r} transforms its logits after the head, which training does not support")
