"""Every engine by its config: `[engines] kind = "..."`. Implementations are imported when one is made, not before."""

from typing import Any, Literal

from pipeline.config import EnginesConfig
from pipeline.engines.base import Engine
from pipeline.errors import ConfigError


def make_engine(
    config: EnginesConfig,
    model_dir: str,
    seed: int,
    chat_template: Literal["auto", "never"],
    engine_id: str = "engine",
) -> Engine:
    """An engine without weights for the model whose config.json and tokenizer lie in `model_dir`.

    "auto" is the embedded engine where there is no GPU and it covers the architecture, else transformers. Raises
    ConfigError when the chosen engine cannot run the model.
    """
    if config.kind == "fake":
        from pipeline.engines.fake import FakeEngine

        return FakeEngine(config.slots, seed, engine_id)

    if config.kind == "sglang":
        return _make_sglang(config, model_dir, seed, chat_template, engine_id)

    from pipeline.engines.batching import BatchingEngine
    from pipeline.engines.embedded.shape import why_not_covered
    from pipeline.tokenization import PromptCodec

    model_config = _read_model_config(model_dir)
    reason = why_not_covered(model_config)
    if reason and config.kind == "embedded":
        raise ConfigError(f"engines.kind = embedded cannot run {model_dir}: {reason}; set engines.kind = transformers")
    if reason or not may_be_embedded(config):
        import torch

        from pipeline.engines.transformers_engine import TransformersDecoder

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        decoder = TransformersDecoder(model_config, config.slots, device)
    else:
        from pipeline.engines.embedded.decoder import EmbeddedDecoder

        decoder = EmbeddedDecoder(model_config, config.slots)
    return BatchingEngine(decoder, PromptCodec(model_dir, chat_template), config.slots, seed, engine_id)


def may_be_embedded(config: EnginesConfig) -> bool:
    """Whether the engine is the embedded one, if that covers the model."""
    if config.kind != "auto":
        return config.kind == "embedded"
    import torch

    return not torch.cuda.is_available()


def _make_sglang(
    config: EnginesConfig, model_dir: str, seed: int, chat_template: Literal["auto", "never"], engine_id: str
) -> Engine:
    import torch

    from pipeline.engines.sglang.engine import SGLangEngine
    from pipeline.engines.sglang.server import make_server
    from pipeline.tokenization import PromptCodec

    number = engine_id.rpartition("-")[2]
    server = make_server(config, model_dir, int(number) if number.isdecimal() else 0, seed)
    served = {gpu for index in range(config.count) for gpu in config.gpus_of(index)}
    num_spare_gpus = len(set(range(torch.cuda.device_count())) - served)
    return SGLangEngine(config, PromptCodec(model_dir, chat_template), server, engine_id, num_spare_gpus)


def _read_model_config(model_dir: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as e:
        first_line = str(e).strip().splitlines()[0]
        raise ConfigError(
            f"{model_dir}: its config.json describes no model that transformers knows: {first_line}"
        ) from None
