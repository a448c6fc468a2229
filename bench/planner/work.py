"""Work, depth and memory of an optimizer step by algorithm (RLM systems, arXiv 2608.27046, section on costs)."""

from typing import Literal, NamedTuple

import msgspec

from bench.planner.hardware import BYTES, Rates
from bench.planner.lengths import Lengths
from bench.planner.shape import ModelSize

AlgorithmName = Literal["ppo", "grpo", "ngu"]


class Algorithm(NamedTuple):
    """How often a token of a rollout goes through which model beside generation and the policy's own training.

    `forward`: passes of models of the policy's size (reference, reward model, critic, old logprobs). `trained`: models
    that are trained, of the policy's size.
    """

    forward: int
    trained: int


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(forward=4, trained=2),  # reference, reward model, critic, old logprobs; policy and critic
    "grpo": Algorithm(forward=0, trained=1),  # without KL, one step a batch, rewards from a verifier
    "ngu": Algorithm(forward=0, trained=1),
}


class Job(msgspec.Struct, frozen=True):
    """`batch` rollouts a step in groups of `group`, of which a share `trained_share` is trained (the rest has no
    gradient). `rounds`: how many rounds of a group a problem gets in the mean, above 1 for Never Give Up alone.
    """

    model: ModelSize
    lengths: Lengths
    algorithm: AlgorithmName
    prompt_tokens: float
    batch: int
    group: int
    epochs: int = 1
    trained_share: float = 1.0
    rounds: float = 1.0

    @property
    def step_tokens(self) -> float:
        return self.batch * self.lengths.mean

    @property
    def context(self) -> float:
        """Tokens that a running row has cached in the mean: rows are met in proportion to their length."""
        return self.prompt_tokens + self.lengths.mean * (1 + self.lengths.cv2) / 2

    @property
    def prompt_flops(self) -> float:
        """A forward pass over one prompt."""
        model, prompt = self.model, self.prompt_tokens
        return prompt * 2 * model.active + 2 * model.layers * model.width * prompt**2

    @property
    def completion_flops(self) -> float:
        """The same over one completion that follows its prompt, in the mean."""
        model, lengths = self.model, self.lengths
        looks = self.prompt_tokens * lengths.mean + lengths.mean**2 * (1 + lengths.cv2) / 2
        return lengths.mean * 2 * model.active + 4 * model.layers * model.width * looks

    @property
    def train_token_flops(self) -> float:
        """Forward and backward pass of a rollout, for each token of its completion."""
        return 3 * (self.prompt_flops + self.completion_flops) / self.lengths.mean


class Work(msgspec.Struct, frozen=True):
    """FLOPs of one optimizer step."""

    generation: float
    scoring: float
    training: float

    @property
    def total(self) -> float:
        return self.generation + self.scoring + self.training


def work_of(job: Job) -> Work:
    """Of a step: a token costs 2 P forward and 6 P to train, and attention 4 l d for each token it looks at (three
    times that in training). A prompt is read once for its group.
    """
    generation = job.batch / job.group * job.prompt_flops + job.batch * job.completion_flops
    forward = job.batch * (job.prompt_flops + job.completion_flops)
    algorithm = ALGORITHMS[job.algorithm]
    training = job.step_tokens * job.train_token_flops * algorithm.trained * job.epochs * job.trained_share
    return Work(generation, forward * algorithm.forward, training)


def depth_s(job: Job, rates: Rates) -> float:
    """Seconds of a step that no number of devices shortens: the longest completion token by token, alone on an engine,
    in each of its rounds; three times a pass through the layers for each epoch of training; the update.
    """
    through_s = rates.decode_s(1)
    return (job.rounds * job.lengths.largest + 3 * job.epochs) * through_s + rates.publish_s + rates.load_s


def engine_rows(job: Job, memory_bytes: float) -> int:
    """How many rows fit beside the weights, with a quarter of their cache to spare."""
    free = 0.9 * memory_bytes - job.model.weight_bytes(BYTES)
    return max(0, int(free / (1.25 * job.context * job.model.kv_bytes(BYTES))))


def learner_bytes(job: Job) -> float:
    """Weights, gradients and Adam's moments in mixed precision, 16 bytes a parameter, and a fifth for activations."""
    models = ALGORITHMS[job.algorithm]
    frozen = max(models.forward - models.trained, 0)  # the old logprobs and the critic's pass use trained models
    return 1.2 * job.model.params * (16 * models.trained + BYTES * frozen)


def rounds_of(pass_rate: float, group: int, p_ngu: float) -> float:
    """Rounds of `group` that Never Give Up gives a problem in the mean: 1 / (1 - p_ngu q^K)."""
    return 1 / (1 - p_ngu * (1 - pass_rate) ** group)


def trained_share(pass_rate: float, group: int, algorithm: AlgorithmName, p_ngu: float) -> float:
    """The share of rollouts in groups with a gradient: all but those all right and, without a retry that ends well, all
    wrong. PPO trains every rollout.
    """
    if algorithm == "ppo":
        return 1.0
    right, wrong = pass_rate**group, (1 - pass_rate) ** group
    if algorithm == "grpo":
        return 1 - right - wrong
    # A first round all right is dropped, and so is a chain that ends all wrong, after as many rounds as any other.
    rounds = rounds_of(pass_rate, group, p_ngu)
    return 1 - (right + (1 - p_ngu) * wrong * rounds * rounds) / rounds
