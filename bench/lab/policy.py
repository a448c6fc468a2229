"""The lab's stand-in for a model: for each problem a softmax over rungs, improved by the gradient that a learner takes.

A problem's logits are the sum of what it has of its own, of its level's and of what all problems share, so training
one moves others as far as the config says. For right and wrong alone the softmax is a logistic pass rate, and the
score of a rollout along its logit is r - p: E[sum A_i s_i] = w(p) p (1 - p) with the same w(p) as for any policy, as
stopping rules and advantages see rewards only.
"""

import numpy as np
from numpy.typing import NDArray

from bench.lab.config import LearningConfig
from bench.lab.population import Array, Population
from pipeline.learner_config import Aggregation

Ints = NDArray[np.int64]

# The gradient is divided by a running root mean square of its norm, as Adam does: the scale of an estimator must not
# pass for its quality.
RMS_DECAY = 0.9


class Policy:
    def __init__(self, population: Population, config: LearningConfig):
        self._config = config
        names = sorted({p.level for p in population.problems})
        self._level = np.array([names.index(p.level) for p in population.problems])
        num_rungs = population.rates.shape[1]
        self._own: Array = np.log(population.rates)
        self._levels: Array = np.zeros((len(names), num_rungs))
        self._shared: Array = np.zeros(num_rungs)
        self._square, self._decayed = 0.0, 1.0

    def rates(self, index: int | Ints | slice) -> Array:
        """Probability of each rung, [R] for one problem or [N, R] for several."""
        return _softmax(self._own[index] + self._levels[self._level[index]] + self._shared)

    @property
    def pass_rates(self) -> Array:
        """[P] the probability of the last rung."""
        return self.rates(slice(None))[:, -1]

    def step(self, gradient: Array, problems: Ints) -> None:
        """Ascend `gradient` [G, R], one row a group, by its problem's logits; `problems` [G] may repeat one."""
        self._square = RMS_DECAY * self._square + (1 - RMS_DECAY) * float((gradient**2).sum())
        self._decayed *= RMS_DECAY
        if self._square == 0:
            return
        step = gradient / np.sqrt(self._square / (1 - self._decayed))
        np.add.at(self._own, problems, self._config.own * step)
        np.add.at(self._levels, self._level[problems], self._config.level * step)
        self._shared += self._config.shared * step.sum(axis=0)


def gradient(rates: Array, group: Ints, rungs: Ints, weights: Array) -> Array:
    """sum_i weights_i (e_rung_i - pi) by group: [G, R], the policy gradient by the logits.

    Args:
        rates: [G, R] the present rates pi of each group's problem.
        group: [K] which group each trained rollout belongs to.
        rungs: [K] the rung it reached.
        weights: [K] its advantage times its importance ratio and loss normaliser.
    """
    out = np.zeros_like(rates)
    np.add.at(out, (group, rungs), weights)
    totals = np.bincount(group, weights=weights, minlength=len(rates))
    return out - totals[:, None] * rates


def rollout_weights(num_tokens: Ints, group: Ints, num_groups: int, aggregation: Aggregation) -> Array:
    """[K] What the loss aggregation multiplies a whole rollout's score by, 1 on average for equal groups.

    The normaliser of each of its tokens (`learner.losses`) over that of the batch, as the score of a rollout is the sum
    of its tokens': "token" and "launched" leave it as it is, "sequence" divides by its length, "prompt" by the tokens
    of its group.
    """
    tokens = np.maximum(num_tokens, 1).astype(np.float64)
    if aggregation in ("token", "launched"):
        return np.ones(len(tokens))
    if aggregation == "sequence":
        return tokens.sum() / (len(tokens) * tokens)
    return tokens.sum() / (num_groups * np.bincount(group, weights=tokens, minlength=num_groups)[group])


def _softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)
