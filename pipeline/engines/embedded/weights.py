"""A version's weights in the layout that decoding wants: few, large, transposed matrices.

Query and key dimensions are reordered so that the two halves a rotary embedding turns together are neighbours, which
makes the rotation one complex multiplication. Attention is blind to it: queries and keys are reordered alike.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.embedded.shape import ModelShape
from pipeline.errors import WeightError


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ `matrix` [in, out] + `bias` [out]."""

    matrix: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.matrix if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.matrix)


@dataclass(frozen=True, slots=True)
class Layer:
    """`qk_norm` [heads + kv_heads, head_dim] scales each query and key head, if the architecture normalises them."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """One version, never modified: a load builds the next object and swaps it in with one assignment."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def build_weights(tensors: dict[str, Tensor], shape: ModelShape, device: torch.device) -> Weights:
    """Copy a state dict (transformers' names, any float dtype) into float32; WeightError unless it fits exactly."""
    check_fit({name: tuple(t.shape) for name, t in tensors.items()}, shape)
    state = {name: t.to(device, torch.float32) for name, t in tensors.items()}
    embedding = state["model.embed_tokens.weight"].clone()
    head = embedding if shape.tied_head else state["lm_head.weight"]
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(state, f"model.layers.{i}.", shape) for i in range(shape.num_layers)),
        norm=state["model.norm.weight"].clone(),
        head=head.t().contiguous(),
    )


def check_fit(found: dict[str, tuple[int, ...]], shape: ModelShape) -> None:
    """Every tensor of the model and no other, except a tied head's second name."""
    expected = shape.tensors()
    if shape.tied_head and "lm_head.weight" in found:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise WeightError(
                f"tensor {name}: the model has {expected.get(name, 'none')}, the weights {found.get(name, 'none')}; "
                "publish the weights of the model that config.json describes"
            )


def _layer(state: dict[str, Tensor], prefix: str, shape: ModelShape) -> Layer:
    def fused(*names: str, rotary: tuple[str, ...] = ()) -> Linear:
        matrices = [_paired(state[f"{prefix}{n}.weight"], shape, n in rotary) for n in names]
        biases = [
            _paired(state[f"{prefix}{n}.bias"], shape, n in rotary) for n in names if f"{prefix}{n}.bias" in state
        ]
        return Linear(torch.cat(matrices).t().contiguous(), torch.cat(biases) if biases else None)

    query, key, value = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    qk_norm = None
    if shape.qk_norm:
        norms = [("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads)]
        rows = [_paired(state[f"{prefix}self_attn.{n}.weight"], shape, True).expand(heads, -1) for n, heads in norms]
        qk_norm = torch.cat(rows)
    return Layer(
        attention_norm=state[f"{prefix}input_layernorm.weight"].clone(),
        qkv=fused(query, key, value, rotary=(query, key)),
        qk_norm=qk_norm,
        out=fused("self_attn.o_proj"),
        mlp_norm=state[f"{prefix}post_attention_layernorm.weight"].clone(),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def _paired(tensor: Tensor, shape: ModelShape, rotary: bool) -> Tensor:
    """Rows of each head from order (0, 1, ..., D-1) to (0, D/2, 1, D/2 + 1, ...), for rotary projections."""
    if not rotary:
        return tensor
    return tensor.unflatten(0, (-1, 2, shape.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def rotations(config: Any, num_positions: int, device: torch.device) -> Tensor:
    """e^(i * position * frequency), complex64 [num_positions, head_dim / 2] (RoPE, arXiv:2104.09864).

    Scaled variants take their frequencies and magnitude from transformers, so that both sides agree.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        dim = ModelShape.of(config).head_dim
        frequencies, magnitude = rope["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.polar(torch.full_like(angles, magnitude), angles).to(device)
