"""What theory says of a chain on a problem with pass rate p: its length, its fate, its weight in the gradient.

Rewards are 0 or 1, rollouts independent, q = 1 - p. For a stopping rule and advantages A_i that depend on rewards only,
E[sum_i A_i s_i] = w(p) grad p with w(p) = E[sum_i A_i (r_i/p - (1-r_i)/q)], since E[s|r=1] = grad p / p and
E[s|r=0] = -grad p / q. Estimators differ in the weight w and in nothing else. Chains that are sampled until a round
holds a success (Never Give Up, arXiv 2609.13443) have the closed forms below; where one is a series it is summed to
machine precision.
"""

import math

import numpy as np
from scipy.special import gammaln, spence

SERIES_TAIL = 1e-13


def rounds(p: float, round_size: int, p_ngu: float) -> dict[str, float]:
    """`E[N]` and `P(accept)` of rounds of `round_size`, each all-wrong round retried with probability `p_ngu`."""
    wrong = (1 - p) ** round_size
    return {"E[N]": round_size / (1 - p_ngu * wrong), "P(accept)": (1 - wrong) / (1 - p_ngu * wrong)}


def round_weights(p: float, round_size: int, p_ngu: float, keep_rounds: int) -> dict[str, float]:
    """w(p) of each estimator; only the last `keep_rounds` rounds are trained where a name says so.

    With the accepting round t holding k successes, P(t, k) = (p_ngu q^K)^(t-1) Binomial(k; K, p), N = K t attempts and
    K min(t, keep_rounds) of them kept. "predictable" is the leave-one-out advantage over the round and all earlier
    failures, which by Wald's identity has w = E[N]; "power" weighs draw i by a(i), so w = E[sum of a(i) over draws].
    """
    q, wrong = 1 - p, (1 - p) ** round_size
    num_rounds = math.ceil(math.log(SERIES_TAIL) / math.log(p_ngu * wrong)) if p_ngu * wrong > SERIES_TAIL else 1
    t = np.arange(1, num_rounds + 1)[:, None]
    k = np.arange(1, round_size + 1)[None, :]
    binomial = np.array([math.comb(round_size, i) for i in range(1, round_size + 1)]) * p**k * q ** (round_size - k)
    chance = (p_ngu * wrong) ** (t - 1) * binomial
    n, kept = round_size * t, round_size * np.minimum(t, keep_rounds)
    weights = {
        "centered": k * (n - k) / n / (p * q),
        "anchored, kept": k * (1 - k / n) / (p * q),
        "not rescaled, kept": k * (1 - k / n) / p + (kept - k) * (k / n) / q,
        "own baseline, kept": k * (kept - k) / kept / (p * q),
        "standardized / N": np.sqrt(k * (n - k)) / n / (p * q),
        "centered / N": k * (n - k) / n**2 / (p * q),
    }
    means = {name: float((chance * w).sum()) for name, w in weights.items()}
    reached = np.repeat((p_ngu * wrong) ** np.arange(num_rounds), round_size)
    half = float(reached @ power_coefficients(0.5, len(reached)))
    expected = rounds(p, round_size, p_ngu)["E[N]"]
    return {"predictable": expected, "power 1": expected, "power 1/2": half} | means


def single_weights(p: float) -> dict[str, float]:
    """w(p) when single rollouts are drawn until the first success, N of them: P(N) = q^(N-1) p."""
    q = 1 - p
    mean_inverse = -p * math.log(p) / q
    mean_inverse_square = p * float(spence(p)) / q  # spence(p) is the dilogarithm of q
    n = np.arange(1, math.ceil(math.log(SERIES_TAIL) / math.log(q)) + 1)
    mean_spread = float((q ** (n - 1) * p * np.sqrt(n - 1) / n).sum())
    return {
        "leave-one-out, N = 1 dropped": 1 / p,
        "leave-one-out, N = 1 kept": 1 / p + 1,
        "leave-one-out / N": (mean_inverse / p - 1) / q,
        "centered": (1 - mean_inverse) / (p * q),
        "centered / N": (mean_inverse - mean_inverse_square) / (p * q),
        "standardized / N": mean_spread / (p * q),
        "max_rl / N": (1 - mean_inverse) / (p * q),
        "power 1": 1 / p,
        "power 1/2": p**-0.5,
    }


def power_coefficients(alpha: float, num: int) -> np.ndarray:
    """a(i) = Gamma(i-1+alpha) / (Gamma(alpha) Gamma(i)) for i = 1..num: the series of (1-q)^-alpha in powers of q."""
    i = np.arange(1, num + 1)
    return np.exp(gammaln(i - 1 + alpha) - gammaln(alpha) - gammaln(i))


def doubling(p: float, round_size: int, max_attempts: int) -> dict[str, float]:
    """`E[N]` and `P(accept)` when each all-wrong round is followed by one as large as all before it together."""
    q, launched, expected = 1 - p, 0, 0.0
    while launched < max_attempts:
        size = min(launched or round_size, max_attempts - launched)
        expected += size * q**launched
        launched += size
    return {"E[N]": expected, "P(accept)": 1 - q**max_attempts}
