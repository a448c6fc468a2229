"""Text to token ids and back, one way for every engine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipeline.errors import EngineError


class PromptCodec:
    """The tokenizer of `model_dir`, as rollouts use it.

    `eos_ids` end a completion: those of generation_config.json and the tokenizer's own. `pad_id` is any id that is safe
    to fill with.
    """

    def __init__(self, model_dir: Path | str, chat_template: Literal["auto", "never"] = "auto"):
        from transformers import AutoTokenizer

        directory = Path(model_dir)
        if not (directory / "tokenizer_config.json").is_file():
            # Without this check transformers would take the path for the name of a model to download.
            raise EngineError(f"{directory}: no tokenizer_config.json; save the tokenizer there", retryable=False)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._use_template = chat_template == "auto" and bool(self._tokenizer.chat_template)
        eos = _generation_eos(directory / "generation_config.json")
        if self._tokenizer.eos_token_id is not None:
            eos.add(self._tokenizer.eos_token_id)
        self.eos_ids = frozenset(eos)
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else min(eos, default=0)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, up to where the completion begins."""
        if self._use_template:
            messages = [{"role": "user", "content": prompt}]
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return self._tokenizer(prompt).input_ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion without its end token; other special tokens stay, since answers may hold them."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _generation_eos(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    ids = json.loads(path.read_text()).get("eos_token_id")
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
