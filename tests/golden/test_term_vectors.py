"""Advantages by GAE, value losses and KL terms in float64 against numbers worked out from the equations.

As for the losses: `term_vectors.json` holds inputs and expected outputs, `python tests/golden/test_term_vectors.py`
writes it anew, and the reference below shares no code with the learner.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

VECTORS = Path(__file__).with_name("term_vectors.json")
NAMES = ("gae", "value_loss", "kl")


def gae(case: dict) -> list[list[float]]:
    """A_t = sum_k (gamma lambda)^k d_(t+k), each written out."""
    gamma, decay = case["gamma"], case["gamma"] * case["gae_lambda"]
    found = []
    for reward, values in zip(case["rewards"], case["values"], strict=True):
        ahead = [*[gamma * v for v in values[1:]], reward]
        deltas = [a - v for a, v in zip(ahead, values, strict=True)]
        found.append([math.fsum(decay**k * d for k, d in enumerate(deltas[t:])) for t in range(len(values))])
    return found


def value_loss(case: dict) -> list[float]:
    found = []
    for value, old, target in zip(case["values"], case["old"], case["returns"], strict=True):
        squares = [(value - target) ** 2]
        if case["clip"] is not None:
            squares.append((max(old - case["clip"], min(old + case["clip"], value)) - target) ** 2)
        found.append(max(squares) / 2)
    return found


def kl(case: dict) -> dict:
    """coef sum n min(w, C) k, its gradient by log pi."""
    value, gradient = 0.0, []
    for row in case["rollouts"]:
        ratios = [p - r for p, r in zip(row["learner"], row["reference"], strict=True)]
        drifts = [p - e for p, e in zip(row["learner"], row["engine"], strict=True)]
        for t, (log_pi, ratio, drift) in enumerate(zip(row["learner"], ratios, drifts, strict=True)):
            weight = min(math.exp(sum(drifts) if case["level"] == "sequence" else drift), case["cap"])
            ahead = math.fsum(ratios[t:])
            k, slope = {
                "k1": (ahead * log_pi, ahead),
                "k2": (ratio * ratio / 2, ratio),
                "k3": (math.exp(-ratio) - 1 + ratio, 1 - math.exp(-ratio)),
            }[case["estimator"]]
            scale = case["coef"] * row["normalizer"] * weight * row["takes_part"]
            value += scale * k
            gradient.append(scale * slope)
    return {"loss": value, "gradient": gradient}


REFERENCES = dict(zip(NAMES, (gae, value_loss, kl), strict=True))


def make_cases() -> dict[str, list[dict]]:
    rng = np.random.default_rng(7)
    lengths = (1, 4, 7)
    cases: dict[str, list[dict]] = {name: [] for name in NAMES}
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.9, 0.7), (0.99, 0.0), (0.0, 0.5)):
        values = [rng.normal(size=n).tolist() for n in lengths]
        cases["gae"].append(
            {"gamma": gamma, "gae_lambda": lam, "rewards": rng.normal(size=len(lengths)).tolist(), "values": values}
        )
    for clip in (None, 0.2, 1.0):
        values, old, returns = rng.normal(size=(3, 12)).tolist()
        cases["value_loss"].append({"clip": clip, "values": values, "old": old, "returns": returns})
    for estimator in ("k1", "k2", "k3"):
        for level, cap in (("token", 1.1), ("sequence", 1.3)):
            rollouts = []
            for index, n in enumerate(lengths):
                learner = (-rng.exponential(1.5, size=n)).tolist()
                engine, reference = ([min(0.0, x + d * rng.normal()) for x in learner] for d in (0.3, 0.8))
                row = {"learner": learner, "engine": engine, "reference": reference, "normalizer": rng.random() + 0.1}
                rollouts.append(row | {"takes_part": index != 1})
            cases["kl"].append({"estimator": estimator, "level": level, "cap": cap, "coef": 0.7, "rollouts": rollouts})
    return {name: [c | {"expected": REFERENCES[name](c)} for c in some] for name, some in cases.items()}


def flat(expected) -> list[float]:
    """The numbers in nested lists and tables, in order."""
    if isinstance(expected, float):
        return [expected]
    parts = expected.values() if isinstance(expected, dict) else expected
    return [number for part in parts for number in flat(part)]


CASES = json.loads(VECTORS.read_text()) if VECTORS.exists() else {name: [] for name in NAMES}


def test_vectors_are_those_of_the_reference():
    made = make_cases()
    for name in NAMES:
        assert len(CASES[name]) == len(made[name]) > 0
        for case in CASES[name]:
            np.testing.assert_allclose(flat(case["expected"]), flat(REFERENCES[name](case)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("case", CASES["gae"])
def test_generalized_advantages(case):
    from learner.critic import generalized_advantages

    lengths = np.array([len(values) for values in case["values"]])
    padded = np.full((len(lengths), lengths.max()), 1e9)  # what stands after the end must not matter
    for row, values in zip(padded, case["values"], strict=True):
        row[: len(values)] = values
    got = generalized_advantages(np.array(case["rewards"]), padded, lengths, case["gamma"], case["gae_lambda"])
    for row, n, expected in zip(got, lengths, case["expected"], strict=True):
        np.testing.assert_allclose(row[:n], expected, rtol=1e-12, atol=1e-14)
        assert not row[n:].any()


@pytest.mark.parametrize("case", CASES["value_loss"])
def test_value_losses(case):
    import torch

    from learner.critic import value_losses

    values, old, returns = (torch.tensor(case[n], dtype=torch.float64) for n in ("values", "old", "returns"))
    got = value_losses(values, old, returns, case["clip"])
    np.testing.assert_allclose(got.numpy(), case["expected"], rtol=1e-12)


@pytest.mark.parametrize("case", CASES["kl"], ids=lambda c: f"{c['estimator']}-{c['level']}")
def test_kl_terms(case):
    import torch

    from learner.losses import Tokens
    from learner.regularizers import kl_loss
    from pipeline.learner_config import CorrectionsConfig, KlConfig

    rows = case["rollouts"]
    counts = torch.tensor([len(row["learner"]) for row in rows])
    learner, engine, reference = (
        torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64)
        for name in ("learner", "engine", "reference")
    )
    normalizers, takes_part = (
        torch.tensor([row[name] for row in rows], dtype=kind).repeat_interleave(counts)
        for name, kind in (("normalizer", torch.float64), ("takes_part", torch.bool))
    )
    index = torch.arange(len(rows)).repeat_interleave(counts)
    tokens = Tokens(
        learner.requires_grad_(), engine, torch.zeros_like(engine), normalizers, index, torch.zeros_like(index)
    )
    corrections = CorrectionsConfig(level=case["level"], cap=case["cap"])
    config = KlConfig(coef=case["coef"], estimator=case["estimator"])
    loss = kl_loss(tokens, reference, takes_part, config, corrections)
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-12)
    assert learner.grad is not None
    np.testing.assert_allclose(learner.grad.numpy(), case["expected"]["gradient"], rtol=1e-12, atol=1e-14)


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_cases()).replace('{"', '\n{"') + "\n")
    sys.exit(0)
