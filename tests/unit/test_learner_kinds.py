"""Every loss and mask through a whole optimizer step: invariances, hostile batches, the names of their figures."""

import math
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from learner_samples import make_group, make_rollout, own_logprobs, random_groups, tiny_model

from learner.corrections import caps, second_moment_bound
from learner.learner import Learner
from pipeline.learner_config import (
    AdvantageConfig,
    CispoConfig,
    CorrectionsConfig,
    DppoMask,
    GeometricMask,
    GrpoConfig,
    IcePopMask,
    LearnerConfig,
    LossConfig,
    MisMask,
    OpsmMask,
    PpoConfig,
    ReinforceTisConfig,
)

MASKS = (IcePopMask(), MisMask(), MisMask(level="sequence"), GeometricMask(low=0.9, high=1.1), OpsmMask(), DppoMask())
LOSSES = [kind() for kind in get_args(LossConfig)] + [
    PpoConfig(proximal="approximate", dual_clip=3.0),
    GrpoConfig(proximal="current"),
]
BY_KIND = pytest.mark.parametrize("loss", LOSSES, ids=lambda c: f"{c.__struct_config__.tag}-{LOSSES.index(c)}")


def make_learner(loss, model=None, **changes):
    fields = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9} | changes
    return Learner(model or tiny_model(), LearnerConfig(loss=loss, **fields), 1.0, policy_version=3)


def gradient(groups, loss, num_attempts=None, **changes):
    learner, seen = make_learner(loss, **changes), []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    metrics = learner.step(groups, num_attempts).metrics
    return (seen[0] if seen else torch.zeros(())), metrics


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@BY_KIND
@pytest.mark.parametrize("masks", [(), MASKS[:3]], ids=["plain", "masked"])
def test_gradient_does_not_depend_on_micro_batches_row_order_or_padding(loss, masks):
    groups = random_groups(tiny_model(), seed=1, num_groups=3, drift=0.2)
    corrections = CorrectionsConfig(level="sequence", cap_sigma=0.1, masks=masks)
    whole, metrics = gradient(groups, loss, corrections=corrections, micro_batch_tokens=10_000)
    assert whole.norm() > 0
    for batch in (groups, groups[::-1]):
        split, split_metrics = gradient(batch, loss, corrections=corrections, micro_batch_tokens=17)
        assert (split - whole).norm() <= 1e-10 * whole.norm()
        assert split_metrics["clipped_mass"] == pytest.approx(metrics["clipped_mass"], abs=1e-10)


@BY_KIND
def test_on_policy_every_loss_is_the_policy_gradient(loss):
    """At ratio 1 nothing is clipped, so all but the one that moves its baseline have the same gradient."""
    model = tiny_model()
    groups = random_groups(model, seed=2, num_groups=2)
    got, metrics = gradient(groups, loss)
    expected, _ = gradient(groups, CispoConfig())
    if loss.__struct_config__.tag == "asymre":
        assert (got - expected).norm() > 1e-3 * expected.norm()
        return
    # Engine logprobs cross the wire in float32.
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert metrics["clipped_mass"] == pytest.approx(0.0, abs=1e-6)


def nearly_right():
    rollouts = [
        make_rollout([3, 4], [5 + i % 3, 1], own_logprobs(tiny_model(), [3, 4], [5 + i % 3, 1])) for i in range(8)
    ]
    return [make_group(rollouts, [0.0] + [0.95] * 7)]


def equal_in_float32():
    rewards = [*np.full(3, 0.1, dtype=np.float32).tolist(), 0.1]
    return [make_group([make_rollout([3], [4, 5], [-1.0, -1.0])] * 4, rewards)]


def all_truncated():
    rollouts = [make_rollout([3], [4, 5 + i], [-2.0, -2.5], truncated=True) for i in range(3)]
    return [make_group(rollouts, [0.0, 1.0, 0.0])]


def one_empty_completion():
    rollouts = [make_rollout([3], [4, 5], [-2.0, -2.0]), make_rollout([3], [], [])]
    return [make_group(rollouts, [1.0, 0.0])]


def one_row_over_the_budget():
    long = np.tile([5, 6, 7], 30)
    rollouts = [make_rollout([3] * 20, ids, np.full(len(ids), -2.5)) for ids in (long, [4, 1])]
    return [make_group(rollouts, [0.0, 1.0])]


def far_off_policy():
    rollouts = [make_rollout([3], [4, 5], [-80.0, 0.0]), make_rollout([3], [6, 7], [0.0, -80.0])]
    return [make_group(rollouts, [1.0, 0.0])]


@BY_KIND
@pytest.mark.parametrize(
    "make",
    [nearly_right, equal_in_float32, all_truncated, one_empty_completion, one_row_over_the_budget, far_off_policy],
    ids=lambda f: f.__name__,
)
def test_hostile_batches_give_finite_weights_and_figures(loss, make):
    learner = make_learner(loss, micro_batch_tokens=32, corrections=CorrectionsConfig(masks=(IcePopMask(high=1e12),)))
    before = weights(learner.model)
    report = learner.step(make())
    assert not report.warning and all(math.isfinite(value) for value in report.metrics.values())
    assert torch.isfinite(weights(learner.model)).all()
    if make is equal_in_float32 and loss.__struct_config__.tag != "asymre":
        assert torch.equal(weights(learner.model), before)


