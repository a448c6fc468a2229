"""The sizes of a model that decide what it costs, from a Hugging Face directory or by hand."""

import math
from typing import Any

import msgspec

from pipeline.errors import ConfigError
from pipeline.model_path import resolve_model_path


class ModelSize(msgspec.Struct, frozen=True):
    """`params` in all, of which `active` work on each token (the output matrix does, the embedding of inputs does not;
    of a mixture of experts, those that a token is sent to). `kv_width`: key heads times their width.
    """

    name: str
    params: float
    active: float
    layers: int
    width: int
    kv_width: int

    def weight_bytes(self, bytes_per_param: int) -> float:
        return self.params * bytes_per_param

    def kv_bytes(self, bytes_per_number: int) -> float:
        """Of one token: a key and a value in every layer."""
        return 2.0 * bytes_per_number * self.layers * self.kv_width


def read_model(text: str) -> ModelSize:
    """A model directory, "builtin", or `P,l,d`: parameters, layers and width, as in "7.6e9,28,3584".

    By hand the keys are taken to be as wide as the model, which overstates the cache where heads share them. Raises
    ConfigError for anything else.
    """
    parts = text.split(",")
    if len(parts) == 3:
        try:
            params, layers, width = float(parts[0]), int(parts[1]), int(parts[2])
        except ValueError:
            raise ConfigError(f"--model {text}: by hand it is parameters,layers,width, as in 7.6e9,28,3584") from None
        if not (0 < params < math.inf and layers > 0 and width > 0):
            raise ConfigError(f"--model {text}: parameters, layers and width are numbers above 0")
        return ModelSize(text, params, params, layers, width, width)
    path = resolve_model_path(text, "--model") / "config.json"
    try:
        return size_of(text, msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except FileNotFoundError:
        raise ConfigError(f"--model {text}: no config.json there; or give parameters,layers,width") from None
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path}: not a model's config ({e})") from None
    except KeyError as e:
        raise ConfigError(f"{path}: has no {e}; give parameters,layers,width instead") from None


def size_of(name: str, config: dict[str, Any]) -> ModelSize:
    """Counts the matrices of a decoder with gated feed-forward layers (Llama, Qwen, Mistral and their mixtures)."""
    config = config.get("text_config", config)
    width, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_width = config.get("head_dim") or width // heads
    kv_width = (config.get("num_key_value_heads") or heads) * head_width
    attention = 2 * width * heads * head_width + 2 * width * kv_width
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    used = config.get("num_experts_per_tok") or 1 if experts > 1 else 1
    inner = config.get("moe_intermediate_size") if experts > 1 else None
    expert = 3 * width * (inner or config["intermediate_size"])
    tied = config.get("tie_word_embeddings", False)
    params = layers * (attention + experts * expert) + vocab * width * (1 if tied else 2)
    active = layers * (attention + used * expert) + vocab * width
    return ModelSize(name, float(params), float(active), layers, width, kv_width)
