"""Optimizer steps: invariances, the figures they report, and batches with nothing or too much in them."""

import math

import numpy as np
import pytest
import torch
from learner_samples import VOCAB_SIZE, make_group, make_rollout, own_logprobs, random_groups, tiny_model

from learner.learner import MAX_SKIPPED_IN_A_ROW, Learner
from pipeline.errors import RunFailed, WireError
from pipeline.learner_config import AdvantageConfig, CispoConfig, LearnerConfig


def config(**changes):
    fields = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9} | changes
    return LearnerConfig(**fields)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(groups, temperature=1.0, model=None, **changes):
    """The gradient that a step accumulates, read just before the optimizer would use it."""
    learner = Learner(model or tiny_model(), config(**changes), temperature)
    seen = []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    report = learner.step(groups)
    return seen[0], report.metrics


@pytest.mark.parametrize("aggregation", ["token", "sequence", "prompt", "launched"])
def test_gradient_does_not_depend_on_micro_batches_row_order_or_padding(aggregation):
    groups = random_groups(tiny_model(), seed=1, drift=0.3)
    loss = CispoConfig(aggregation=aggregation)
    whole, metrics = gradient(groups, loss=loss, micro_batch_tokens=10_000)
    for budget in (1, 17, 40):  # 1: every row alone, so without padding
        split, split_metrics = gradient(groups, loss=loss, micro_batch_tokens=budget)
        assert (split - whole).norm() <= 1e-12 * whole.norm()
        assert split_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-10)
        assert split_metrics["ess"] == pytest.approx(metrics["ess"], rel=1e-10)
    shuffled, _ = gradient(groups[::-1], loss=loss, micro_batch_tokens=17)
    assert (shuffled - whole).norm() <= 1e-12 * whole.norm()


def test_gradient_is_that_of_the_written_out_loss():
    model = tiny_model()
    groups = random_groups(model, seed=2, drift=0.4, temperature=0.6)
    got, _ = gradient(groups, temperature=0.6, loss=CispoConfig(eps_max=1.2))
    num_tokens = sum(rollout.num_tokens for group in groups for rollout in group.rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = np.array(group.chain_rewards)
        for rollout, draw in zip(group.rollouts, group.draw_indices, strict=True):
            advantage = (rewards[draw] - rewards.mean()) / rewards.std()
            prompt, completion = rollout.prompt_array().tolist(), rollout.completion_array().tolist()
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.6
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(completion)), torch.tensor(completion)]
            rho = (logprobs.detach() - torch.tensor(rollout.logprob_array().astype(np.float64))).exp()
            total = total - (rho.clamp(max=1.2) * advantage * logprobs).sum() / num_tokens
    model.zero_grad()
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_own_logprobs_give_ratio_one_and_lr_zero_leaves_the_weights(temperature):
    model = tiny_model()
    learner = Learner(model, config(lr=0.0, weight_decay=0.1), temperature)
    before = weights(model)
    metrics = learner.step(random_groups(model, seed=3, temperature=temperature)).metrics
    assert torch.equal(weights(model), before)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-9)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["clipped_frac"] == 0.0 and metrics["grad_norm"] > 0


def test_a_temperature_on_one_side_only_shows_in_the_ratios():
    model = tiny_model()
    groups = random_groups(model, seed=3, temperature=1.0)
    assert abs(Learner(model, config(), 0.6).step(groups).metrics["ratio_mean"] - 1.0) > 0.05


def test_a_step_makes_the_rewarded_completion_likelier():
    model = tiny_model()
    learner = Learner(model, config(lr=1e-3), 1.0)
    good, bad = [5, 6, 1], [7, 8, 1]
    before = own_logprobs(model, [3, 4], good).sum(), own_logprobs(model, [3, 4], bad).sum()
    rollouts = [make_rollout([3, 4], ids, own_logprobs(model, [3, 4], ids)) for ids in (good, bad)]
    learner.step([make_group(rollouts, [1.0, 0.0])])
    assert own_logprobs(model, [3, 4], good).sum() > before[0]
    assert own_logprobs(model, [3, 4], bad).sum() < before[1]