@BY_KIND
def test_a_fully_masked_batch_trains_nothing(loss):
    learner = make_learner(loss, corrections=CorrectionsConfig(masks=(MisMask(cap=1.0),)))
    rollouts = [make_rollout([3], ids, [-30.0, -30.0]) for ids in ([4, 5], [6, 7])]
    before = weights(learner.model)
    report = learner.step([make_group(rollouts, [1.0, 0.0])])
    assert report.metrics["masked_frac"] == 1.0 and report.metrics["grad_norm"] == 0.0
    assert torch.equal(weights(learner.model), before)


def test_a_fully_masked_row_leaves_the_others_as_they_were():
    """A mask drops terms of the sum; it does not change what the rest is divided by."""
    model = tiny_model()
    good = make_rollout([3], [4, 5], own_logprobs(model, [3], [4, 5]))
    bad = make_rollout([3], [6, 7], own_logprobs(model, [3], [6, 7]) - 10.0)
    masks = CorrectionsConfig(masks=(MisMask(level="sequence"),))
    alone, _ = gradient([make_group([good], [1.0], lost_rewards=[0.0])], CispoConfig())
    masked, metrics = gradient([make_group([good, bad], [1.0, 0.0])], CispoConfig(), corrections=masks)
    torch.testing.assert_close(masked, alone / 2, rtol=1e-9, atol=1e-12)
    assert metrics["masked_frac/mis_sequence"] == metrics["masked_frac"] == 0.5


def test_figures_are_named_by_mask_and_by_lag():
    model = tiny_model()
    versions = [(0, 0), (1, 1), (2, 2), (3, 3)]
    rollouts = [
        make_rollout([3], [4, 5, 6, 7 + i], own_logprobs(model, [3], [4, 5, 6, 7 + i]), versions=versions)
        for i in range(2)
    ]
    metrics = (
        make_learner(CispoConfig(), model, corrections=CorrectionsConfig(masks=MASKS))
        .step([make_group(rollouts, [1.0, 0.0])])
        .metrics
    )
    names = {"icepop", "mis_token", "mis_sequence", "geometric", "opsm", "dppo"}
    assert {name.partition("/")[2] for name in metrics if name.startswith("masked_frac/")} == names
    for bucket in ("lag_0", "lag_1", "lag_2", "lag_3_4"):
        assert metrics[f"num_tokens/{bucket}"] == 2
        assert metrics[f"ratio_mean/{bucket}"] == pytest.approx(1.0, abs=1e-6)
        assert {f"{n}/{bucket}" for n in ("ratio_se", "ess", "kl", "clipped_mass", "entropy")} <= set(metrics)
    empty = make_learner(CispoConfig(), corrections=CorrectionsConfig(masks=MASKS)).step([]).metrics
    assert {name for name in metrics if "lag_" not in name} <= set(empty) | {"lag_mean", "lag_max"}


def test_launched_divides_by_the_rollouts_that_it_took():
    groups = random_groups(tiny_model(), seed=3, num_groups=2)
    loss = CispoConfig(aggregation="launched")
    once, _ = gradient(groups, loss, num_attempts=10)
    twice, _ = gradient(groups, loss, num_attempts=20)
    counted, _ = gradient(groups, loss)
    torch.testing.assert_close(once, 2 * twice)
    # The norms of the model round to float32, so other factors than 2 are not exact.
    torch.testing.assert_close(counted, once * 10 / sum(g.num_attempts for g in groups), rtol=1e-4, atol=1e-6)


def test_caps_grow_with_lag():
    lags = torch.tensor([0, 1, 4, 16])
    grown = caps(1.5, lags, CorrectionsConfig(cap_sigma=0.5, cap_z=2.0, cap_exponent=0.5))
    torch.testing.assert_close(grown, torch.tensor([1.5, math.e, math.exp(2), math.exp(4)], dtype=torch.float64))
    assert caps(0.5, lags, CorrectionsConfig()).tolist() == [0.5] * 4


def test_second_moment_bound():
    harmful = torch.tensor([0.1, 0.4, 1.0, -2.0])  # the last one's advantage is negative
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0])
    tau = second_moment_bound(harmful, advantages, 0.04)
    squares = torch.minimum(harmful.square(), torch.tensor(tau) ** 2)
    assert float(squares.mean()) == pytest.approx(0.04, rel=1e-6)
    assert second_moment_bound(harmful, -advantages, 0.04) == math.inf  # a clip would touch none of them
    assert second_moment_bound(harmful, advantages, 10.0) == math.inf


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (IcePopMask, {"low": 2.0}),
        (GeometricMask, {"high": 0.5}),
        (CorrectionsConfig, {"masks": (MisMask(), MisMask())}),
    ],
)
def test_masks_that_make_no_sense_are_refused(kind, fields):
    with pytest.raises(ValueError, match=r"low must be at most 1|twice"):
        kind(**fields)


def test_losses_without_a_cap_of_their_own_take_that_of_the_corrections():
    groups = random_groups(tiny_model(), seed=4, drift=0.5)
    tight, loose = (CorrectionsConfig(cap=cap) for cap in (1.0, 1e6))
    for loss in (ReinforceTisConfig(), PpoConfig(proximal="current")):
        one, other = (gradient(groups, loss, corrections=c)[0] for c in (tight, loose))
        assert (one - other).norm() > 1e-3 * other.norm()
    same = msgspec.structs.replace(tight, cap=3.0)
    assert torch.equal(
        gradient(groups, CispoConfig(), corrections=tight)[0], gradient(groups, CispoConfig(), corrections=same)[0]
    )


def test_power_advantages_reach_the_loss():
    groups = random_groups(tiny_model(), seed=5)
    losses = [
        gradient(groups, CispoConfig(), advantage=AdvantageConfig(kind="power", alpha=a))[1]["loss"] for a in (0.0, 1.0)
    ]
    assert losses[0] != losses[1]
