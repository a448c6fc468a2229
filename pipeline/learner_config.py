"""The tables [learner], [learner.advantage], [learner.loss] and [learner.corrections] of a run."""

import math
from typing import Annotated, Literal

import msgspec

from pipeline.sections import Frac, NonNegative, NonNegativeInt, Positive, PositiveInt, Section

Aggregation = Literal["token", "sequence", "prompt", "launched"]
Level = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]
Proximal = Literal["engine", "current", "approximate"]
AdvantageKind = Literal["centered", "standardized", "leave_one_out", "batch_standardized", "max_rl", "power"]
Rescale = Literal["none", "anchor", "ratio", "count_ratio"]
Credit = Literal["reward", "best"]
Beta = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]


class _Loss(Section, frozen=True, tag_field="kind"):
    aggregation: Aggregation = "token"


class CispoConfig(_Loss, frozen=True, tag="cispo"):
    """CISPO: the gradient of each token's log-probability, weighted by its truncated importance ratio and advantage.

    `eps_max` caps the ratio. `aggregation` sets the objective, because it decides how much a hard problem weighs:
    `token` divides by the tokens of the batch, `sequence` averages rollouts, `prompt` averages groups, `launched` sums
    each rollout's tokens and divides by the rollouts launched to fill the batch, also those that trained nothing.
    """

    eps_max: Positive = 5.0


class ReinforceTisConfig(_Loss, frozen=True, tag="reinforce_tis"):
    """REINFORCE under the truncated importance weight that [learner.corrections] sets."""


class CriticConfig(Section, frozen=True):
    """A learned value function in place of [learner.advantage]'s baseline: advantages are GAE(`gamma`, `gae_lambda`) by
    token, whitened over the batch. It is a network of one hidden layer of `width` on the policy's last hidden states,
    which it does not change; it takes `epochs` steps on every batch with its own `lr`, its values clipped to
    +-`value_clip` around those before. During the first `warmup_steps` batches it learns alone.

    It needs to see what is always wrong or always right too: sampler.drop_zero_variance = false.
    """

    gamma: Frac = 1.0
    gae_lambda: Frac = 0.95
    width: PositiveInt = 64
    lr: Positive = 1e-3
    epochs: PositiveInt = 4
    value_clip: Positive | None = 0.2
    warmup_steps: NonNegativeInt = 5


class PpoConfig(_Loss, frozen=True, tag="ppo"):
    """PPO: the ratio to a proximal policy, clipped to 1 +- `eps`; `dual_clip` bounds the loss of bad tokens. Without a
    `critic` advantages are those of [learner.advantage]; `critic = {}` learns a value function with its defaults.

    `proximal` is "engine" (plain PPO: the policy that sampled), "current" (decoupled PPO: the policy before this step)
    or "approximate" (the policy one version back, interpolated between the two). Where it is not the engine's, its
    ratio to the engine's is truncated as [learner.corrections] says.
    """

    eps: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.2
    dual_clip: Annotated[float, msgspec.Meta(gt=1.0)] | None = None
    proximal: Proximal = "engine"
    critic: CriticConfig | None = None


class GrpoConfig(_Loss, frozen=True, tag="grpo"):
    """GRPO's surrogate with DAPO's clip-higher: PPO's with a range that is wider above. `proximal` as for "ppo"."""

    eps_low: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.2
    eps_high: Positive = 0.28
    proximal: Proximal = "engine"


class GspoConfig(_Loss, frozen=True, tag="gspo"):
    """GSPO: the geometric mean of a rollout's ratios is clipped, for all of its tokens alike."""

    eps_low: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 3e-4
    eps_high: Positive = 4e-4


class ToprConfig(_Loss, frozen=True, tag="topr"):
    """TOPR: positives are learnt from as they are, negatives under their whole rollout's ratio truncated at 1."""


class M2poConfig(_Loss, frozen=True, tag="m2po"):
    """M2PO: clips the ratio just enough that the second moment of its log stays at or below `max_moment`."""

    max_moment: Positive = 0.04


class AsymReConfig(_Loss, frozen=True, tag="asymre"):
    """Asymmetric REINFORCE: no importance ratio, but a baseline moved by `baseline_shift` so that positives weigh more
    than negatives.
    """

    baseline_shift: Annotated[float, msgspec.Meta(le=0.0)] = -0.1


LossConfig = (
    CispoConfig | ReinforceTisConfig | PpoConfig | GrpoConfig | GspoConfig | ToprConfig | M2poConfig | AsymReConfig
)


