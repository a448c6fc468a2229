"""Every loss and mask in float64 against numbers worked out from the published equations in plain Python.

`loss_vectors.json` holds inputs and expected outputs; `python tests/golden/test_loss_vectors.py` writes it anew. The
reference below is the only source of those numbers and shares no code with the learner: it knows each token's value and
slope by hand, where the learner differentiates.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

VECTORS = Path(__file__).with_name("loss_vectors.json")
MASKS = (
    {"kind": "icepop", "low": 0.5, "high": 2.0},
    {"kind": "mis", "level": "token", "cap": 1.2},
    {"kind": "mis", "level": "sequence", "cap": 1.5},
    {"kind": "geometric", "low": 0.9, "high": 1.1},
    {"kind": "opsm", "delta": 0.05},
    {"kind": "dppo", "threshold": 0.05},
)
CASES_AS_CONFIG = (
    ("cispo", {"kind": "cispo", "eps_max": 5.0}, {}),
    ("cispo-sequence", {"kind": "cispo", "eps_max": 1.5, "aggregation": "sequence"}, {}),
    ("cispo-prompt", {"kind": "cispo", "eps_max": 1.1, "aggregation": "prompt"}, {}),
    ("cispo-launched", {"kind": "cispo", "eps_max": 1.1, "aggregation": "launched"}, {}),
    ("cispo-lag-cap", {"kind": "cispo", "eps_max": 1.1}, {"cap_sigma": 0.2, "cap_z": 1.5, "cap_exponent": 0.75}),
    ("reinforce-token", {"kind": "reinforce_tis"}, {"cap": 1.3}),
    ("reinforce-sequence", {"kind": "reinforce_tis"}, {"level": "sequence", "cap": 1.3}),
    ("ppo", {"kind": "ppo", "eps": 0.2}, {}),
    ("ppo-dual", {"kind": "ppo", "eps": 0.2, "dual_clip": 1.5}, {}),
    ("ppo-current", {"kind": "ppo", "proximal": "current"}, {"cap": 1.4}),
    ("ppo-approximate", {"kind": "ppo", "eps": 0.1, "proximal": "approximate"}, {"cap": 1.4}),
    ("ppo-sequence", {"kind": "ppo", "eps": 0.1, "proximal": "approximate"}, {"cap": 1.2, "level": "sequence"}),
    ("grpo", {"kind": "grpo", "eps_low": 0.2, "eps_high": 0.28}, {}),
    ("gspo", {"kind": "gspo", "eps_low": 0.05, "eps_high": 0.07}, {}),
    ("topr", {"kind": "topr"}, {}),
    ("m2po", {"kind": "m2po", "max_moment": 0.04}, {}),
    ("m2po-loose", {"kind": "m2po", "max_moment": 1e3}, {}),
    ("asymre", {"kind": "asymre", "baseline_shift": -0.3}, {}),
    *((f"mask-{m['kind']}-{m.get('level', '')}", {"kind": "cispo", "eps_max": 5.0}, {"masks": [m]}) for m in MASKS),
    ("all-masks", {"kind": "ppo", "eps": 0.2}, {"masks": list(MASKS)}),
)
NUM_ATTEMPTS = 9


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def tau_by_bisection(log_rhos: list[float], max_moment: float) -> float:
    def moment(tau: float) -> float:
        return math.fsum(min(x * x, tau * tau) for x in log_rhos) / len(log_rhos)

    low, high = 0.0, 20.0
    if not log_rhos or moment(high) <= max_moment:
        return high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if moment(middle) <= max_moment else (low, middle)
    return low


def clipped(r: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """min(r A, clip(r) A) and its derivative by log r."""
    value, slope = r * a, r * a
    if clamp(r, low, high) * a < value:
        value, slope = clamp(r, low, high) * a, 0.0
    if dual is not None and a < 0 and value < dual * a:
        value, slope = dual * a, 0.0
    return value, slope


def term(token: dict, rollout: dict, loss: dict, cor: dict, tau: float) -> tuple[float, float]:
    """J_t and dJ_t/dlog pi_t."""
    a, log_pi, log_mu, lag = rollout["advantage"], token["learner"], token["engine"], rollout["lag"]
    rho, product = math.exp(log_pi - log_mu), math.exp(rollout["sum"])
    growth = math.exp(cor.get("cap_z", 2.0) * cor.get("cap_sigma", 0.0) * lag ** cor.get("cap_exponent", 0.5))
    kind, cap = loss["kind"], cor.get("cap", 2.0)
    if kind == "cispo":
        weight = min(rho, max(loss["eps_max"], growth))
        return weight * a * log_pi, weight * a
    if kind == "reinforce_tis":
        weight = min(product if cor.get("level") == "sequence" else rho, max(cap, growth))
        return weight * a * log_pi, weight * a
    if kind == "topr":
        weight = 1.0 if a > 0 else min(product, 1.0)
        return weight * a * log_pi, weight * a
    if kind == "asymre":
        return (a - loss["baseline_shift"]) * log_pi, a - loss["baseline_shift"]
    if kind == "gspo":
        s = math.exp(rollout["sum"] / rollout["length"])
        return clipped(s, a, 1 - loss["eps_low"], 1 + loss["eps_high"])
    if kind == "m2po":
        return clipped(rho, a, math.exp(-tau), math.exp(tau))
    share = {"engine": 0.0, "current": 1.0, "approximate": (lag - 1) / lag if lag else 0.0}[
        loss.get("proximal", "engine")
    ]
    spent = share * (rollout["sum"] if cor.get("level") == "sequence" else log_pi - log_mu)
    weight = min(math.exp(spent), cap)
    low, high = loss.get("eps_low", loss.get("eps", 0.2)), loss.get("eps_high", loss.get("eps", 0.2))
    value, slope = clipped(math.exp((1 - share) * (log_pi - log_mu)), a, 1 - low, 1 + high, loss.get("dual_clip"))
    return weight * value, weight * slope


def is_masked(mask: dict, token: dict, rollout: dict) -> bool:
    log_rho, mean = token["learner"] - token["engine"], rollout["sum"] / rollout["length"]
    match mask["kind"]:
        case "icepop":
            return not mask["low"] <= math.exp(log_rho) <= mask["high"]
        case "mis":
            return math.exp(rollout["sum"] if mask["level"] == "sequence" else log_rho) > mask["cap"]
        case "geometric":
            return not mask["low"] <= math.exp(mean) <= mask["high"]
        case "opsm":
            return rollout["advantage"] < 0 and -mean > mask["delta"]
    moved = math.exp(token["learner"]) - math.exp(token["engine"])
    return math.copysign(1.0, rollout["advantage"]) * moved > mask["threshold"]


def reference(case: dict) -> dict:
    """The loss -sum n J over unmasked tokens, its gradient by log pi, the share of tokens under each mask."""
    loss, cor = case["loss"], case["corrections"]
    rollouts = []
    for row in case["rollouts"]:
        tokens = [{"learner": x, "engine": y} for x, y in zip(row["learner"], row["engine"], strict=True)]
        total = math.fsum(t["learner"] - t["engine"] for t in tokens)
        rollouts.append(row | {"tokens": tokens, "sum": total, "length": len(tokens)})
    num_tokens = sum(r["length"] for r in rollouts)
    group_tokens: dict[int, int] = {}
    for r in rollouts:
        group_tokens[r["group"]] = group_tokens.get(r["group"], 0) + r["length"]
    drifts = [(r["advantage"], t["learner"] - t["engine"]) for r in rollouts for t in r["tokens"]]
    tau = tau_by_bisection([x for a, x in drifts if a * x > 0], loss.get("max_moment", 0.0))
    value, gradient, masked = 0.0, [], [0] * len(cor.get("masks", ()))
    for r in rollouts:
        share = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(rollouts) * r["length"]),
            "prompt": 1 / (len(group_tokens) * group_tokens[r["group"]]),
            "launched": 1 / NUM_ATTEMPTS,
        }[loss.get("aggregation", "token")]
        for token in r["tokens"]:
            hits = [is_masked(mask, token, r) for mask in cor.get("masks", ())]
            masked = [count + hit for count, hit in zip(masked, hits, strict=True)]
            objective, slope = (0.0, 0.0) if any(hits) else term(token, r, loss, cor, tau)
            value -= share * objective
            gradient.append(-share * slope)
    return {"loss": value, "gradient": gradient, "masked_frac": [count / num_tokens for count in masked]}


def make_rollouts(drift: float) -> list[dict]:
    rng = np.random.default_rng(20_240_501)
    rollouts = []
    for index, (group, length) in enumerate(((0, 1), (0, 4), (1, 7), (1, 2), (2, 3), (2, 5))):
        learner = -rng.exponential(1.5, size=length)
        engine = np.minimum(learner + drift * rng.normal(size=length), 0.0)
        advantage = float(np.clip(abs(rng.normal()) * 2 + 0.1, 0, 4)) * (-1) ** index
        row = {"group": group, "advantage": advantage, "lag": index % 4}
        rollouts.append(row | {"learner": learner.tolist(), "engine": engine.tolist()})
    return rollouts


def make_cases() -> list[dict]:
    cases = []
    for name, loss, corrections in CASES_AS_CONFIG:
        for drift in (0.1, 0.7):
            case = {"name": f"{name}-{drift}", "loss": loss, "corrections": corrections}
            case["rollouts"] = make_rollouts(drift)
            cases.append(case | {"expected": reference(case)})
    return cases


CASES = json.loads(VECTORS.read_text()) if VECTORS.exists() else []


def test_vectors_are_those_of_the_reference():
    assert [c["name"] for c in CASES] == [c["name"] for c in make_cases()]
    for case in CASES:
        expected = reference(case)
        for name, value in case["expected"].items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-15)


def test_every_clip_and_mask_binds_somewhere():
    """A vector in which nothing is cut off would not tell a loss from plain REINFORCE."""
    masked = [frac for case in CASES for frac in case["expected"]["masked_frac"]]
    assert max(masked) > 0 and min(masked) < 1
    for kind in ("ppo", "grpo", "gspo", "m2po"):
        gradients = [g for c in CASES if c["loss"]["kind"] == kind for g in c["expected"]["gradient"]]
        assert 0.0 in gradients and any(gradients)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_losses_match_the_vectors(case):
    import msgspec
    import torch

    from learner.corrections import log_ratios, second_moment_bound
    from learner.losses import Tokens, batch_loss, rollout_normalizers
    from pipeline.learner_config import CorrectionsConfig, LossConfig

    rows, expected = case["rollouts"], case["expected"]
    loss = msgspec.convert(case["loss"], LossConfig)
    corrections = msgspec.convert(case["corrections"], CorrectionsConfig)
    counts = torch.tensor([len(row["learner"]) for row in rows])
    groups = np.array([row["group"] for row in rows])

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in row[name]], dtype=torch.float64)

    def spread(values) -> torch.Tensor:
        return torch.as_tensor(values).repeat_interleave(counts)

    tokens = Tokens(
        logprobs=flat("learner").requires_grad_(),
        engine_logprobs=flat("engine"),
        advantages=spread(np.array([row["advantage"] for row in rows])),
        normalizers=spread(rollout_normalizers(counts.numpy(), groups, loss.aggregation, NUM_ATTEMPTS)),
        rows=spread(range(len(rows))),
        lags=spread([row["lag"] for row in rows]),
    )
    log_rho = log_ratios(tokens.logprobs, tokens.engine_logprobs)
    bound = second_moment_bound(log_rho, tokens.advantages, case["loss"].get("max_moment", 1.0))
    got = batch_loss(tokens, loss, corrections, bound)
    got.loss.backward()
    assert got.loss.item() == pytest.approx(expected["loss"], rel=1e-10)
    assert tokens.logprobs.grad is not None
    np.testing.assert_allclose(tokens.logprobs.grad.numpy(), expected["gradient"], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(got.masked.double().mean(0).numpy(), expected["masked_frac"], rtol=1e-12)


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_cases(), indent=None).replace('{"name"', '\n{"name"') + "\n")
    sys.exit(0)
