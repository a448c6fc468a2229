"""The KL and entropy terms: their gradients by enumerating a small policy, and what they do within a step."""

import itertools
import math

import numpy as np
import pytest
import torch
from learner_samples import make_group, make_rollout, own_logprobs, random_groups, tiny_model
from torch import Tensor

from learner.corrections import rollout_tails
from learner.learner import Learner
from learner.losses import Tokens
from learner.model import _head_logprobs, completion_logprobs
from learner.packing import collate
from learner.regularizers import entropy_loss, kl_loss
from pipeline.learner_config import (
    AsymReConfig,
    CispoConfig,
    CorrectionsConfig,
    EntropyConfig,
    IcePopMask,
    KlConfig,
    LearnerConfig,
)

VOCAB, LENGTH = 3, 4
EVERY = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
WHERE = (torch.arange(LENGTH), torch.nn.functional.pad(EVERY[:, :-1], (1, 0)))  # position and previous token
EXACT = CorrectionsConfig(level="sequence", cap=math.inf)


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, V, V] of the policy, the reference and the engine."""
    rng = np.random.default_rng(3)
    policy, *directions = (torch.from_numpy(rng.normal(size=(LENGTH, VOCAB, VOCAB))) for _ in range(3))
    return policy.requires_grad_(), policy.detach() + 0.8 * directions[0], policy.detach() + 0.4 * directions[1]


def every_token(logits: Tensor) -> Tensor:
    """[R * T] log-probabilities of every token of every rollout."""
    return torch.log_softmax(logits, -1)[(*WHERE, EVERY)].flatten()


def tokens_of(policy: Tensor, engine: Tensor) -> Tokens:
    """Every rollout once, weighted by its probability under the engine."""
    rows = torch.arange(len(EVERY)).repeat_interleave(LENGTH)
    mu = every_token(engine)
    probabilities = mu.view(-1, LENGTH).sum(1).exp()[rows]
    return Tokens(every_token(policy), mu, torch.zeros_like(mu), probabilities, rows, torch.zeros_like(rows))


def gradient(value: Tensor, policy: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy, retain_graph=True)[0]


def kl_gradient(estimator: str, policy: Tensor, ref: Tensor, engine: Tensor) -> Tensor:
    tokens = tokens_of(policy, engine)
    everything = torch.ones_like(tokens.rows, dtype=torch.bool)
    return gradient(
        kl_loss(tokens, every_token(ref), everything, KlConfig(coef=1.0, estimator=estimator), EXACT), policy
    )


def by_position(policy: Tensor, divergences: Tensor) -> Tensor:
    """sum_t E[D(s_t)] over prefixes of the policy that are held fixed; `divergences` is [T, V] by previous token."""
    probabilities = every_token(policy.detach()).view(-1, LENGTH).sum(1).exp()
    return (probabilities[:, None] * divergences[WHERE]).sum()


@pytest.mark.parametrize("off_policy", [False, True])
def test_k1_is_the_gradient_of_the_divergence_of_whole_rollouts(off_policy):
    policy, ref, engine = tables()
    log_pi, log_ref = (every_token(t).view(-1, LENGTH).sum(1) for t in (policy, ref))
    expected = gradient((log_pi.exp() * (log_pi - log_ref)).sum(), policy)
    got = kl_gradient("k1", policy, ref, engine if off_policy else policy.detach())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_k2_and_k3_are_the_gradients_of_the_two_divergences_at_fixed_prefixes():
    policy, ref, _ = tables()
    log_pi, log_ref = torch.log_softmax(policy, -1), torch.log_softmax(ref, -1)
    reverse = gradient(by_position(policy, (log_pi.exp() * (log_pi - log_ref)).sum(-1)), policy)
    forward = gradient(by_position(policy, (log_ref.exp() * (log_ref - log_pi)).sum(-1)), policy)
    assert (reverse - forward).norm() > 0.1 * reverse.norm()  # GRPO's term pulls another way than its name says
    for estimator, expected in (("k2", reverse), ("k3", forward)):
        got = kl_gradient(estimator, policy, ref, policy.detach())
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_the_entropy_term_is_the_gradient_of_the_entropy_at_fixed_prefixes():
    policy, _, _ = tables()
    tokens = tokens_of(policy, policy.detach())
    log_pi = torch.log_softmax(policy, -1)
    entropies = -(log_pi.exp() * log_pi).sum(-1)
    everything = torch.ones_like(tokens.rows, dtype=torch.bool)
    loss = entropy_loss(tokens, entropies[WHERE].flatten(), everything, EntropyConfig(coef=0.5))
    expected = -0.5 * gradient(by_position(policy, entropies), policy)
    torch.testing.assert_close(gradient(loss, policy), expected, rtol=0, atol=1e-12)


def test_tails_sum_from_a_token_to_the_end_of_its_rollout():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert rollout_tails(values, torch.tensor([0, 0, 0, 1, 1])).tolist() == [7, 6, 4, 24, 16]
    assert rollout_tails(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).numel() == 0


# --- within a step ---


def step_gradient(groups, model=None, reference=None, **changes):
    fields = {"lr": 1e-2, "warmup_steps": 0, "max_grad_norm": 1e9} | changes
    learner, seen = Learner(model or tiny_model(), LearnerConfig(**fields), 1.0, reference=reference), []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.model.parameters()]))
    metrics = learner.step(groups).metrics
    return (seen[0] if seen else torch.zeros(())), metrics


BOTH = {"kl": KlConfig(coef=0.1, estimator="k1"), "entropy": EntropyConfig(coef=0.05)}


def test_both_terms_do_not_depend_on_micro_batches_or_row_order():
    groups, reference = random_groups(tiny_model(), seed=1, num_groups=3, drift=0.2), tiny_model(seed=1)
    whole, metrics = step_gradient(groups, reference=reference, micro_batch_tokens=10_000, **BOTH)
    plain, _ = step_gradient(groups)
    assert (whole - plain).norm() > 1e-2 * plain.norm() and metrics["kl_ref"] > 0
    for batch in (groups, groups[::-1]):
        split, split_metrics = step_gradient(batch, reference=reference, micro_batch_tokens=17, **BOTH)
        assert (split - whole).norm() <= 1e-10 * whole.norm()
        assert split_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-9)


def test_a_policy_that_is_its_reference_feels_no_pull():
    groups = random_groups(tiny_model(), seed=1)
    plain, _ = step_gradient(groups)
    for estimator in ("k1", "k2", "k3"):
        pulled, metrics = step_gradient(groups, reference=tiny_model(), kl=KlConfig(coef=10.0, estimator=estimator))
        assert metrics["kl_ref"] == 0.0
        torch.testing.assert_close(pulled, plain, rtol=0, atol=1e-12)


def test_entropy_and_divergence_move_as_told():
    """Steps on the terms alone: rewards are all equal, so the loss itself has no gradient."""
    rollouts = [make_rollout([3], ids, own_logprobs(tiny_model(), [3], ids)) for ids in ([4, 5, 1], [6, 7, 1])]
    groups = [make_group(rollouts, [1.0, 1.0])]

    def after(steps: int, name: str, **terms) -> float:
        config = LearnerConfig(lr=3e-3, warmup_steps=0, **terms)
        learner = Learner(tiny_model(), config, 1.0, reference=tiny_model(seed=1))
        return [learner.step(groups).metrics[name] for _ in range(steps)][-1]

    start = after(1, "entropy")
    assert after(6, "entropy", entropy=EntropyConfig(coef=0.1)) > start + 0.01
    assert after(6, "entropy", entropy=EntropyConfig(coef=-0.1)) < start - 0.01
    for estimator in ("k2", "k3"):
        kl = KlConfig(coef=1.0, estimator=estimator)
        assert after(6, "kl_ref", kl=kl) < 0.9 * after(1, "kl_ref", kl=kl)


@pytest.mark.parametrize("term", ["kl", "entropy"])
def test_each_term_has_its_own_zero_variance_filter(term):
    model, reference = tiny_model(), tiny_model(seed=1)
    kinds = {"kl": KlConfig, "entropy": EntropyConfig}

    def pull(groups, zero_variance: bool, loss=None) -> Tensor:
        fields = {term: kinds[term](coef=0.1, zero_variance=zero_variance)}
        return step_gradient(groups, model, reference, loss=loss or CispoConfig(), **fields)[0]

    rollouts = random_groups(model, seed=2, num_groups=1)[0].rollouts
    equal = [make_group(rollouts, [1.0] * 4)]
    assert pull(equal, zero_variance=True).norm() > 1e-3
    assert pull(equal, zero_variance=False).norm() == 0.0
    # Only the term is filtered: a loss that learns from such a group still does.
    asymre = AsymReConfig(baseline_shift=-0.5)
    torch.testing.assert_close(pull(equal, False, asymre), step_gradient(equal, model, loss=asymre)[0])
    mixed = [make_group(rollouts, [1.0, 0.0, 1.0, 0.0])]
    torch.testing.assert_close(pull(mixed, zero_variance=True), pull(mixed, zero_variance=False))


def test_masked_tokens_are_left_out_of_both_terms():
    model = tiny_model()
    rollouts = [make_rollout([3], ids, own_logprobs(model, [3], ids) - 5.0) for ids in ([4, 5], [6, 7])]
    masks = CorrectionsConfig(masks=(IcePopMask(),))
    got, metrics = step_gradient(
        [make_group(rollouts, [1.0, 0.0])], model, tiny_model(seed=1), corrections=masks, **BOTH
    )
    assert metrics["masked_frac"] == 1.0 and got.norm() == 0.0


def test_hostile_batches_stay_finite():
    sure = make_rollout([3], [4, 5], [-80.0, 0.0])
    far = tiny_model(seed=1)
    with torch.no_grad():
        far.get_input_embeddings().weight.mul_(60.0)  # logprobs of the reference go to -1000 and below
    for groups in (
        [],
        [make_group([sure, make_rollout([3], [], [])], [1.0, 0.0])],
        [make_group([sure] * 2, [1.0, 1.0])],
    ):
        for estimator in ("k1", "k2", "k3"):
            kl = KlConfig(coef=0.1, estimator=estimator)
            learner = Learner(tiny_model(), LearnerConfig(kl=kl, entropy=BOTH["entropy"]), 1.0, reference=far)
            report = learner.step(groups)
            assert not report.warning and all(math.isfinite(v) for v in report.metrics.values())


def test_entropies_have_the_same_gradient_in_chunks():
    model = tiny_model()
    batch = collate([np.array([3, 4])], [np.array([5, 6, 7, 1])])

    def slope(max_logits: int) -> Tensor:
        _, entropies = completion_logprobs(model, batch, 0.7, max_logits, entropy_gradient=True)
        return torch.cat([g.flatten() for g in torch.autograd.grad(entropies.sum(), list(model.parameters()))])

    torch.testing.assert_close(slope(1 << 20), slope(13 * 2), rtol=1e-10, atol=1e-12)


def test_the_entropy_of_a_token_of_probability_zero_has_a_gradient():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [1.0], [-math.inf]]).requires_grad_()
    _, entropies = _head_logprobs(hidden, weight, None, torch.tensor([0]), 1.0, entropy_gradient=True)
    (slope,) = torch.autograd.grad(entropies.sum(), weight)
    p = 1 / (1 + math.e)
    assert float(entropies.detach()) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)
    assert slope.flatten().tolist() == pytest.approx([p * (1 - p), -p * (1 - p), 0.0], rel=1e-5)
