"""What a run needs of its verifier, checked before the run exists."""

import msgspec

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.tasks.registry import CodeConfig
from pipeline.verifiers.custom import resolve_reward
from pipeline.verifiers.sandbox import refusal


def resolve_verifier(config: Config) -> Config:
    """`config` with a reward function that is found from any directory.

    Raises ConfigError when there is none, or when the task runs programs and nothing here can contain them.
    """
    if config.verifier.reward:
        verifier = msgspec.structs.replace(config.verifier, reward=resolve_reward(config.verifier.reward))
        return msgspec.structs.replace(config, verifier=verifier)
    if isinstance(config.task, CodeConfig) and (why := refusal()):
        raise ConfigError(f"task.kind = code needs a sandbox for programs, and this machine has none: {why}")
    return config
