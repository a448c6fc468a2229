"""Which corrections are exact when weights change between the tokens of a rollout, by enumerating every rollout.

A tabular policy over 3 tokens and 6 positions drifts over versions 0 to 3. Rollouts start under version 0; before a
token a newer version may land, with a probability that depends on the tokens before it. The learner is at version 3.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.losses import Tokens, batch_loss
from pipeline.learner_config import AsymReConfig, CispoConfig, CorrectionsConfig, GspoConfig, ReinforceTisConfig

VOCAB, LENGTH, NEWEST_ENGINE, LEARNER = 3, 6, 2, 3
LAND_PROBABILITY, BASELINE = 0.35, 0.25
UNCAPPED = CorrectionsConfig(cap=math.inf)
WHOLE_ROLLOUT = CorrectionsConfig(cap=math.inf, level="sequence")
PRODUCT = ReinforceTisConfig()


class World(NamedTuple):
    """`logprobs`: [4, T, V, V] log pi_v(y_t | y_{t-1}) of every version; the rest is one row a possible rollout."""

    logits: Tensor
    logprobs: Tensor
    completions: Tensor
    versions: Tensor
    probabilities: Tensor


def previous(completions: Tensor) -> Tensor:
    return torch.nn.functional.pad(completions[:, :-1], (1, 0))


def enumerate_world(drift: float) -> World:
    rng = np.random.default_rng(0)
    base, direction = (torch.from_numpy(rng.normal(size=(LENGTH, VOCAB, VOCAB))) for _ in range(2))
    logits = torch.stack([base + drift * version * direction for version in range(LEARNER + 1)])
    table = torch.log_softmax(logits, -1)
    rows = [((), (), 1.0)]
    for t in range(LENGTH):
        grown = []
        for tokens, versions, probability in rows:
            last, version = (tokens[-1] if tokens else 0), (versions[-1] if versions else 0)
            lands = LAND_PROBABILITY * (1.0 if last == 2 else 0.3) if version < NEWEST_ENGINE else 0.0
            for now, chance in ((version, 1 - lands), (version + 1, lands)):
                if chance:
                    chances = (table[now, t, last].exp() * probability * chance).tolist()
                    grown += [((*tokens, a), (*versions, now), chances[a]) for a in range(VOCAB)]
        rows = grown
    tokens, versions, probabilities = zip(*rows, strict=True)
    return World(
        logits, table, torch.tensor(tokens), torch.tensor(versions), torch.tensor(probabilities, dtype=torch.float64)
    )


@pytest.fixture(scope="module", params=[0.1, 0.3])
def world(request) -> tuple[float, World]:
    return request.param, enumerate_world(request.param)


def rewards(completions: Tensor) -> Tensor:
    return (completions.sum(1) % 4 == 0).double() - BASELINE


def token_logprobs(table: Tensor, completions: Tensor) -> Tensor:
    """[R, T] under `table`, [T, V, V]."""
    return table[torch.arange(LENGTH), previous(completions), completions]


def expected_gradient(world: World, loss, corrections, assumed_versions: Tensor | None = None) -> Tensor:
    """What the learner's gradient is on average over every rollout the engines could have produced."""
    versions = world.versions if assumed_versions is None else assumed_versions
    logits = world.logits[LEARNER].clone().requires_grad_()
    num_rollouts = len(world.completions)
    where = (versions, torch.arange(LENGTH), previous(world.completions), world.completions)
    tokens = Tokens(
        logprobs=token_logprobs(torch.log_softmax(logits, -1), world.completions).flatten(),
        engine_logprobs=world.logprobs[where].flatten(),
        advantages=rewards(world.completions).repeat_interleave(LENGTH),
        normalizers=world.probabilities.repeat_interleave(LENGTH),
        rows=torch.arange(num_rollouts).repeat_interleave(LENGTH),
        lags=(LEARNER - versions).flatten(),
    )
    batch_loss(tokens, loss, corrections, math.inf).loss.backward()
    assert logits.grad is not None
    return -logits.grad


def true_gradient(world: World) -> Tensor:
    logits = world.logits[LEARNER].clone().requires_grad_()
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    probabilities = token_logprobs(torch.log_softmax(logits, -1), every).sum(1).exp()
    (probabilities * rewards(every)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def relative_error(world: World, *how) -> float:
    truth = true_gradient(world)
    return float((expected_gradient(world, *how) - truth).norm() / truth.norm())


def test_the_enumeration_is_a_distribution_and_versions_change(world):
    _, made = world
    assert float(made.probabilities.sum()) == pytest.approx(1.0, abs=1e-12)
    assert len({tuple(v) for v in made.versions.tolist()}) > 10


def test_the_product_of_logged_ratios_is_exact(world):
    _, made = world
    assert relative_error(made, PRODUCT, WHOLE_ROLLOUT) < 1e-10


def test_the_mean_ratio_is_one_in_every_lag_bucket_of_every_position(world):
    """Also where the token's version depended on the tokens before it."""
    _, made = world
    learner = token_logprobs(made.logprobs[LEARNER], made.completions)
    where = (made.versions, torch.arange(LENGTH), previous(made.completions), made.completions)
    ratios = (learner - made.logprobs[where]).exp()
    for position in range(LENGTH):
        for version in range(NEWEST_ENGINE + 1):
            chosen = made.versions[:, position] == version
            weights = made.probabilities[chosen]
            if len(weights):
                mean = (weights * ratios[chosen, position]).sum() / weights.sum()
                assert float(mean) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "errors"),
    [
        ("launch version", (0.168, 1.780)),
        ("last version", (0.159, 0.448)),
        ("token ratios", (0.566, 1.292)),
        ("capped token ratios", (0.566, 1.292)),
        ("geometric mean", (0.460, 1.108)),
        ("no correction", (0.554, 1.266)),
    ],
)
def test_everything_else_is_biased_by_this_much(world, name, errors):
    drift, made = world
    first = torch.zeros_like(made.versions)
    how = {
        "launch version": (PRODUCT, WHOLE_ROLLOUT, first),
        "last version": (PRODUCT, WHOLE_ROLLOUT, made.versions[:, -1:].expand(-1, LENGTH)),
        "token ratios": (ReinforceTisConfig(), UNCAPPED),
        "capped token ratios": (CispoConfig(eps_max=5.0), UNCAPPED),
        "geometric mean": (GspoConfig(eps_low=1.0, eps_high=math.inf), UNCAPPED),
        "no correction": (AsymReConfig(baseline_shift=0.0), UNCAPPED),
    }[name]
    expected = errors[0] if drift == 0.1 else errors[1]
    assert relative_error(made, *how) == pytest.approx(expected, abs=1e-3)