class _Band(Section, frozen=True, tag_field="kind"):
    low: NonNegative
    high: Positive

    def __post_init__(self):
        if not self.low <= 1.0 <= self.high:
            raise ValueError("low must be at most 1 and high at least 1, or on-policy tokens would be masked")


class IcePopMask(_Band, frozen=True, tag="icepop"):
    """Tokens whose ratio is outside [low, high]."""

    low: NonNegative = 0.5
    high: Positive = 5.0


class GeometricMask(_Band, frozen=True, tag="geometric"):
    """Rollouts whose geometric mean ratio is outside [low, high]."""

    low: NonNegative = 0.999
    high: Positive = 1.001


class MisMask(Section, frozen=True, tag_field="kind", tag="mis"):
    """Tokens, or whole rollouts, whose ratio is above `cap`."""

    level: Level = "token"
    cap: Annotated[float, msgspec.Meta(ge=1.0)] = 2.0


class OpsmMask(Section, frozen=True, tag_field="kind", tag="opsm"):
    """Rollouts of negative advantage whose mean log ratio is below -delta."""

    delta: NonNegative = 1e-4


class DppoMask(Section, frozen=True, tag_field="kind", tag="dppo"):
    """Tokens whose probability moved by more than `threshold` in the direction that their advantage pushes."""

    threshold: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] = 0.2


MaskConfig = IcePopMask | GeometricMask | MisMask | OpsmMask | DppoMask


class CorrectionsConfig(Section, frozen=True):
    """Staleness. `cap` truncates the importance weight of "reinforce_tis", "ppo" and "grpo", of each token or of the
    whole `sequence`; the other losses have a cap or clip of their own.

    Any cap grows with the lag l of a token to exp(cap_z * cap_sigma * l^cap_exponent) where that is more; `cap_sigma`
    is the standard deviation of the log ratio at lag 1 (the metric log_ratio_std/lag_1), and 0 keeps caps constant.
    `masks` leave tokens out, each on its own, for any loss: {kind = "icepop", low, high}, {kind = "mis", level, cap},
    {kind = "geometric", low, high}, {kind = "opsm", delta}, {kind = "dppo", threshold}; a masked token still counts in
    the normaliser.
    """

    level: Level = "token"
    cap: Annotated[float, msgspec.Meta(ge=1.0)] = 2.0
    cap_sigma: NonNegative = 0.0
    cap_z: Positive = 2.0
    cap_exponent: Frac = 0.5
    masks: tuple[MaskConfig, ...] = ()

    def __post_init__(self):
        names = [mask_name(mask) for mask in self.masks]
        if len(set(names)) < len(names):
            raise ValueError("masks must not name one kind twice")


def mask_name(mask: MaskConfig) -> str:
    """What the metrics call it; the two levels of "mis" are two masks."""
    kind = mask.__struct_config__.tag
    return f"{kind}_{mask.level}" if isinstance(mask, MisMask) else str(kind)


class AdvantageConfig(Section, frozen=True):
    """`standardized` is (r - mean)/std over the whole chain, `centered` leaves out the std, `leave_one_out` takes the
    mean of the other rollouts, `batch_standardized` divides `centered` by its std over the batch, `max_rl` by the
    chain's mean reward; `power` weighs the i-th draw of a chain so that a problem of pass rate p weighs p^-alpha, with
    a baseline from earlier draws. `clip` bounds |A|.

    `rescale` makes up for rollouts of the chain that are not kept: "anchor" keeps positives and rescales the others so
    that the trained group sums to 0; "ratio" multiplies by the share kept; "count_ratio" by that share over its mean.

    `credit` says what advantages are computed from: "reward", or "best", which counts every rollout at the best reward
    of its chain as 1 and the rest as 0. For rewards of 0 and 1 both are the same; for graded ones "best" stops paying
    for partial progress that the policy makes anyway.
    """

    kind: AdvantageKind = "standardized"
    credit: Credit = "reward"
    rescale: Rescale = "none"
    alpha: Frac = 1.0
    clip: Positive = 4.0

    def __post_init__(self):
        if self.kind == "power" and self.rescale != "none":
            raise ValueError('rescale must be "none" for "power": rescaling undoes its predictable baseline')
        if self.kind == "power" and self.credit != "reward":
            raise ValueError('credit must be "reward" for "power": which rollout is the best depends on later draws')


