"""Low-rank adapters (LoRA, arXiv 2106.09685): trained beside frozen weights, published as the weights they make."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ConfigError
from pipeline.learner_config import LoraConfig

_BASE, _DOWN, _UP = "base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze `model` and put an adapter beside every linear layer but the head; raises ConfigError without peft.

    W x becomes W x + (alpha / rank) B A x with B = 0 at first, so the policy is still the same.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError(
            "learner.lora.rank needs the package peft: pip install 'peft>=0.17', or set it to 0"
        ) from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # every rank begins with the same A
        settings = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules="all-linear", lora_dropout=0.0)
        inject_adapter_in_model(settings, model)


def adapter_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a model's tensors that are adapters."""
    return {name: tensor for name, tensor in state.items() if name.endswith((_DOWN, _UP))}


def merged(state: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """The tensors of the model without adapters that computes the same: W + (alpha / rank) B A under W's old name."""
    plain = {}
    for name, tensor in state.items():
        if name.endswith(_BASE):
            layer = name.removesuffix(_BASE)
            tensor = tensor + config.alpha / config.rank * (state[layer + _UP] @ state[layer + _DOWN])
        if not name.endswith((_DOWN, _UP)):
            plain[name.replace(".base_layer.", ".")] = tensor
    return plain
