"""Corrections for tokens that another policy sampled, and what they say about staleness.

The denominator is always the engine's own logprob of the token: under in-flight weight updates that is the only record
of the law the token was really drawn from (weights of several versions, a stale KV cache, the engine's arithmetic).
With it E[rho_t | the tokens before t] = 1 exactly, whatever the versions and however they changed, and the product of
rho_t over a rollout corrects its whole probability.

Everything is per token, shape [N], over whole rollouts one after the other; `rows` [N] numbers the rollout of a token.
"""

import torch
from torch import Tensor

from pipeline.learner_config import (
    CorrectionsConfig,
    DppoMask,
    GeometricMask,
    IcePopMask,
    Level,
    MaskConfig,
    MisMask,
    OpsmMask,
)

# exp(±20) is finite in float32 and far outside any ratio that a truncated weight would let through.
MAX_LOG_RATIO = 20.0


def log_ratios(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """clip(log pi(y_t) - log mu(y_t), -20, 20), shape [N] as both inputs, without gradient."""
    assert learner_logprobs.ndim == 1, f"logprobs must have rank 1, got shape {tuple(learner_logprobs.shape)}"
    assert learner_logprobs.shape == engine_logprobs.shape, (
        f"learner and engine logprobs have shapes {tuple(learner_logprobs.shape)} and {tuple(engine_logprobs.shape)}"
    )
    return (learner_logprobs.detach() - engine_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratios(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """rho_t = exp(log_ratios), shape [N], without gradient."""
    return log_ratios(learner_logprobs, engine_logprobs).exp()


def rollout_sums(values: Tensor, rows: Tensor) -> Tensor:
    """For every token the sum of `values` over its rollout, shape [N]."""
    assert values.ndim == 1 and values.shape == rows.shape, f"shapes {tuple(values.shape)} and {tuple(rows.shape)}"
    if not rows.numel():
        return values
    return values.new_zeros(int(rows.max()) + 1).index_add(0, rows, values)[rows]


def rollout_means(values: Tensor, rows: Tensor) -> Tensor:
    """For every token the mean of `values` over its rollout, shape [N]."""
    return rollout_sums(values, rows) / rollout_sums(torch.ones_like(values), rows)


def rollout_tails(values: Tensor, rows: Tensor) -> Tensor:
    """For every token the sum of `values` from it to the end of its rollout, shape [N]; tokens stand in order."""
    assert values.ndim == 1 and values.shape == rows.shape, f"shapes {tuple(values.shape)} and {tuple(rows.shape)}"
    before = values.double().cumsum(0) - values
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = rows[1:] != rows[:-1]
    first = starts.nonzero().squeeze(1)
    before_rollout = before[first].repeat_interleave(torch.diff(first, append=first.new_tensor([rows.numel()])))
    return (rollout_sums(values.double(), rows) - (before - before_rollout)).to(values.dtype)


def weights_at(log_rho: Tensor, rows: Tensor, level: Level) -> Tensor:
    """rho_t, or at level "sequence" the product of the rollout's ratios for each of its tokens, shape [N].

    The product is unbiased for the gradient under in-flight updates (importance sampling over whole trajectories), but
    its variance grows with the length; the token's ratio alone is biased by the drift of the tokens before it.
    """
    if level == "token":
        return log_rho.exp()
    return rollout_sums(log_rho, rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def caps(base: float, lags: Tensor, config: CorrectionsConfig) -> Tensor:
    """C(l) = max(base, exp(z s l^h)) for tokens of lag l >= 0 versions, shape [N] float64.

    Under drift of s nats a version the log-ratio spreads like s l^h (h = 1/2 diffusive, 1 coherent), so that with this
    cap the same share of tokens is truncated at every lag.
    """
    grown = config.cap_z * config.cap_sigma * lags.double().clamp(min=0) ** config.cap_exponent
    # Without a growth exp(0) = 1 would raise a base below 1.
    return grown.exp().clamp(min=base) if config.cap_sigma else torch.full_like(grown, base)


def kept_tokens(mask: MaskConfig, log_rho: Tensor, engine_logprobs: Tensor, advantages: Tensor, rows: Tensor) -> Tensor:
    """Which tokens `mask` leaves in the loss, [N] bool, with rho = pi/mu of the policy before the step.

    - icepop: low <= rho_t <= high (arXiv 2510.18855)
    - mis: rho_t <= cap, or the rollout's product <= cap (masked importance sampling)
    - geometric: low <= exp(mean log rho) <= high over the rollout
    - opsm: not (A < 0 and mean(log mu - log pi) > delta over the rollout) (off-policy sequence masking)
    - dppo: not sign(A) (pi - mu) > threshold, the binary total variation (DPPO)
    """
    match mask:
        case IcePopMask(low=low, high=high):
            return (log_rho.exp() >= low) & (log_rho.exp() <= high)
        case MisMask(level=level, cap=cap):
            return weights_at(log_rho, rows, level) <= cap
        case GeometricMask(low=low, high=high):
            mean = rollout_means(log_rho, rows).exp()
            return (mean >= low) & (mean <= high)
        case OpsmMask(delta=delta):
            return ~((advantages < 0) & (rollout_means(-log_rho, rows) > delta))
        case DppoMask(threshold=threshold):
            moved = engine_logprobs.exp() * torch.expm1(log_rho)
            return ~(advantages.sign() * moved > threshold)


def second_moment_bound(log_rho: Tensor, advantages: Tensor, max_moment: float) -> float:
    """The largest tau with mean(min((log rho)^2, tau^2)) <= `max_moment` over harmful tokens (M2PO, arXiv 2510.01161).

    Harmful are those that a clip would touch: A > 0 and rho > 1, or A < 0 and rho < 1. Infinite if none need it.
    """
    harmful = advantages * log_rho > 0
    squares = log_rho[harmful].double().square().sort().values
    n = squares.numel()
    if n == 0 or float(squares.mean()) <= max_moment:
        return float("inf")
    # With the k smallest below tau^2 the mean is (their sum + (n - k) tau^2) / n, and the right k is the first whose
    # solution does not exceed the next square.
    below = torch.cat([squares.new_zeros(1), squares.cumsum(0)[:-1]])
    solutions = (n * max_moment - below) / torch.arange(n, 0, -1, device=squares.device, dtype=squares.dtype)
    return float(solutions[solutions <= squares][0].sqrt())


def effective_sample_frac(ratios: Tensor) -> float:
    """ESS = (sum w)^2 / (N sum w^2) in (0, 1] over ratios of shape [N] (PipelineRL, arXiv 2509.19128); 1 if N = 0.

    Taken over untruncated ratios: truncation would hide the drift that this figure is there to show.
    """
    assert ratios.ndim == 1, f"ratios must have rank 1, got shape {ratios.shape}"
    if ratios.numel() == 0:
        return 1.0
    weights = ratios.double()
    return float(weights.sum() ** 2 / (weights.numel() * weights.square().sum()))


def k3_divergence(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(mu || pi) from tokens of mu: rho - 1 - log rho, never below 0, shape [N].

    The k3 estimator of Schulman, "Approximating KL divergence" (2020), with the log-ratio clipped to ±20.
    """
    log_rho = log_ratios(learner_logprobs, engine_logprobs)
    return torch.expm1(log_rho) - log_rho
