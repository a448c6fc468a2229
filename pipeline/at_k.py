"""Unbiased pass@k, best@k and worst@k of each problem, from n >= k judged rollouts. Pure functions."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself: the ks that are reported of n rollouts; none of 0."""
    return sorted({2**i for i in range(n.bit_length())} | {n}) if n else []


def pass_at_k(num_rollouts: Ints, num_correct: Ints, k: int) -> Array:
    """Unbiased pass@k of each problem, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374); needs k <= n.

    Computed in integers and rounded once, so it equals any other exact computation to the last digit.
    """
    n, c = np.broadcast_arrays(np.asarray(num_rollouts, np.int64), np.asarray(num_correct, np.int64))
    if not (1 <= k <= n.min()):
        raise ValueError(f"pass@{k} needs at least {k} rollouts of every problem, the fewest are {n.min()}")
    # Few pairs (n, c) differ, however many problems or bootstrap draws there are.
    keys, place = np.unique(n * (n.max() + 1) + c, return_inverse=True)
    values = [_pass_at_k(*divmod(int(key), int(n.max()) + 1), k) for key in keys]
    return np.array(values)[place].reshape(n.shape)


def best_at_k(rewards: Sequence[Array] | Array, k: int) -> Array:
    """Unbiased mean of the best of k of each problem's n rewards (n may differ): sum_i r_(i) C(i - 1, k - 1) / C(n, k).

    `rewards` holds one array [n] a problem; the result is [P].
    """
    fewest = min(len(r) for r in rewards)
    if not 1 <= k <= fewest:
        raise ValueError(f"best@{k} needs at least {k} rollouts of every problem, the fewest are {fewest}")
    weights = {n: _weights_of_ranks(n, k) for n in {len(r) for r in rewards}}
    return np.array([np.sort(r)[k - 1 :] @ weights[len(r)] for r in rewards])


def worst_at_k(rewards: Sequence[Array] | Array, k: int) -> Array:
    """Unbiased mean of the worst of k of each problem's rewards, [P]."""
    return 0.0 - best_at_k([-np.asarray(r, float) for r in rewards], k)


def _pass_at_k(n: int, c: int, k: int) -> float:
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def _weights_of_ranks(n: int, k: int) -> Array:
    """The chance that the reward of rank i = k..n, from the lowest, is the best of k, [n - k + 1]."""
    subsets = math.comb(n, k)
    return np.array([math.comb(i - 1, k - 1) / subsets for i in range(k, n + 1)])
