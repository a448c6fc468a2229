"""Forced tokens are read by the model and trained by nothing: no gradient, no ratio, no place in any mean."""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from learner_samples import make_group, own_logprobs, random_groups, tiny_model
from torch import Tensor

from learner.learner import Learner
from pipeline.learner_config import (
    Aggregation,
    CispoConfig,
    CorrectionsConfig,
    EntropyConfig,
    GeometricMask,
    IcePopMask,
    KlConfig,
    LearnerConfig,
    LossConfig,
    MisMask,
    OpsmMask,
)
from pipeline.messages import ForcedSpan, Group, Rollout, VersionSpan, pack_ids, pack_logprobs

LOSSES = [kind() for kind in get_args(LossConfig)]
MASKS = (IcePopMask(low=0.7, high=1.4), MisMask(level="sequence"), GeometricMask(low=0.9, high=1.1), OpsmMask())
PHRASE = [4, 9, 4]


def force(rollout: Rollout, start: int, logprobs: Sequence[float] = (0.0, 0.0, 0.0)) -> Rollout:
    """`rollout` with the phrase put in before token `start`; what follows keeps its tokens and its engine logprobs."""
    ids, own = rollout.completion_array().tolist(), rollout.logprob_array().tolist()
    return msgspec.structs.replace(
        rollout,
        completion_ids=pack_ids([*ids[:start], *PHRASE, *ids[start:]]),
        engine_logprobs=pack_logprobs([*own[:start], *logprobs, *own[start:]]),
        forced_spans=(ForcedSpan(start, start + len(PHRASE)),),
    )


def forced_groups(**changes: Any) -> list[Group]:
    """Mixed groups; half of the rollouts are interrupted, some of them at their first or after their last token."""
    rng = np.random.default_rng(5)
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(
                force(r, int(rng.integers(0, r.num_tokens + 1)), **changes) if i % 2 else r
                for i, r in enumerate(group.rollouts)
            ),
        )
        for group in random_groups(tiny_model(), seed=1, num_groups=3, drift=0.2)
    ]


def gradient(groups: list[Group], loss: Any, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    fields: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9} | changes
    model, seen = tiny_model(), []
    learner = Learner(model, LearnerConfig(loss=loss, **fields), 1.0, policy_version=3, reference=tiny_model(seed=1))
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    metrics = learner.step(groups).metrics
    del metrics["step_s"]
    return seen[0], metrics


@pytest.mark.parametrize("loss", LOSSES, ids=lambda c: c.__struct_config__.tag)
def test_what_the_engine_says_of_a_forced_token_is_never_read(loss):
    everything: dict[str, Any] = {
        "corrections": CorrectionsConfig(level="sequence", cap_sigma=0.1, masks=MASKS),
        "kl": KlConfig(coef=0.1, estimator="k1"),
        "entropy": EntropyConfig(coef=0.1),
    }
    expected, metrics = gradient(forced_groups(), loss, **everything)
    assert expected.norm() > 0
    got, changed = gradient(forced_groups(logprobs=[-30.0, -5.0, -30.0]), loss, **everything)
    assert torch.equal(got, expected)
    assert changed == metrics
    split, _ = gradient(forced_groups(), loss, **everything, micro_batch_tokens=17)
    assert (split - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda c: c.__struct_config__.tag)
def test_a_phrase_that_nothing_follows_changes_nothing(loss):
    """The same gradient and figures as without it, but for the figures that describe the completions themselves."""
    plain = random_groups(tiny_model(), seed=2, num_groups=3, drift=0.2)
    longer = [msgspec.structs.replace(g, rollouts=tuple(force(r, r.num_tokens) for r in g.rollouts)) for g in plain]
    everything: dict[str, Any] = {"kl": KlConfig(coef=0.1), "entropy": EntropyConfig(coef=0.1)}
    (expected, metrics), (got, changed) = (gradient(groups, loss, **everything) for groups in (plain, longer))
    assert (got - expected).norm() <= 1e-10 * expected.norm()
    assert changed.pop("interrupted_frac") == 1.0 and metrics.pop("interrupted_frac") == 0.0
    assert changed.pop("completion_tokens_mean") == pytest.approx(metrics.pop("completion_tokens_mean") + len(PHRASE))
    assert changed == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_the_gradient_is_that_of_the_sampled_tokens_after_what_was_forced(aggregation):
    groups = forced_groups()
    got, metrics = gradient(groups, CispoConfig(eps_max=1.2, aggregation=aggregation))
    model, rollouts = tiny_model(), [r for g in groups for r in g.rollouts]
    sampled = {id(r): int(r.sampled_array().sum()) for r in rollouts}
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        rewards = np.array(group.chain_rewards)
        for rollout, draw in zip(group.rollouts, group.draw_indices, strict=True):
            weight = {
                "token": 1 / sum(sampled.values()),
                "sequence": 1 / (len(rollouts) * sampled[id(rollout)]),
                "prompt": 1 / (len(groups) * sum(sampled[id(r)] for r in group.rollouts)),
                "launched": 1 / sum(g.num_attempts for g in groups),
            }[aggregation]
            ids = rollout.prompt_array().tolist() + rollout.completion_array().tolist()
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
            for t in np.flatnonzero(rollout.sampled_array()):
                position = rollout.prompt_array().size + int(t)
                own = logprobs[position - 1, ids[position]]
                rho = (own.detach() - float(rollout.logprob_array()[t])).exp().clamp(max=1.2)
                total = total - weight * rho * (rewards[draw] - rewards.mean()) / rewards.std() * own
                num_tokens += 1
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (got - expected).norm() <= 1e-10 * expected.norm()
    assert metrics["num_tokens"] == num_tokens
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-10)


def test_a_completion_with_nothing_sampled_trains_nothing():
    model = tiny_model()
    good, bad = [5, 6, 1], [7, 8, 1]
    rollouts = [Rollout(i, 0, 0, pack_ids([3, 4]), pack_ids(ids), pack_logprobs(own_logprobs(model, [3, 4], ids)),
                        (VersionSpan(0, 3),), "stop", "", "e", 0, 1) for i, ids in enumerate((good, bad))]  # fmt: skip
    whole = msgspec.structs.replace(rollouts[1], forced_spans=(ForcedSpan(0, 3),))
    got, metrics = gradient([make_group([rollouts[0], whole], [1.0, 0.0])], CispoConfig(aggregation="token"))
    assert metrics["num_tokens"] == 3
    assert got.norm() > 0 and torch.isfinite(got).all()
