"""Every sampler by its config: `[sampler] kind = "..."`."""

from samplers.base import ProblemStream, Sampler
from samplers.fixed import FixedConfig, FixedSampler
from samplers.greso import GresoConfig, GresoSampler
from samplers.gvm import GvmConfig, GvmSampler
from samplers.isocompute import IsoComputeConfig, IsoComputeSampler
from samplers.knapsack import KnapsackConfig, KnapsackSampler
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpSampler
from samplers.reinforce_ada import ReinforceAdaConfig, ReinforceAdaSampler
from samplers.two_phase import PilotCommitConfig, SpeedConfig, TwoPhaseSampler

SamplerConfig = (
    NeverGiveUpConfig
    | FixedConfig
    | ReinforceAdaConfig
    | GvmConfig
    | GresoConfig
    | KnapsackConfig
    | PilotCommitConfig
    | SpeedConfig
    | IsoComputeConfig
)


def make_sampler(config: SamplerConfig, stream: ProblemStream, seed: int) -> Sampler:
    match config:
        case NeverGiveUpConfig():
            return NeverGiveUpSampler(config, stream, seed)
        case FixedConfig():
            return FixedSampler(config, stream, seed)
        case ReinforceAdaConfig():
            return ReinforceAdaSampler(config, stream, seed)
        case GvmConfig():
            return GvmSampler(config, stream, seed)
        case GresoConfig():
            return GresoSampler(config, stream, seed)
        case KnapsackConfig():
            return KnapsackSampler(config, stream, seed)
        case PilotCommitConfig():
            return TwoPhaseSampler(
                config.history, stream, config.pilot, config.commit, config.too_hard, config.too_easy
            )
        case SpeedConfig():
            return TwoPhaseSampler(config.history, stream, config.screen, config.more, config.low, config.high)
        case IsoComputeConfig():
            return IsoComputeSampler(config, stream, seed)
