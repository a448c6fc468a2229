"""Per-token corrections for tokens that another policy sampled, and what they say about staleness.

The denominator is always the engine's own logprob of the token: under in-flight weight updates that is the only record
of the law the token was really drawn from (weights of several versions, a stale KV cache, the engine's arithmetic).
"""

import torch
from torch import Tensor

# exp(±20) is finite in float32 and far outside any ratio that a truncated weight would let through.
MAX_LOG_RATIO = 20.0


def importance_ratios(learner_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """rho_t = exp(clip(log pi(y_t) - log mu(y_t), -20, 20)), shape [N] as both inputs, without gradient."""
    _check_tokens(learner_logprobs, engine_logprobs)
    log_ratios = learner_logprobs.detach() - engine_logprobs
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(ratios: Tensor, eps_max: float) -> Tensor:
    """min(rho_t, eps_max), shape [N]: bounded variance at the price of a bias that grows with the drift.

    The one-sided cap of CISPO (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786), token by token.
    """
    assert ratios.ndim == 1, f"ratios must have rank 1, got shape {ratios.shape}"
    return ratios.clamp(max=eps_max)


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
    _check_tokens(learner_logprobs, engine_logprobs)
    log_ratios = (learner_logprobs.detach() - engine_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratios) - log_ratios


def _check_tokens(learner_logprobs: Tensor, engine_logprobs: Tensor) -> None:
    assert learner_logprobs.ndim == 1, f"logprobs must have rank 1, got shape {tuple(learner_logprobs.shape)}"
    assert learner_logprobs.shape == engine_logprobs.shape, (
        f"learner and engine logprobs have shapes {tuple(learner_logprobs.shape)} and {tuple(engine_logprobs.shape)}"
    )
