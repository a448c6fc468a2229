"""Terms beside the loss: the divergence from a reference policy and the entropy.

As in `losses`, everything is a plain sum over tokens that carry their own normalisers, so micro-batches add up.
"""

import torch
from torch import Tensor

from learner.corrections import MAX_LOG_RATIO, caps, log_ratios, rollout_tails, weights_at
from learner.losses import Tokens
from pipeline.learner_config import CorrectionsConfig, EntropyConfig, KlConfig, KlEstimator


def kl_loss(
    tokens: Tokens, ref_logprobs: Tensor, takes_part: Tensor, config: KlConfig, corrections: CorrectionsConfig
) -> Tensor:
    """coef sum_t n_t sg(min(w_t, C)) k_t over the tokens that take part, a scalar; k_t as `kl_surrogate` says.

    w_t is the ratio to the engine and C its cap, both as [learner.corrections] sets them: the divergence is an
    expectation over the policy's own tokens, and these are the engine's.

    Args:
        ref_logprobs: [N] log pi_ref(y_t), without gradient.
        takes_part: [N] bool.
    """
    log_rho = log_ratios(tokens.logprobs, tokens.engine_logprobs)
    cap = caps(corrections.cap, tokens.lags, corrections).to(log_rho.dtype)
    weights = torch.minimum(weights_at(log_rho, tokens.rows, corrections.level), cap)
    terms = tokens.normalizers * weights * kl_surrogate(tokens, ref_logprobs, config.estimator)
    return config.coef * torch.where(takes_part, terms, 0.0).sum()


def kl_surrogate(tokens: Tokens, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """[N], to be minimised; with l_t = log pi(y_t) - log pi_ref(y_t) and tokens of pi, its expected gradient is

    - k1: sg(sum of l_s, s >= t) log pi(y_t), the estimator as part of the reward: the gradient of KL(pi || pi_ref)
      over whole rollouts, which also weighs where a token leads. (Differentiating l_t itself would give
      E[grad log pi] = 0.)
    - k2: l_t^2 / 2, the gradient of KL(pi || pi_ref) of every token's own distribution, its prefix held fixed
    - k3: e^-l_t - 1 + l_t, as GRPO (arXiv 2402.03300) has it in the loss: the estimate is one of KL(pi || pi_ref), but
      its gradient, (1 - e^-l_t) grad log pi, is that of KL(pi_ref || pi)

    The estimators are Schulman's, "Approximating KL divergence" (2020); arXiv 2506.09477 on their gradients.
    """
    assert ref_logprobs.shape == tokens.logprobs.shape, f"ref_logprobs has shape {tuple(ref_logprobs.shape)}"
    log_ratio = tokens.logprobs - ref_logprobs
    match estimator:
        case "k1":
            return rollout_tails(log_ratio.detach(), tokens.rows) * tokens.logprobs
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return torch.expm1((-log_ratio).clamp(max=MAX_LOG_RATIO)) + log_ratio


def entropy_loss(tokens: Tokens, entropies: Tensor, takes_part: Tensor, config: EntropyConfig) -> Tensor:
    """-coef sum_t n_t H_t over the tokens that take part, a scalar.

    H_t is the exact entropy of the distribution that token t was drawn from, differentiated as a whole, so the token's
    own ratio has no place in it.

    Args:
        entropies: [N] with gradient.
        takes_part: [N] bool.
    """
    assert entropies.shape == tokens.logprobs.shape, f"entropies has shape {tuple(entropies.shape)}"
    return -config.coef * torch.where(takes_part, tokens.normalizers * entropies, 0.0).sum()
