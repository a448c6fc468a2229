"""PPO with a learned value function: the gradient that GAE gives, and the critic within a step and a checkpoint."""

import itertools
import math

import numpy as np
import pytest
import torch
from learner_samples import make_group, make_rollout, own_logprobs, random_groups, tiny_model, tiny_model_dir

from learner.checkpoint import CRITIC, load_checkpoint, save_checkpoint
from learner.critic import Critic, generalized_advantages
from learner.learner import Learner
from learner.model import load_model
from pipeline.config import load_config
from pipeline.errors import ConfigError, WeightError
from pipeline.learner_config import CriticConfig, LearnerConfig, PpoConfig

VOCAB, LENGTH = 3, 4
EVERY = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))


def config(critic=None, **changes):
    fields = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9} | changes
    return LearnerConfig(loss=PpoConfig(critic=critic or CriticConfig(warmup_steps=0)), **fields)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- the gradient, by enumerating every rollout of a tabular policy ---


def enumerated():
    """Logits [T, V, V] by previous token, log-probabilities [R, T], rewards [R] and the true values [R, T]."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(LENGTH, VOCAB, VOCAB))).requires_grad_()
    previous = torch.nn.functional.pad(EVERY[:, :-1], (1, 0))
    logprobs = torch.log_softmax(logits, -1)[torch.arange(LENGTH), previous, EVERY]
    rewards = torch.from_numpy(rng.normal(size=len(EVERY)))
    chances = logprobs.detach().sum(1).exp()
    values = torch.zeros(len(EVERY), LENGTH, dtype=torch.float64)
    for row, t in itertools.product(range(len(EVERY)), range(LENGTH)):
        same = (EVERY[:, :t] == EVERY[row, :t]).all(1)
        values[row, t] = (chances[same] * rewards[same]).sum() / chances[same].sum()
    return logits, logprobs, rewards, values


@pytest.mark.parametrize("gae_lambda", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("is_true_value", [True, False])
def test_the_gradient_is_exact_for_true_values_or_lambda_one(gae_lambda, is_true_value):
    logits, logprobs, rewards, values = enumerated()
    chances = logprobs.detach().sum(1).exp()
    truth = torch.autograd.grad((logprobs.sum(1).exp() * rewards).sum(), logits, retain_graph=True)[0]
    if not is_true_value:
        # Another value of each state, the same for every rollout that passes through it.
        values = torch.sin(3 * values) + torch.arange(LENGTH)
    advantages = generalized_advantages(
        rewards.numpy(), values.numpy(), np.full(len(EVERY), LENGTH), gamma=1.0, gae_lambda=gae_lambda
    )
    got = torch.autograd.grad((chances[:, None] * torch.from_numpy(advantages) * logprobs).sum(), logits)[0]
    if is_true_value or gae_lambda == 1.0:
        torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)
    else:
        assert (got - truth).norm() > 0.1 * truth.norm()


# --- the critic itself ---


def test_a_critic_learns_what_its_states_are_worth():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    returns = torch.tanh(hidden[:, 0] - hidden[:, 1])
    critic = Critic(8, CriticConfig(lr=1e-2, value_clip=None), torch.device("cpu"), torch.float64)
    figures = [critic.fit(hidden, critic.values(hidden), returns) for _ in range(40)]
    assert figures[0]["critic/value_mean"] == 0.0 and figures[0]["critic/explained_variance"] == pytest.approx(0.0)
    assert figures[-1]["critic/explained_variance"] > 0.9


def test_the_value_clip_bounds_how_far_one_batch_moves_the_values():
    hidden, returns = torch.ones(1, 4, dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)
    moved = {}
    for clip in (0.1, None):
        critic = Critic(4, CriticConfig(lr=1e-3, epochs=300, value_clip=clip), torch.device("cpu"), torch.float64)
        critic.fit(hidden, critic.values(hidden), returns)
        moved[clip] = float(critic.values(hidden))
    assert moved[None] > 0.5 > moved[0.1] > 0.1


def test_states_that_are_not_finite_teach_nothing():
    critic = Critic(4, CriticConfig(), torch.device("cpu"), torch.float64)
    hidden = torch.full((3, 4), math.nan, dtype=torch.float64)
    advantages, _ = critic.judge(hidden, np.ones(1), np.array([3]))
    assert np.isnan(advantages).all() and torch.isfinite(critic.values(torch.ones(1, 4, dtype=torch.float64))).all()


# --- within a step ---


def step_gradient(groups, **changes):
    learner, seen = Learner(tiny_model(), config(**changes), 1.0), []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    metrics = learner.step(groups).metrics
    return (seen[0] if seen else torch.zeros(())), metrics, learner.critic.tensors()


def test_neither_gradient_nor_critic_depends_on_micro_batches_or_row_order():
    groups = random_groups(tiny_model(), seed=1, num_groups=3, drift=0.2)
    whole, metrics, critic = step_gradient(groups, micro_batch_tokens=10_000)
    assert whole.norm() > 0
    for batch in (groups, groups[::-1]):
        split, split_metrics, split_critic = step_gradient(batch, micro_batch_tokens=17)
        assert (split - whole).norm() <= 1e-9 * whole.norm()
        assert split_metrics["critic/loss"] == pytest.approx(metrics["critic/loss"], rel=1e-9)
        for name, value in critic.items():
            torch.testing.assert_close(split_critic[name], value, rtol=1e-6, atol=1e-9)


def test_the_critic_reads_states_in_the_precision_of_the_layers():
    def learnt(dtype):
        learner = Learner(tiny_model(dtype=torch.float32), config(dtype=dtype), 1.0)
        learner.step(random_groups(tiny_model(), seed=3))
        return learner.critic.tensors()["2.weight/exp_avg"]

    exact, rounded = learnt("float32"), learnt("bfloat16")
    assert 1e-6 < float((rounded - exact).norm() / exact.norm()) < 0.05


def test_a_group_without_variance_teaches_against_the_others():
    """What no group baseline can: the problem that is always wrong is worse than the one that is always right."""
    model = tiny_model()
    groups = []
    for first, reward in ((3, 1.0), (8, 0.0)):
        ids = [[first, 4, 1], [first, 5, 1]]
        rollouts = [make_rollout([first], own, own_logprobs(model, [first], own)) for own in ids]
        groups.append(make_group(rollouts, [reward, reward]))
    before = [own_logprobs(model, [first], [first, 4, 1]).sum() for first in (3, 8)]
    Learner(model, config(lr=1e-3), 1.0).step(groups)
    after = [own_logprobs(model, [first], [first, 4, 1]).sum() for first in (3, 8)]
    assert after[0] > before[0] and after[1] < before[1]


def test_during_its_warm_up_the_critic_learns_alone():
    model = tiny_model()
    learner = Learner(model, config(CriticConfig(warmup_steps=2), warmup_steps=2, weight_decay=0.1), 1.0)
    groups, start = random_groups(model, seed=3), weights(model)
    lrs, values = [], []
    for _ in range(4):
        metrics = learner.step(groups).metrics
        lrs.append(metrics["lr"])
        values.append(metrics["critic/value_mean"])
        assert torch.equal(weights(model), start) == (len(lrs) <= 2)
    assert lrs == [0.0, 0.0, 0.5e-2, 1e-2] and values[0] == 0.0 and len(set(values)) == 4


def test_hostile_batches_leave_everything_finite():
    equal = make_rollout([3], [4, 5], [-1.0, -1.0])
    batches = ([], [make_group([equal, make_rollout([3], [], [])], [1.0, 0.0])], [make_group([equal] * 2, [0.0, 0.0])])
    for groups in batches:
        learner = Learner(tiny_model(), config(), 1.0)
        report = learner.step(groups)
        assert not report.warning and all(math.isfinite(v) for v in report.metrics.values())
        assert learner.critic is not None and torch.isfinite(weights(learner.critic.head)).all()


def test_a_checkpoint_holds_the_critic(tmp_path):
    settings = config(lr=1e-3)
    model, tokenizer = load_model(str(tiny_model_dir(tmp_path / "start")))
    straight = Learner(model, settings, 1.0)
    straight.step(random_groups(model, seed=1, drift=0.1))
    (tmp_path / "saved").mkdir()
    save_checkpoint(tmp_path / "saved", straight, tokenizer)
    again = Learner(load_model(str(tmp_path / "saved" / "model"))[0], settings, 1.0)
    load_checkpoint(tmp_path / "saved", again)
    for seed in (2, 3):
        groups = random_groups(model, seed=seed, drift=0.1)
        first, second = straight.step(groups), again.step(groups)
        del first.metrics["step_s"], second.metrics["step_s"]
        assert first == second
    assert torch.equal(weights(again.model), weights(straight.model))
    assert again.critic is not None and straight.critic is not None
    assert torch.equal(weights(again.critic.head), weights(straight.critic.head))

    wider = Learner(load_model(str(tmp_path / "saved" / "model"))[0], config(CriticConfig(width=7)), 1.0)
    with pytest.raises(WeightError, match=f"{CRITIC}: missing, or of a critic of another shape"):
        load_checkpoint(tmp_path / "saved", wider)


def test_the_config_of_a_critic():
    settings = load_config(None, ["learner.loss.kind=ppo", "learner.loss.critic={}", "learner.loss.critic.gamma=0.9"])
    assert settings.learner.critic == CriticConfig(gamma=0.9)
    assert load_config(None, ["learner.loss.kind=ppo"]).learner.critic is None and LearnerConfig().critic is None
    with pytest.raises(ConfigError, match="only clip can be set"):
        load_config(None, ["learner.loss.kind=ppo", "learner.loss.critic={}", "learner.advantage.kind=centered"])
    with pytest.raises(ConfigError, match="did you mean 'gamma'"):
        load_config(None, ["learner.loss.kind=ppo", "learner.loss.critic.gama=0.9"])
