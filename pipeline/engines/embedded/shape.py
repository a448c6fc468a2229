"""Which models the embedded engine covers, and the tensors each of them must bring."""

from typing import Any

import msgspec

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Frequencies that are fixed before the first token; "dynamic" and "longrope" change with the sequence's length.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")


def why_not_covered(config: Any) -> str | None:
    """The first reason that a Hugging Face config is out of reach, or None."""
    if config.model_type not in ARCHITECTURES:
        return f"architecture {config.model_type!r} is not one of {', '.join(ARCHITECTURES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not silu"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window layers"
    rope = config.rope_parameters
    if rope["rope_type"] not in _FIXED_ROPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rotary embedding {rope['rope_type']!r} is not a full one of {', '.join(_FIXED_ROPES)}"
    return None


class ModelShape(msgspec.Struct, frozen=True):
    """The sizes of a covered decoder-only model (pre-norm, grouped-query attention, gated MLP)."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    head_dim: int
    ff: int
    vocab: int
    max_tokens: int
    norm_eps: float
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        attention_bias = getattr(config, "attention_bias", False)
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            hidden=config.hidden_size,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            ff=config.intermediate_size,
            vocab=config.vocab_size,
            max_tokens=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            tied_head=config.tie_word_embeddings,
            qkv_bias=config.model_type == "qwen2" or attention_bias,
            out_bias=config.model_type != "qwen2" and attention_bias,
            mlp_bias=config.model_type == "llama" and config.mlp_bias,
            qk_norm=config.model_type == "qwen3",
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names (as transformers has them) and shapes of all weights."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {prefix + name: shape for name, shape in self._layer_tensors().items()}
        return shapes

    def _layer_tensors(self) -> dict[str, tuple[int, ...]]:
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = [
            ("self_attn.q_proj", query, self.hidden, self.qkv_bias),
            ("self_attn.k_proj", key_value, self.hidden, self.qkv_bias),
            ("self_attn.v_proj", key_value, self.hidden, self.qkv_bias),
            ("self_attn.o_proj", self.hidden, query, self.out_bias),
            ("mlp.gate_proj", self.ff, self.hidden, self.mlp_bias),
            ("mlp.up_proj", self.ff, self.hidden, self.mlp_bias),
            ("mlp.down_proj", self.hidden, self.ff, self.mlp_bias),
        ]
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }
        for name, rows, columns, bias in linears:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes
