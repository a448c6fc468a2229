"""A version's weights in the layout that decoding wants: few, large matrices, in the orientation that they come in.

Transposed ones would be no faster with 64 rows or more (with a few they would), and cost ten times the copy at every
load.

Query and key dimensions are reordered so that the two halves a rotary embedding turns together are neighbours, which
makes the rotation one complex multiplication. Attention is blind to it: queries and keys are reordered alike.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.engines.embedded.shape import ModelShape
from pipeline.errors import WeightError
from pipeline.weights import WeightsStream


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ `matrix`.T + `bias`: [out, in] and [out]."""

    matrix: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.matrix.t())


@dataclass(frozen=True, slots=True)
class Layer:
    """`qk_norm` [heads + kv_heads, head_dim] scales each query and key head, if the architecture normalises them."""

    attention_norm: np.ndarray
    qkv: Linear
    qk_norm: np.ndarray | None
    out: Linear
    mlp_norm: np.ndarray
    gate_up: Linear
    down: Linear


class Weights:
    """Room for one version, filled by `load`; never modified while it serves.

    `places` has, by the name of each tensor of a state dict, the parts of our matrices that its rows go to. One that
    has two more dimensions than the tensor is of heads: [heads, 2, dim / 2, ...], for rows in the order (head, dim).
    """

    def __init__(self, shape: ModelShape):
        self._shape = shape
        self.places: dict[str, tuple[Tensor, ...]] = {}
        self.embedding = _empty(shape.vocab, shape.hidden)
        self.head = self.embedding if shape.tied_head else _empty(shape.vocab, shape.hidden)
        self.norm = self._norm("model.norm")
        self.places["model.embed_tokens.weight"] = (self.embedding,)
        self.places["lm_head.weight"] = (self.head,)
        self.layers = tuple(self._layer(f"model.layers.{i}.") for i in range(shape.num_layers))

    def load(self, weights: WeightsStream) -> None:
        """Copy a state dict (transformers' names, any float dtype) into float32; WeightError unless it fits exactly, or
        when the bytes were not the announced ones: what is here then is of no use.
        """
        try:
            check_fit({entry.name: tuple(entry.shape) for entry in weights.entries}, self._shape)
        except WeightError:
            weights.check()  # damage explains a misfit, not the other way round
            raise
        for name, row, rows in weights.parts(self._shape.head_dim):
            for place in self.places[name]:
                if place.dim() > rows.dim():
                    halves = place.shape[1:3]
                    part = rows.unflatten(0, (-1, *halves))
                    place[row // halves.numel() :][: len(part)].copy_(part)
                else:
                    weights.copy(rows, place[row : row + len(rows)])

    def _norm(self, name: str) -> np.ndarray:
        made = _empty(self._shape.hidden)
        self.places[f"{name}.weight"] = (made,)
        return made.numpy()

    def _layer(self, prefix: str) -> Layer:
        shape = self._shape
        query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def linear(num_inputs: int, has_bias: bool, *parts: tuple[str, int, bool]) -> Linear:
            """`parts`: name, number of outputs, whether they are heads to be turned."""
            num_outputs = sum(outputs for _, outputs, _ in parts)
            made = Linear(_empty(num_outputs, num_inputs), _empty(num_outputs) if has_bias else None)
            begin = 0
            for name, outputs, is_turned in parts:
                kinds = {"weight": made.matrix} | ({"bias": made.bias} if made.bias is not None else {})
                for kind, whole in kinds.items():
                    place = whole[begin : begin + outputs]
                    self.places[f"{prefix}{name}.{kind}"] = (self._paired(place) if is_turned else place,)
                begin += outputs
            return made

        return Layer(
            attention_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=linear(
                shape.hidden,
                shape.qkv_bias,
                ("self_attn.q_proj", query, True),
                ("self_attn.k_proj", key_value, True),
                ("self_attn.v_proj", key_value, False),
            ),
            qk_norm=self._qk_norm(prefix) if shape.qk_norm else None,
            out=linear(query, shape.out_bias, ("self_attn.o_proj", shape.hidden, False)),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up=linear(
                shape.hidden, shape.mlp_bias, ("mlp.gate_proj", shape.ff, False), ("mlp.up_proj", shape.ff, False)
            ),
            down=linear(shape.ff, shape.mlp_bias, ("mlp.down_proj", shape.hidden, False)),
        )

    def _qk_norm(self, prefix: str) -> np.ndarray:
        """One row a head: the same for all heads of the queries, and of the keys."""
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        made = _empty(heads + kv_heads, self._shape.head_dim)
        places = [self._paired(row) for row in made]
        self.places[f"{prefix}self_attn.q_norm.weight"] = tuple(places[:heads])
        self.places[f"{prefix}self_attn.k_norm.weight"] = tuple(places[heads:])
        return made.numpy()

    def _paired(self, place: Tensor) -> Tensor:
        """[heads, 2, dim / 2, ...]: rows of each head in the order (0, D/2, 1, D/2 + 1, ...) as (0, 1, ..., D-1)."""
        return place.unflatten(0, (-1, self._shape.head_dim // 2, 2)).transpose(1, 2)


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


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


def rotations(config: Any, num_positions: int) -> Tensor:
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
    return torch.polar(torch.full_like(angles, magnitude), angles)
