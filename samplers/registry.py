"""Every sampler by its config: `[sampler] kind = "..."`."""

from samplers.base import ProblemStream, Sampler
from samplers.fixed import FixedConfig, FixedSampler
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpSampler

SamplerConfig = NeverGiveUpConfig | FixedConfig


def make_sampler(config: SamplerConfig, stream: ProblemStream, seed: int) -> Sampler:
    match config:
        case NeverGiveUpConfig():
            return NeverGiveUpSampler(config, stream, seed)
        case FixedConfig():
            return FixedSampler(config, stream, seed)
