"""Decoupled baselines: which rollouts give a gradient, and that choosing at random changes no expectation."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from learner_samples import random_groups, tiny_model

from learner.learner import Learner
from learner.subset import choose, train_subsets
from pipeline.learner_config import AdvantageConfig, CispoConfig, LearnerConfig, SubsetConfig


def gradient(groups, **changes):
    fields = {
        "lr": 1e-2,
        "warmup_steps": 0,
        "max_grad_norm": 1e9,
        "loss": CispoConfig(aggregation="launched"),
    } | changes
    learner, seen = Learner(tiny_model(), LearnerConfig(**fields), 1.0), []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    metrics = learner.step(groups).metrics
    return (seen[0] if seen else torch.zeros(())), metrics


def test_the_mean_over_every_random_choice_is_the_gradient_of_all():
    """Exact: the six choices of two from four, each reached through a chain whose number draws it."""
    (group,) = random_groups(tiny_model(), seed=1, num_groups=1, drift=0.2)
    by_choice = {}
    for chain_id in range(200):
        chosen = tuple(choose(np.zeros(4), 2, "random", np.random.default_rng(chain_id)).tolist())
        by_choice.setdefault(chosen, msgspec.structs.replace(group, chain_id=chain_id))
    assert sorted(by_choice) == list(itertools.combinations(range(4), 2))
    parts = [gradient([g], subset=SubsetConfig(num_rollouts=2)) for g in by_choice.values()]
    whole, _ = gradient([group])
    mean = torch.stack([part for part, _ in parts]).mean(0)
    assert (mean - whole).norm() <= 1e-10 * whole.norm()
    assert max(float((part - whole).norm()) for part, _ in parts) > 0.1 * whole.norm()
    assert all(metrics["num_rollouts"] == 2 for _, metrics in parts)


def test_random_choices_are_uniform():
    rng = np.random.default_rng(0)
    counts = np.bincount(np.concatenate([choose(np.zeros(8), 3, "random", rng) for _ in range(4000)]), minlength=8)
    # A binomial of 4000 draws with p = 3/8 has a standard deviation of 31.
    assert np.abs(counts - 1500).max() < 5 * 31


def test_max_variance_is_the_best_of_all_subsets():
    rng = np.random.default_rng(1)
    for m in (1, 2, 3, 5):
        for _ in range(20):
            advantages = rng.choice([rng.normal(size=7), np.repeat([-1.0, 2.0], [5, 2])])
            got = choose(advantages, m, "max_variance", rng)
            best = max(advantages[list(s)].var() for s in itertools.combinations(range(7), m))
            assert len(set(got.tolist())) == m and advantages[got].var() == pytest.approx(best)


def test_the_baseline_is_that_of_the_whole_chain():
    groups = random_groups(tiny_model(), seed=2, num_groups=2)
    whole = [np.array([2.0, -1.0, 2.0, -1.0]), np.array([0.5, -0.5, 0.5, -0.5])]
    subsets, advantages, num_attempts = train_subsets(
        groups, whole, 12, SubsetConfig(num_rollouts=2, choose="max_variance")
    )
    assert [sorted(a.tolist()) for a in advantages] == [[-1.0, 2.0], [-0.5, 0.5]]  # as they were: not centred anew
    assert num_attempts == 6
    for group, part in zip(groups, subsets, strict=True):
        assert part.chain_rewards == group.chain_rewards and len(part.rollouts) == len(part.verdicts) == 2
        for rollout, draw, verdict in zip(part.rollouts, part.draw_indices, part.verdicts, strict=True):
            assert rollout == group.rollouts[group.draw_indices.index(draw)]
            assert verdict.reward == group.chain_rewards[draw]


def test_a_choice_is_repeated_and_all_are_taken_where_there_are_no_more():
    groups = random_groups(tiny_model(), seed=3, num_groups=3)
    few, again = (gradient(groups, subset=SubsetConfig(num_rollouts=3))[0] for _ in range(2))
    every, all_of_them = gradient(groups)[0], gradient(groups, subset=SubsetConfig(num_rollouts=4))[0]
    assert torch.equal(few, again) and torch.equal(every, all_of_them) and not torch.equal(few, every)
    assert train_subsets([], [], 5, SubsetConfig(num_rollouts=2)) == ([], [], 5)
    # Whatever the advantage, the choice comes after it.
    assert (
        gradient(groups, subset=SubsetConfig(num_rollouts=2), advantage=AdvantageConfig(rescale="anchor"))[0].norm() > 0
    )