class KlConfig(Section, frozen=True):
    """A penalty of `coef` times the divergence from a frozen reference policy: the model at `reference`, or the run's
    own initial weights if that is empty. `coef = 0` loads no reference.

    `estimator` decides what is differentiated: "k1" KL(policy || reference) of whole rollouts (the log ratio in the
    reward), "k2" the same of each token's distribution, "k3" the term that GRPO publishes, which pulls as KL(reference
    || policy). Tokens of old policies are weighted as [learner.corrections] says. `zero_variance` lets groups whose
    rewards are all equal take part; they reach the learner only if the sampler does not drop them.
    """

    coef: NonNegative = 0.0
    estimator: KlEstimator = "k2"
    reference: str = ""
    zero_variance: bool = True


class EntropyConfig(Section, frozen=True):
    """`coef` times the entropy of the policy at every trained token is added to the objective: above 0 a bonus, below 0
    a penalty. `zero_variance` as for [learner.kl].
    """

    coef: float = 0.0
    zero_variance: bool = True


class SubsetConfig(Section, frozen=True):
    """A decoupled baseline: of every group only `num_rollouts` give a gradient (0: all), while all count in baseline
    and spread. `choose` them at "random", which is unbiased, or for "max_variance", the largest spread of advantages.
    `batch_size` counts before the choice, and what is not chosen still ends as trained.
    """

    num_rollouts: NonNegativeInt = 0
    choose: Literal["random", "max_variance"] = "random"


class LoraConfig(Section, frozen=True):
    """Train low-rank adapters of `rank` beside frozen weights (0: train the weights), scaled by alpha / rank. Engines
    get the merged weights; a run resumes from `[model] path` and its adapters. Needs the package peft.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveInt = 16


class LearnerConfig(Section, frozen=True):
    """`batch_by` says what `batch_size` counts: `attempts` launched (zero-variance groups are not replaced),
    `completions` trained, or `groups` trained (both refill). `batch_order` fills batches in the order in which rounds
    finish (`arrival`) or were launched (`ticket`), where the learner waits for the slowest but no batch is biased
    towards short and easy rollouts.

    Rollouts of one prompt share its tokens and a forward pass, which takes as many as fit into `micro_batch_tokens`
    (a prompt's count a quarter in each after the first). Where an architecture does not allow that, rows of like length
    make up a pass, and their padding counts. Neither that nor `num_processes` changes the gradient, unless a model's
    rotary scaling is "dynamic" or "longrope" and rollouts are longer than its original context: then the library turns
    all of a pass by what its longest needs.

    With a `reference_batch` above 0, `lr` is that of a batch of this size, in the same unit, and is multiplied by
    sqrt(batch_size / reference_batch).

    `gradient_checkpointing` computes a layer's activations again in the backward pass instead of keeping them.
    `dtype` is the precision of the layers (autocast); weights, optimizer and logits stay float32. What "bfloat16"
    rounds shows as ratios that are not 1 at lag 0.

    `num_processes` ranks share each step, on this host or with cluster.learner_nodes on several: copies of the model
    over gloo on CPUs, one GPU for each rank and the model sharded over them (FSDP2) where there are GPUs.
    """

    lr: NonNegative = 2e-4
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: NonNegative = 0.0
    warmup_steps: NonNegativeInt = 5
    max_grad_norm: Positive = 1.0
    batch_by: Literal["attempts", "completions", "groups"] = "attempts"
    batch_size: PositiveInt = 384
    batch_order: Literal["arrival", "ticket"] = "arrival"
    reference_batch: NonNegativeInt = 0
    micro_batch_tokens: PositiveInt = 2048
    num_processes: PositiveInt = 1
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    advantage: AdvantageConfig = msgspec.field(default_factory=AdvantageConfig)
    loss: LossConfig = msgspec.field(default_factory=CispoConfig)
    corrections: CorrectionsConfig = msgspec.field(default_factory=CorrectionsConfig)
    kl: KlConfig = msgspec.field(default_factory=KlConfig)
    entropy: EntropyConfig = msgspec.field(default_factory=EntropyConfig)
    subset: SubsetConfig = msgspec.field(default_factory=SubsetConfig)

    def __post_init__(self):
        if self.critic is not None and self.advantage != AdvantageConfig(clip=self.advantage.clip):
            raise ValueError("of [learner.advantage] only clip can be set beside a critic, which takes its place")

    @property
    def critic(self) -> CriticConfig | None:
        return self.loss.critic if isinstance(self.loss, PpoConfig) else None

    @property
    def scaled_lr(self) -> float:
        """The learning rate of this batch size, after warm-up (IsoCompute, arXiv 2603.12151)."""
        return self.lr * math.sqrt(self.batch_size / self.reference_batch) if self.reference_batch else self.lr
