"""Losses over a flat list of tokens.

A batch is cut into micro-batches for memory only, so a loss here is a plain sum over the tokens it is given and every
token carries its own normaliser, computed once over the whole batch. The gradients of the parts then add up to that of
the whole, however the batch was cut.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.corrections import MAX_LOG_RATIO, caps, kept_tokens, log_ratios, rollout_means, weights_at
from pipeline.learner_config import (
    Aggregation,
    AsymReConfig,
    CispoConfig,
    CorrectionsConfig,
    GrpoConfig,
    GspoConfig,
    LossConfig,
    M2poConfig,
    PpoConfig,
    Proximal,
    ReinforceTisConfig,
    ToprConfig,
)


def rollout_normalizers(
    num_tokens: np.ndarray, group_index: np.ndarray, aggregation: Aggregation, num_attempts: int
) -> np.ndarray:
    """The factor that multiplies each token's loss in a rollout, shape [R], float64.

    With R rollouts, G groups and |y_i| tokens in rollout i:
    `token`: 1 / sum_j |y_j| (DAPO, arXiv 2503.14476); `sequence`: 1 / (R |y_i|) (GRPO, arXiv 2402.03300);
    `prompt`: 1 / (G sum of |y_j| over the rollout's group) (ScaleRL, arXiv 2510.13786); `launched`: 1 / num_attempts,
    so that neither length nor what else the batch holds changes how much a rollout weighs (Dr. GRPO, arXiv 2503.20783,
    divides by a constant as well).
    An empty completion counts in R and its group in G: it adds 0 to the mean rather than leaving it.

    Args:
        num_tokens: [R] completion tokens of each rollout, of the whole batch.
        group_index: [R] integers 0..G-1, the group of each rollout.
        num_attempts: rollouts launched to obtain the batch, also those that are not in it.
    """
    assert num_tokens.ndim == 1, f"num_tokens must have rank 1, got shape {num_tokens.shape}"
    assert group_index.shape == num_tokens.shape, f"shapes {group_index.shape} and {num_tokens.shape} differ"
    match aggregation:
        case "token":
            denominators = np.full(num_tokens.shape, num_tokens.sum(), dtype=np.float64)
        case "sequence":
            denominators = num_tokens.astype(np.float64) * num_tokens.size
        case "prompt":
            group_tokens = np.bincount(group_index, weights=num_tokens)
            denominators = group_tokens[group_index] * group_tokens.size
        case "launched":
            denominators = np.full(num_tokens.shape, num_attempts, dtype=np.float64)
    return 1.0 / np.maximum(denominators, 1.0)


class Tokens(NamedTuple):
    """Completion tokens of whole rollouts, one rollout after the other.

    `logprobs`: [N] log pi(y_t) at the sampling temperature, with gradient; `engine_logprobs`: [N] log mu(y_t);
    `advantages`, `normalizers`: [N] those of the token's rollout; `rows`: [N] int64, which rollout; `lags`: [N]
    learner version - token version.
    """

    logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    normalizers: Tensor
    rows: Tensor
    lags: Tensor


class Surrogate(NamedTuple):
    """`objective`: [N] J_t, to be maximised, with gradient. `weights`, `applied`: [N] what multiplies A grad log pi in
    principle and after the loss's cap or clip.
    """

    objective: Tensor
    weights: Tensor
    applied: Tensor


class Objective(NamedTuple):
    """`loss`: the scalar. `weights`, `applied`: as in `Surrogate`. `masked`: [N, M] bool, left out by the m-th mask."""

    loss: Tensor
    weights: Tensor
    applied: Tensor
    masked: Tensor


def batch_loss(tokens: Tokens, loss: LossConfig, corrections: CorrectionsConfig, moment_bound: float) -> Objective:
    """L = -sum_t n_t J_t over the tokens that no mask leaves out; J_t as `surrogate` says.

    `moment_bound` is `corrections.second_moment_bound` over the whole batch; only M2PO reads it.
    """
    for name, tensor in tokens._asdict().items():
        assert tensor.ndim == 1, f"{name} must have rank 1, got shape {tuple(tensor.shape)}"
        assert tensor.shape == tokens.logprobs.shape, f"{name} has shape {tuple(tensor.shape)}"
    log_rho = log_ratios(tokens.logprobs, tokens.engine_logprobs)
    objective, weights, applied = surrogate(tokens, log_rho, loss, corrections, moment_bound)
    masked = torch.zeros((len(log_rho), len(corrections.masks)), dtype=torch.bool, device=log_rho.device)
    for column, mask in enumerate(corrections.masks):
        kept = kept_tokens(mask, log_rho, tokens.engine_logprobs, tokens.advantages, tokens.rows)
        masked[:, column] = ~kept
    kept_objective = torch.where(masked.any(1), 0.0, objective)
    return Objective(-(tokens.normalizers * kept_objective).sum(), weights, applied, masked)


def surrogate(
    tokens: Tokens, log_rho: Tensor, loss: LossConfig, corrections: CorrectionsConfig, moment_bound: float
) -> Surrogate:
    """J_t of each loss; sg() is not differentiated, C(l) are `corrections.caps`, rho(y) is the rollout's product.

    - cispo: sg(min(rho_t, C)) A log pi, C from eps_max (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786). A
      token whose ratio hits the cap still learns, unlike under PPO's clip.
    - reinforce_tis: sg(min(rho_t or rho(y), C)) A log pi, C from corrections.cap (PipelineRL, arXiv 2509.19128)
    - topr: log pi A where A > 0, sg(min(rho(y), 1)) A log pi elsewhere (arXiv 2503.14286)
    - asymre: (A - baseline_shift) log pi (arXiv 2506.20520), the shift in units of the advantage
    - ppo, grpo: see `_clipped_to_proximal`
    - gspo: with s = exp(mean log rho) of the rollout, min(s A, clip(s) A), in the token form whose gradient is
      s A grad log pi_t (arXiv 2507.18071, eq. 13)
    - m2po: PPO's clip against the engine, to e^-tau .. e^tau with tau = moment_bound (arXiv 2510.01161)
    """
    match loss:
        case CispoConfig():
            weights = log_rho.exp()
            return _reinforce(tokens, weights, torch.minimum(weights, _caps(loss.eps_max, tokens, corrections)))
        case ReinforceTisConfig():
            weights = weights_at(log_rho, tokens.rows, corrections.level)
            return _reinforce(tokens, weights, torch.minimum(weights, _caps(corrections.cap, tokens, corrections)))
        case ToprConfig():
            weights = torch.where(tokens.advantages > 0, 1.0, weights_at(log_rho, tokens.rows, "sequence"))
            return _reinforce(tokens, weights, weights.clamp(max=1.0))
        case AsymReConfig():
            ones = torch.ones_like(log_rho)
            return _reinforce(tokens._replace(advantages=tokens.advantages - loss.baseline_shift), ones, ones)
        case PpoConfig():
            return _clipped_to_proximal(tokens, corrections, loss.proximal, loss.eps, loss.eps, loss.dual_clip)
        case GrpoConfig():
            return _clipped_to_proximal(tokens, corrections, loss.proximal, loss.eps_low, loss.eps_high, None)
        case GspoConfig():
            log_s = rollout_means(log_rho, tokens.rows) + tokens.logprobs - tokens.logprobs.detach()
            return _clipped(log_s, tokens.advantages, 1 - loss.eps_low, 1 + loss.eps_high)
        case M2poConfig():
            bound = min(moment_bound, MAX_LOG_RATIO)
            log_r = tokens.logprobs - tokens.engine_logprobs
            return _clipped(log_r, tokens.advantages, np.exp(-bound), np.exp(bound))


def _caps(base: float, tokens: Tokens, corrections: CorrectionsConfig) -> Tensor:
    return caps(base, tokens.lags, corrections).to(tokens.logprobs.dtype)


def _reinforce(tokens: Tokens, weights: Tensor, applied: Tensor) -> Surrogate:
    return Surrogate(applied.detach() * tokens.advantages * tokens.logprobs, weights, applied)


def _clipped_to_proximal(
    tokens: Tokens,
    corrections: CorrectionsConfig,
    proximal: Proximal,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> Surrogate:
    """sg(min(w_t, C)) min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), w = pi_prox/mu and r = pi/pi_prox.

    PPO (arXiv 1707.06347), decoupled from the behaviour policy (arXiv 2110.00641, 2505.24298), with DAPO's clip-higher
    (arXiv 2503.14476). pi_prox is mu ("engine", then w = 1), sg(pi) ("current", then r = 1) or, as only those two are
    known, their interpolation one version back: log mu + a (log pi - log mu), a = (lag - 1)/lag ("approximate").
    """
    log_pi = tokens.logprobs.detach()
    match proximal:
        case "engine":
            share = torch.zeros_like(log_pi)
        case "current":
            share = torch.ones_like(log_pi)
        case "approximate":
            lags = tokens.lags.to(log_pi.dtype)
            share = (lags - 1).clamp(min=0) / lags.clamp(min=1)
    log_proximal = tokens.engine_logprobs + share * (log_pi - tokens.engine_logprobs)
    weights = weights_at(log_ratios(log_proximal, tokens.engine_logprobs), tokens.rows, corrections.level)
    truncated = torch.minimum(weights, _caps(corrections.cap, tokens, corrections))
    inner = _clipped(tokens.logprobs - log_proximal, tokens.advantages, 1 - eps_low, 1 + eps_high, dual_clip)
    return Surrogate(truncated * inner.objective, weights * inner.weights, truncated * inner.applied)


def _clipped(log_r: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Surrogate:
    """min(r A, clip(r, low, high) A); where A < 0 not below `dual_clip` A (arXiv 1912.09729)."""
    ratios = log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective = torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages)
    passes = ~(((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low)))
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
        passes &= ~((advantages < 0) & (ratios > dual_clip))
    weights = ratios.detach()
    return Surrogate(objective, weights, weights * passes)