def test_reported_figures():
    model = tiny_model()
    learner = Learner(model, config(), 1.0, policy_version=5)
    short, long = [5, 1], [6, 7, 8, 9]
    rollouts = [
        make_rollout([3], short, own_logprobs(model, [3], short), versions=[(0, 4)]),
        make_rollout([3], long, own_logprobs(model, [3], long), versions=[(0, 2), (1, 5)], truncated=True),
    ]
    report = learner.step([make_group(rollouts, [1.0, 0.0], lost_rewards=[0.0, 0.0])])
    assert report.policy_version == learner.policy_version == 6
    expected = {
        "num_groups": 1,
        "num_rollouts": 2,
        "num_tokens": 6,
        "reward_mean": 0.5,
        "completion_tokens_mean": 3,
        "truncated_frac": 0.5,
        "positive_advantage_frac": 0.5,
        "lag_mean": (1 + 1 + 3 + 0 + 0 + 0) / 6,
        "lag_max": 3,
        "skipped": 0,
        "lr": 1e-2,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)
    assert 0 < report.metrics["entropy"] <= math.log(VOCAB_SIZE)
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_warm_up_is_linear_in_the_version():
    model = tiny_model()
    learner = Learner(model, config(lr=1.0, warmup_steps=4), 1.0)
    learner.optimizer.step = lambda: None
    groups = random_groups(model, seed=4, num_groups=1)
    assert [learner.step(groups).metrics["lr"] for _ in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_learning_rate_grows_with_the_square_root_of_the_batch():
    model = tiny_model()
    for batch_size, factor in ((256, 0.5), (1024, 1.0), (4096, 2.0)):
        learner = Learner(model, config(lr=1e-6, batch_size=batch_size, reference_batch=1024), 1.0)
        assert learner.step([]).metrics["lr"] == pytest.approx(1e-6 * factor)
    assert Learner(model, config(lr=1e-6, batch_size=4096), 1.0).step([]).metrics["lr"] == 1e-6


def test_the_gradient_is_clipped_to_its_norm():
    groups = random_groups(tiny_model(), seed=5)
    clipped, metrics = gradient(groups, max_grad_norm=1e-3)
    assert metrics["grad_norm"] > 1e-3
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_progress_is_told_after_every_micro_batch():
    model, calls = tiny_model(), []
    Learner(model, config(micro_batch_tokens=1), 1.0).step(
        random_groups(model, seed=6, num_groups=1), on_progress=lambda: calls.append(None)
    )
    assert len(calls) == 4


# --- batches with nothing to learn from ---


def empty_rollout():
    return make_rollout([3, 4], [], [])


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [make_group([], [], lost_rewards=[1.0, 0.0])],
        [make_group([empty_rollout(), empty_rollout()], [1.0, 0.0])],
        [make_group([make_rollout([3], [4, 5], [-1.0, -1.0])] * 2, [1.0, 1.0])],
    ],
    ids=["no group", "no rollout", "empty completions", "no advantage"],
)
def test_nothing_to_learn_leaves_the_weights_also_with_momentum(groups):
    model = tiny_model()
    learner = Learner(model, config(weight_decay=0.1), 1.0)
    learner.step(random_groups(model, seed=7))
    before = weights(model)
    report = learner.step(groups)
    assert torch.equal(weights(model), before)
    assert report.policy_version == 2 and report.metrics["grad_norm"] == 0.0 and not report.warning
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_an_empty_completion_beside_others_is_harmless():
    model = tiny_model()
    groups = random_groups(model, seed=8, num_groups=1)
    mixed = make_group([*groups[0].rollouts, empty_rollout()], [1.0, 0.0, 1.0, 0.0, 0.0])
    report = Learner(model, config(), 1.0).step([mixed])
    assert report.metrics["num_rollouts"] == 5 and report.metrics["grad_norm"] > 0
    assert torch.isfinite(weights(model)).all()


def test_one_row_longer_than_the_budget_is_trained():
    model = tiny_model()
    long = np.tile([5, 6, 7], 30)
    rollouts = [make_rollout([3] * 20, ids, own_logprobs(model, [3] * 20, ids)) for ids in (long, [4, 1])]
    report = Learner(model, config(micro_batch_tokens=32), 1.0).step([make_group(rollouts, [0.0, 1.0])])
    assert report.metrics["num_tokens"] == 92 and report.metrics["grad_norm"] > 0


def test_a_rollout_without_a_prompt_is_refused():
    groups = [make_group([make_rollout([], [4], [-1.0], attempt_id=17)] * 2, [1.0, 0.0])]
    with pytest.raises(WireError, match="attempt 17"):
        Learner(tiny_model(), config(), 1.0).step(groups)


# --- steps that are refused ---


def test_a_gradient_that_is_not_finite_skips_the_step_and_counts_it():
    model = tiny_model()
    learner = Learner(model, config(), 1.0)
    groups = random_groups(model, seed=9)
    before = weights(model)
    handle = model.model.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
    report = learner.step(groups)
    handle.remove()
    assert torch.equal(weights(model), before)
    assert "step 1 skipped" in report.warning and report.policy_version == 1
    assert report.metrics["skipped"] == 1.0 and report.metrics["num_rollouts"] == 16
    after = learner.step(groups)
    assert not after.warning and after.metrics["num_skipped"] == 1.0 and not torch.equal(weights(model), before)


def test_refusing_every_step_ends_the_run():
    model = tiny_model()
    learner = Learner(model, config(), 1.0)
    groups = random_groups(model, seed=9, num_groups=1)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        learner.step(groups)
    with pytest.raises(RunFailed, match="in a row"):
        learner.step(groups)


def test_an_engine_that_serves_other_weights_is_named_and_nothing_is_learnt():
    model = tiny_model()
    learner = Learner(model, config(), 1.0)
    groups = random_groups(model, seed=10, num_groups=12)
    wrong = []
    for group in groups:
        sure = [
            make_rollout(r.prompt_array(), r.completion_array(), np.full(r.num_tokens, -0.01), engine_id="engine-7")
            for r in group.rollouts
        ]
        wrong.append(make_group(sure, [1.0, 0.0, 1.0, 0.0]))
    before = weights(model)
    report = learner.step(groups + wrong)
    assert "engine-7" in report.warning and "engine-0" not in report.warning
    assert torch.equal(weights(model), before) and report.metrics["skipped"] == 1.0


def test_advantage_rules_come_from_the_config():
    model = tiny_model()
    groups = random_groups(model, seed=11)
    rules = [AdvantageConfig(kind="standardized"), AdvantageConfig(kind="centered"), AdvantageConfig(clip=0.1)]
    losses = [gradient(groups, advantage=rule)[1]["loss"] for rule in [*rules, AdvantageConfig(rescale="anchor")]]
    assert len({round(loss, 9) for loss in losses}) == 4
