"""CISPO in float64 against numbers worked out from the published equations by a second, plain NumPy implementation.

`loss_vectors.json` holds inputs and expected outputs; `python tests/golden/test_loss_vectors.py` writes it anew. The
reference below is the only source of those numbers and shares no code with the learner.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

VECTORS = Path(__file__).with_name("loss_vectors.json")
AGGREGATIONS = ("token", "sequence", "prompt")


def reference(case: dict) -> dict:
    """J = sum over tokens of n sg(min(rho, eps)) A log pi; loss = -J, dloss/dlog pi = -n min(rho, eps) A."""
    lengths = [len(row["learner"]) for row in case["rollouts"]]
    group_tokens: dict[int, int] = {}
    for row, length in zip(case["rollouts"], lengths, strict=True):
        group_tokens[row["group"]] = group_tokens.get(row["group"], 0) + length
    loss, gradient, weights = 0.0, [], []
    for row, length in zip(case["rollouts"], lengths, strict=True):
        share = {
            "token": 1 / sum(lengths),
            "sequence": 1 / (len(lengths) * length),
            "prompt": 1 / (len(group_tokens) * group_tokens[row["group"]]),
        }[case["aggregation"]]
        for learner, engine in zip(row["learner"], row["engine"], strict=True):
            rho = math.exp(max(-20.0, min(20.0, learner - engine)))
            slope = share * min(rho, case["eps_max"]) * row["advantage"]
            loss -= slope * learner
            gradient.append(-slope)
            weights.append(rho)
    ess = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    k3 = [w - 1 - math.log(w) for w in weights]
    return {"loss": loss, "gradient": gradient, "ratios": weights, "ess": ess, "k3": k3}


def make_cases() -> list[dict]:
    rng = np.random.default_rng(20_240_501)
    cases = []
    for aggregation in AGGREGATIONS:
        for eps_max, drift in ((5.0, 0.05), (2.0, 1.5), (5.0, 30.0)):
            rollouts = []
            for group, length in ((0, 1), (0, 4), (1, 7), (1, 2), (2, 3)):
                learner = -rng.exponential(1.5, size=length)
                engine = np.minimum(learner + drift * rng.normal(size=length), 0.0)
                advantage = float(np.clip(rng.normal() * 2, -4, 4))
                row = {"group": group, "advantage": advantage, "learner": learner.tolist(), "engine": engine.tolist()}
                rollouts.append(row)
            case = {"aggregation": aggregation, "eps_max": eps_max, "rollouts": rollouts}
            cases.append(case | {"expected": reference(case)})
    return cases


CASES = json.loads(VECTORS.read_text()) if VECTORS.exists() else []


def test_vectors_are_those_of_the_reference():
    assert len(CASES) == 9
    for case in CASES:
        expected = reference(case)
        for name, value in case["expected"].items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['aggregation']}-eps{c['eps_max']}")
def test_cispo_matches_the_vectors(case):
    import torch

    from learner.corrections import effective_sample_frac, importance_ratios, k3_divergence
    from learner.losses import cispo_loss, rollout_normalizers

    rows, expected = case["rollouts"], case["expected"]
    counts = torch.tensor([len(row["learner"]) for row in rows])
    groups = np.array([row["group"] for row in rows])

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row[name]], dtype=torch.float64)

    logprobs, engine = flat("learner").requires_grad_(), flat("engine")
    normalizers = torch.from_numpy(rollout_normalizers(counts.numpy(), groups, case["aggregation"]))
    advantages = torch.tensor([row["advantage"] for row in rows], dtype=torch.float64)
    ratios = importance_ratios(logprobs, engine)
    loss = cispo_loss(
        logprobs,
        ratios,
        advantages.repeat_interleave(counts),
        normalizers.repeat_interleave(counts),
        case["eps_max"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-12)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected["gradient"], rtol=1e-12)
    np.testing.assert_allclose(ratios.numpy(), expected["ratios"], rtol=1e-12)
    assert effective_sample_frac(ratios) == pytest.approx(expected["ess"], rel=1e-12)
    np.testing.assert_allclose(k3_divergence(logprobs, engine).numpy(), expected["k3"], rtol=1e-9, atol=1e-15)


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_cases(), indent=1) + "\n")
    sys.exit(0)
