"""Whether completions fit into the model, as far as it can be said before anything is sampled."""

import msgspec

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.model_path import resolve_model_path
from samplers.never_give_up import NeverGiveUpConfig

MAX_SEQ_MULTIPLIER = 4  # as far as the guard `continue_truncated` goes


def check_room(config: Config) -> None:
    """Raise ConfigError where completions leave no room for a prompt: every attempt would fail later.

    Not where the limit is another one: a server sets its own, and a .gguf file is not read here.
    """
    file = resolve_model_path(config.model.path) / "config.json"
    if config.engines.kind in ("sglang", "fake") or not file.is_file():
        return
    try:
        room = msgspec.json.decode(file.read_bytes(), type=dict).get("max_position_embeddings")
    except msgspec.DecodeError:
        return  # whoever loads the model says what is wrong with it
    may_grow = "continue_truncated" in config.guards.starvation and isinstance(config.sampler, NeverGiveUpConfig)
    times = getattr(config.sampler, "seq_multiplier", 1)
    longest = config.sampling.max_new_tokens * (max(times, MAX_SEQ_MULTIPLIER) if may_grow else times)
    if isinstance(room, int) and longest >= room:
        raise ConfigError(
            f"sampling.max_new_tokens: completions of {longest} tokens and their prompts do not fit into the {room} "
            "positions of the model; lower it, or sampler.seq_multiplier, or leave continue_truncated out of the guards"
        )
