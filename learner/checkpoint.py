"""The learner's part of a checkpoint: exact weights, optimizer, random state and counters, sealed by a manifest.

`DIR/model/` is an ordinary Hugging Face directory, so a checkpoint is also what `[model] path` can name. The manifest
is written last and names every file with its size and checksum, so a part that was torn at any byte is refused.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from learner.adapters import add_adapters
from learner.copies import Copies
from learner.learner import Learner
from learner.model import checkpoint_layers, find_model, load_model, load_reference, save_tokenizer, shard_policy
from learner.ranks import Ranks, alone
from pipeline.config import Config
from pipeline.errors import WeightError
from pipeline.manifest import MANIFEST, verify_manifest, write_manifest

MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
ADAPTERS = "adapters.safetensors"
COUNTERS = "learner.json"
CRITIC = "critic.safetensors"
_RNG = "rng"


class Counters(msgspec.Struct, frozen=True):
    policy_version: int
    num_skipped: int
    num_skipped_in_a_row: int


def save_checkpoint(directory: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the learner's part into `directory`, replacing what an interrupted try left there.

    With several ranks all of them call it, the first one writes, and any number of ranks can go on from it.
    """
    weights, adapters, optimizer = learner.state_dict(), learner.adapter_tensors(), learner.optimizer_tensors()
    if not learner.ranks.is_first:
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory / MODEL, ignore_errors=True)
    (directory / ADAPTERS).unlink(missing_ok=True)
    learner.model.save_pretrained(directory / MODEL, state_dict=weights)
    save_tokenizer(tokenizer, directory / MODEL)
    if adapters:
        save_file(adapters, directory / ADAPTERS)
    save_file(optimizer | {_RNG: torch.get_rng_state()}, directory / OPTIMIZER)
    if learner.critic is not None:
        save_file(learner.critic.tensors(), directory / CRITIC)
    counters = Counters(learner.policy_version, learner.num_skipped, learner.num_skipped_in_a_row)
    (directory / COUNTERS).write_bytes(msgspec.json.encode(counters))
    write_manifest(directory, _parts(directory))


def open_learner(
    config: Config, checkpoint: Path | None, ranks: Ranks | None = None
) -> tuple[Learner, PreTrainedTokenizerBase]:
    """The learner of a run as it stood at one of its checkpoints, or (None) before its first step.

    Raises WeightError for a torn checkpoint and ConfigError for a model that cannot be loaded.
    """
    ranks = ranks or alone()
    with Copies(ranks) as copies:
        if checkpoint is not None:
            checkpoint = Path(copies.here(str(checkpoint), _find_checkpoint))
            verify_manifest(checkpoint)
        if checkpoint is None or config.learner.lora.rank:
            # Adapters are trained on the weights that the run began with; MODEL holds those already merged.
            path = copies.here(config.model.path, find_model)
        else:
            path = str(checkpoint / MODEL)
        model, tokenizer = load_model(path, ranks.device)
        reference = None
        if config.learner.kl.coef:
            reference = load_reference(copies.here(reference_path(config), find_model), model)
        if config.learner.lora.rank:
            add_adapters(model, config.learner.lora)
        if config.learner.gradient_checkpointing:
            checkpoint_layers(model)
        if ranks.shards:
            shard_policy(model, ranks)
        learner = Learner(model, config.learner, config.sampling.temperature, reference=reference, ranks=ranks)
        if checkpoint is not None:
            load_checkpoint(checkpoint, learner)
    return learner, tokenizer


def reference_path(config: Config) -> str:
    """The policy that [learner.kl] stays close to."""
    return config.learner.kl.reference or config.model.path


def _find_checkpoint(path: str) -> tuple[Path, list[Path]]:
    directory = Path(path)
    verify_manifest(directory)
    return directory, [*_parts(directory), directory / MANIFEST]


def load_checkpoint(directory: Path, learner: Learner) -> None:
    """Give `learner`, whose model was loaded from `directory / MODEL`, the rest of its state back.

    Raises WeightError when the checkpoint is torn or its optimizer belongs to another model.
    """
    verify_manifest(directory)
    tensors = load_file(directory / OPTIMIZER)
    torch.set_rng_state(tensors.pop(_RNG))
    adapters = load_file(directory / ADAPTERS) if (directory / ADAPTERS).exists() else {}
    try:
        learner.load_adapter_tensors(adapters)
        learner.load_optimizer_tensors(tensors)
    except KeyError as e:
        raise WeightError(f"{directory / OPTIMIZER}: the model has no parameter {e}; it is another model's") from None
    if learner.critic is not None:
        try:
            learner.critic.load_tensors(load_file(directory / CRITIC))
        except (FileNotFoundError, KeyError, RuntimeError):
            raise WeightError(f"{directory / CRITIC}: missing, or of a critic of another shape") from None
    counters = msgspec.json.decode((directory / COUNTERS).read_bytes(), type=Counters)
    learner.policy_version = counters.policy_version
    learner.num_skipped = counters.num_skipped
    learner.num_skipped_in_a_row = counters.num_skipped_in_a_row


def _parts(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in (directory / MODEL).rglob("*") if path.is_file())
    if (directory / ADAPTERS).exists():
        yield directory / ADAPTERS
    yield directory / OPTIMIZER
    if (directory / CRITIC).exists():
        yield directory / CRITIC
    yield directory / COUNTERS
