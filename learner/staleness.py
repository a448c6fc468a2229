"""Staleness by the lag of a token: whether ratios have mean 1, how far they spread, how much the loss cuts off."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.corrections import effective_sample_frac, importance_ratios, k3_divergence, log_ratios

# First lag of each bucket; the last has no end.
LAG_EDGES = (0, 1, 2, 3, 5, 9, 17)
# E[rho] = 1 holds over everything an engine sampled. Trained tokens were selected by their reward, which moves their
# mean a little: on the built-in job by less than 0.002. Wrong logprobs move it by far more.
MAX_SELECTION_SHIFT = 0.02
MAX_STANDARD_ERRORS = 5.0
MIN_BUCKET_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Every trained token of a batch, in one order: tensors on the CPU, all of shape [N] but `masked`, [N, M].

    `weights`, `applied` and `masked` are those of `losses.Objective`; `ref_kl` estimates the divergence from the
    reference policy, 0 without one.
    """

    learner_logprobs: Tensor
    engine_logprobs: Tensor
    entropies: Tensor
    ref_kl: Tensor
    lags: Tensor
    engine_index: Tensor
    weights: Tensor
    applied: Tensor
    masked: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def ratios(self) -> Tensor:
        return importance_ratios(self.learner_logprobs, self.engine_logprobs)

    @property
    def clipped(self) -> Tensor:
        """[N] bool: the loss's cap or clip bound the token's weight."""
        return self.applied != self.weights

    def where(self, chosen: Tensor) -> "TrainedTokens":
        """The tokens of a [N] bool or index tensor."""
        return TrainedTokens(**{name: tensor[chosen] for name, tensor in self.tensors().items()})

    @classmethod
    def joined(cls, parts: Sequence["TrainedTokens"], num_masks: int) -> "TrainedTokens":
        if not parts:
            return cls(*[torch.zeros(0)] * 8, masked=torch.zeros((0, num_masks), dtype=torch.bool))
        fields = cls.__dataclass_fields__
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})


def lag_buckets(tokens: TrainedTokens) -> Iterator[tuple[str, TrainedTokens]]:
    """(name, its tokens) of every bucket that holds any: lag_0, lag_1, lag_2, lag_3_4, ... lag_17_up."""
    ends = (*LAG_EDGES[1:], math.inf)
    for first, end in zip(LAG_EDGES, ends, strict=True):
        chosen = (tokens.lags >= first) & (tokens.lags < end)
        if chosen.any():
            last = "" if end == first + 1 else "_up" if end == math.inf else f"_{end - 1}"
            yield f"lag_{first}{last}", tokens.where(chosen)


def bucket_metrics(tokens: TrainedTokens) -> dict[str, float]:
    """`figure/lag_...` for every bucket.

    `ratio_mean` and its standard error `ratio_se` (rho_t - 1 are martingale differences, so tokens of one rollout are
    uncorrelated and the plain error is the right one), `ess`, `kl`, `clipped_mass`, `entropy`, `num_tokens` and
    `log_ratio_std`, which at lag 1 is what learner.corrections.cap_sigma wants.
    """
    metrics = {}
    for name, own in lag_buckets(tokens):
        mean, error = ratio_mean(own)
        figures = {
            "ratio_mean": mean,
            "ratio_se": error,
            "ess": effective_sample_frac(own.ratios),
            "kl": mean_of(k3_divergence(own.learner_logprobs, own.engine_logprobs)),
            "clipped_mass": clipped_mass(own),
            "entropy": mean_of(own.entropies),
            "log_ratio_std": float(log_ratios(own.learner_logprobs, own.engine_logprobs).double().std(correction=0)),
            "num_tokens": float(own.lags.numel()),
        }
        metrics |= {f"{figure}/{name}": value for figure, value in figures.items()}
    return metrics


def ratio_mean(tokens: TrainedTokens) -> tuple[float, float]:
    """Mean of rho over N >= 1 tokens and its standard error (0 for one token)."""
    ratios = tokens.ratios.double()
    return float(ratios.mean()), float(ratios.std(correction=0)) / math.sqrt(ratios.numel())


def clipped_mass(tokens: TrainedTokens) -> float:
    """The share of the total weight that the loss's cap or clip takes away, in [0, 1]; 0 without a token."""
    total = float(tokens.weights.double().sum())
    return 1.0 - float(tokens.applied.double().sum()) / total if total else 0.0


def wrong_logprobs(tokens: TrainedTokens) -> str:
    """One line naming the buckets whose mean ratio cannot be 1, or nothing.

    E_mu[rho] = 1 whatever the lag, also against a policy of another temperature, as long as mu is the law that was
    sampled from: a mean that is off by many standard errors is no sign of staleness.
    """
    off = []
    for name, own in lag_buckets(tokens):
        mean, error = ratio_mean(own)
        margin = max(MAX_STANDARD_ERRORS * error, MAX_SELECTION_SHIFT)
        if own.lags.numel() >= MIN_BUCKET_TOKENS and abs(mean - 1.0) > margin:
            off.append(f"{mean:.4f} +- {error:.4f} at {name}")
    if not off:
        return ""
    return (
        f"mean ratio {', '.join(off)} instead of 1: wrong logprobs, not staleness; the engine does not report the law "
        "it samples from (temperature, truncated support, precision)"
    )


def mean_of(values: Tensor) -> float:
    return float(values.to(torch.float64).mean())
