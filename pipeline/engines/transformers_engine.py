"""The `Decoder` for any causal language model of transformers, through the model's own forward pass and cache.

The library's ContinuousBatchingManager can pause for weights and report logprobs, but it runs in a thread of its own:
tokens come when they come, drawn from the process-wide generator, so a version starts at no known token unless every
load waits for a pause, and a seed repeats nothing. Here the rows of one admission form a wave with a left-padded
cache, as in `generate`, which every model with a key-value cache supports.
"""

import inspect
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from pipeline.errors import ConfigError, WeightError
from pipeline.messages import WeightsNotice
from pipeline.weights import read_weights


class TransformersDecoder:
    """Waves advance together, one forward pass each; a wave shrinks as its rows end and is gone with the last."""

    def __init__(self, config: Any, slots: int, device: torch.device):
        self.device = device
        self.max_tokens: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        # Every wave costs a forward pass a token, so a new one waits until it is worth at least a quarter of the slots.
        self.min_admit = max(1, slots // 4)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).eval()
        self._accepts = inspect.signature(self._model.forward).parameters.keys()
        # transformers 5.24 renamed the argument; both names are in use across versions and architectures.
        self._cache_name = next((n for n in ("cache", "past_key_values") if n in self._accepts), "")
        if not self._cache_name:
            raise ConfigError(f"architecture {config.model_type!r} has no key-value cache; choose another model")
        self._waves: list[_Wave] = []

    def load(self, notice: WeightsNotice) -> None:
        tensors = read_weights(notice)
        own = self._model.state_dict()
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                has = tuple(own[name].shape) if name in own else "none"
                raise WeightError(
                    f"tensor {name}: the model has {has}, the weights {tuple(tensor.shape)}; "
                    "publish the weights of the model that config.json describes"
                )
        given = {own[name].data_ptr() for name in tensors}
        absent = [name for name, tensor in own.items() if tensor.data_ptr() not in given]
        if absent:
            raise WeightError(f"{len(absent)} tensors are not in the weights, such as {absent[0]}; publish all of them")
        for name, tensor in tensors.items():
            own[name].copy_(tensor)

    def score(self, ids: Tensor) -> Tensor:
        logits = self._model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None]).squeeze(1)

    def admit(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> None:
        self._waves.append(_Wave(prompts, DynamicCache(config=self._model.config), self.device))

    def decode(self, tokens: Tensor) -> Tensor:
        parts = tokens.split([wave.num_rows for wave in self._waves])
        return torch.cat([self._advance(wave, part) for wave, part in zip(self._waves, parts, strict=True)])

    def retire(self, rows: Collection[int]) -> list[int]:
        order = []
        first = 0
        for wave in self._waves:
            kept = [i for i in range(wave.num_rows) if first + i not in rows]
            order += [first + i for i in kept]
            first += wave.num_rows
            wave.select(kept)
        self._waves = [wave for wave in self._waves if wave.num_rows]
        return order

    def _advance(self, wave: "_Wave", tokens: Tensor) -> Tensor:
        ids = wave.next_ids(tokens)
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": wave.mask,
            "use_cache": True,
            self._cache_name: wave.cache,
        }
        if "position_ids" in self._accepts:
            positions = (wave.mask.cumsum(dim=1) - 1).clamp_(min=0)
            inputs["position_ids"] = positions[:, -ids.shape[1] :]
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = 1
        logits = self._model(**inputs).logits[:, -1].float()
        return logits[wave.expand_prompts()] if wave.is_new else logits


class _Wave:
    """Rows admitted together. New, it holds each distinct prompt once; its first pass expands them to one row each."""

    def __init__(self, prompts: Sequence[Sequence[int]], cache: DynamicCache, device: torch.device):
        self.cache = cache
        self.is_new = True
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        index = {prompt: i for i, prompt in enumerate(distinct)}
        self._prompt_of_row = torch.tensor([index[tuple(p)] for p in prompts], device=device)
        longest = max(map(len, distinct))
        self._prompt_ids = torch.zeros(len(distinct), longest, dtype=torch.long)
        self.mask = torch.zeros_like(self._prompt_ids)
        for i, prompt in enumerate(distinct):
            self._prompt_ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            self.mask[i, longest - len(prompt) :] = 1
        self._prompt_ids, self.mask = self._prompt_ids.to(device), self.mask.to(device)

    @property
    def num_rows(self) -> int:
        return len(self._prompt_of_row)

    def next_ids(self, tokens: Tensor) -> Tensor:
        """What the next pass reads: whole prompts at first, then the newest token of each row."""
        if self.is_new:
            return self._prompt_ids
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        return tokens[:, None]

    def expand_prompts(self) -> Tensor:
        """One row a request from now on; returns the prompt's index of each."""
        self.is_new = False
        self._take(self._prompt_of_row)
        return self._prompt_of_row

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if len(rows) == self.num_rows:
            return
        index = torch.tensor(rows, dtype=torch.long, device=self.mask.device)
        self._prompt_of_row = self._prompt_of_row[index]
        if not self.is_new and rows:
            self._take(index)

    def _take(self, index: Tensor) -> None:
        # The name is beam search's; of the cache's ways to pick rows it is the one that every kind of layer has.
        self.cache.reorder_cache(cast(torch.LongTensor, index))
        self.mask = self.mask[index]
