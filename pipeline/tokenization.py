"""Text to token ids and back, one way for every engine."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import EngineError


class PromptCodec:
    """The tokenizer of `model_dir`, as rollouts use it.

    `eos_ids` end a completion: those of generation_config.json and the tokenizer's own.
    """

    def __init__(self, model_dir: Path | str, chat_template: Literal["auto", "never"] = "auto"):
        directory = Path(model_dir)
        self._tokenizer = _load_tokenizer(directory)
        self._use_template = chat_template == "auto" and bool(self._tokenizer.chat_template)
        # The rollouts of one problem arrive a few at a time, and encoding costs as much as decoding three tokens.
        self._encode = functools.lru_cache(maxsize=1024)(self._tokenize)
        eos = _generation_eos(directory / "generation_config.json")
        if self._tokenizer.eos_token_id is not None:
            eos.add(self._tokenizer.eos_token_id)
        self.eos_ids = frozenset(eos)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, up to where the completion begins."""
        return list(self._encode(prompt))

    def _tokenize(self, prompt: str) -> tuple[int, ...]:
        if self._use_template:
            messages = [{"role": "user", "content": prompt}]
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self._tokenizer(prompt).input_ids
        return tuple(ids)

    def encode_phrase(self, phrase: str) -> list[int]:
        """Token ids of a text that is put into a completion; EngineError if the vocabulary cannot spell it."""
        ids = self._tokenizer(phrase, add_special_tokens=False).input_ids
        if not ids or self._tokenizer.unk_token_id in ids:
            raise EngineError(
                f"the model's vocabulary cannot spell {phrase!r}; set sampling.interruption.phrase to another text",
                retryable=False,
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion without its end token; other special tokens stay, since answers may hold them."""
        if ids and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        # AutoTokenizer would put the pre-tokenizer it knows for the architecture in place of the one in the file.
        return PreTrainedTokenizerFast.from_pretrained(directory)
    if (directory / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    raise EngineError(
        f"{directory}: no tokenizer.json or tokenizer_config.json; save a tokenizer there", retryable=False
    )


def _generation_eos(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    ids = json.loads(path.read_text()).get("eos_token_id")
    return set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
