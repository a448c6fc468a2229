"""A learned value function for PPO: a small network on the policy's last hidden states, and advantages from it.

The hidden states enter without gradient, so the critic learns beside the policy and never through it.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.learner_config import CriticConfig

# Values of this many tokens are computed at a time: the activations of the head, not of the model.
CHUNK_TOKENS = 1 << 16
# Advantages that differ only by rounding are not blown up to a deviation of 1.
MIN_SPREAD = 1e-6
_SEED = 0  # of the head's first weights, so that runs with one seed are alike


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, lengths: np.ndarray, gamma: float, gae_lambda: float
) -> np.ndarray:
    """GAE for rollouts that are rewarded once, after their last token (arXiv 1506.02438, eq. 16); [R, T] float64.

    A_t = sum_k (gamma lambda)^k d_(t+k), d_t = gamma V(s_(t+1)) - V(s_t) and, at the last token, d = r - V(s_t): a
    rollout ends with its last token, also where it was cut off by its length, because it is judged there.

    Args:
        rewards: [R], of whole rollouts.
        values: [R, T], V(s_t) of the state that token t was chosen in; what stands after a rollout's end is ignored.
        lengths: [R] integers in 1..T.
    """
    assert values.ndim == 2 and rewards.shape == lengths.shape == values.shape[:1], f"values {values.shape}"
    num_tokens = values.shape[1]
    advantages = np.zeros(values.shape)
    ahead, next_values = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in range(num_tokens - 1, -1, -1):
        is_last, inside = t == lengths - 1, t < lengths
        delta = np.where(is_last, rewards, gamma * next_values) - values[:, t]
        ahead = np.where(inside, delta + np.where(is_last, 0.0, gamma * gae_lambda * ahead), 0.0)
        next_values, advantages[:, t] = values[:, t], ahead
    return advantages


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2 of every token, [N]; without the clip if c is None.

    PPO's value loss, as in its authors' code: V_old are the values before the critic saw this batch.
    """
    squares = (values - returns).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        squares = torch.maximum(squares, (near - returns).square())
    return squares / 2


class Critic:
    """V(s) = W2 silu(W1 h), h the hidden state that predicts the next token, with an Adam of its own; 0 at first."""

    def __init__(self, hidden_size: int, config: CriticConfig, device: torch.device, dtype: torch.dtype):
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            last = nn.Linear(config.width, 1)
            self.head = nn.Sequential(nn.Linear(hidden_size, config.width), nn.SiLU(), last).to(device, dtype)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=config.lr)

    @torch.no_grad()
    def values(self, hidden: Tensor) -> Tensor:
        """[N] of hidden states [N, H]."""
        return torch.cat([hidden.new_zeros(0), *(self.head(part).squeeze(-1) for part in hidden.split(CHUNK_TOKENS))])

    def judge(self, hidden: Tensor, rewards: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        """Advantages of the tokens of a batch, [N] float64 of mean 0 and deviation 1, then learn from the batch.

        Args:
            hidden: [N, H] of rollouts one after the other.
            rewards, lengths: [R].
        """
        values = self.values(hidden)
        inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
        padded = np.zeros(inside.shape)
        padded[inside] = values.cpu().numpy()
        gae = generalized_advantages(rewards, padded, lengths, self.config.gamma, self.config.gae_lambda)[inside]
        figures = self.fit(hidden, values, values + torch.from_numpy(gae).to(values))
        return (gae - gae.mean()) / max(gae.std(), MIN_SPREAD), figures

    def fit(self, hidden: Tensor, old_values: Tensor, returns: Tensor) -> dict[str, float]:
        """Several updates towards `returns` on one batch of [N, H] hidden states; figures of before the first.

        A batch whose loss is not finite changes nothing.
        """
        spread = returns.var(correction=0)
        figures = {
            "critic/loss": float((old_values - returns).square().mean() / 2),
            "critic/value_mean": float(old_values.mean()),
            "critic/explained_variance": float(1 - (returns - old_values).var(correction=0) / spread)
            if spread
            else 0.0,
        }
        if not all(map(math.isfinite, figures.values())):
            return figures
        for _ in range(self.config.epochs):
            for part in torch.arange(len(returns), device=returns.device).split(CHUNK_TOKENS):
                values = self.head(hidden[part]).squeeze(-1)
                losses = value_losses(values, old_values[part], returns[part], self.config.value_clip)
                (losses.sum() / len(returns)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return figures

    def is_like(self, other: "Critic") -> bool:
        """Whether it can take over the other's tensors."""
        return self.config.width == other.config.width

    def tensors(self) -> dict[str, Tensor]:
        """Weights and Adam's state as `parameter name/field`."""
        found = {}
        for name, parameter in self.head.named_parameters():
            fields = {"weight": parameter.detach()} | self.optimizer.state.get(parameter, {})
            found |= {f"{name}/{field}": value for field, value in fields.items()}
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave; raises KeyError or RuntimeError for those of another head."""
        parameters = dict(self.head.named_parameters())
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            if field == "weight":
                parameters[name].copy_(value)
            else:
                self.optimizer.state[parameters[name]][field] = (
                    value if field == "step" else value.to(parameters[name].device)
                )
