"""Other laws of reward against compute beside the ScaleRL one, ranked by what they predict and not by what they fit.

Every law is fitted to the first half of the compute and scored on the second. In-sample error cannot rank them: over a
middle stretch all of them look straight in ln C.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from bench.scaling.curves import MIN_POINTS, Recipe
from bench.scaling.law import Array, reward_at
from bench.scaling.resampling import interval, point_weights
from bench.scaling.scalerl import CEILING, fit_parameters, solve_draws

# (recipe, weights [D, N], compute [M]) -> rewards [D, M] predicted by the law fitted under each row of weights.
Law = Callable[[Recipe, Array, Array], Array]
MIN_SCORED = 3
NUM_DRAWS = 200
POWER_B_BOUNDS = (1e-3, 10.0)


class Score(msgspec.Struct, frozen=True):
    """`rmse` and `bias` (prediction minus observation, mean) are on the held-out second half, `aic` on all points.

    `excess_low` and `excess_high`: 95% interval, over resampled halves, of this law's mean squared error minus that of
    the best law.
    """

    law: str
    rmse: float
    bias: float
    aic: float
    excess_low: float
    excess_high: float


class Ranking(msgspec.Struct, frozen=True):
    """The laws, best extrapolation first; `split` is the compute up to which they were fitted."""

    split: float
    scores: list[Score]

    @property
    def not_worse(self) -> list[str]:
        """The best law and those that the data do not tell from it."""
        return [s.law for s in self.scores if s.excess_low <= 0]


def rank(recipe: Recipe, r0: float | None, rng: np.random.Generator) -> Ranking | None:
    """Rank the laws on one recipe; None when either half has too few evaluations."""
    split = float(recipe.compute.max()) / 2
    first, second = recipe.where(recipe.compute <= split), recipe.where(recipe.compute > split)
    if len(first.reward) < MIN_POINTS or len(second.reward) < MIN_SCORED or np.ptp(first.reward) < 1e-9:
        return None
    # Row 0 is the data as they are.
    fitted = np.vstack([np.ones(len(first.reward)), point_weights(first.seed, NUM_DRAWS, rng)])
    scored = np.vstack([np.ones(len(second.reward)), point_weights(second.seed, NUM_DRAWS, rng)])
    errors, squared, aic = {}, {}, {}
    for name, (law, num_parameters) in laws(r0).items():
        error = law(first, fitted, second.compute) - second.reward
        errors[name], squared[name] = error[0], (scored * error**2).sum(1) / scored.sum(1)
        residual = law(recipe, np.ones((1, len(recipe.reward))), recipe.compute)[0] - recipe.reward
        aic[name] = float(len(residual) * np.log((residual**2).mean() + 1e-300) + 2 * num_parameters)
    order = sorted(squared, key=lambda name: float(squared[name][0]))
    return Ranking(
        split,
        [
            Score(
                name,
                float(np.sqrt(squared[name][0])),
                float(errors[name].mean()),
                aic[name],
                *interval((squared[name] - squared[order[0]])[1:]),
            )
            for name in order
        ],
    )


def laws(r0: float | None) -> dict[str, tuple[Law, int]]:
    """Name -> (law, number of free parameters). With R0 free, ScaleRL's law is the log-sigmoid."""
    found: dict[str, tuple[Law, int]] = {
        "log-sigmoid": (lambda *data: _sigmoid(*data, r0=None), 4),
        "power law": (_power, 3),
        "log-linear": (_log_linear, 2),
    }
    if r0 is not None:
        found["ScaleRL"] = (lambda *data: _sigmoid(*data, r0=r0), 3)
    return found


def power_law(compute: Array, reward: Array, weights: Array, ceiling: float = CEILING) -> Array:
    """Least-squares (A, D, B) [draws, 3] of R = A - D / C^B with A <= `ceiling`, for each row of `weights` [draws, N].

    For a fixed B the rest is linear, so B is searched on a grid over its range and on a finer one around the best.
    """
    centre = np.log(compute).mean()
    x = np.log(compute) - centre
    coarse = np.geomspace(*POWER_B_BOUNDS, 60)
    best = _best_nodes(coarse, x, reward, weights, ceiling)[:, 2]
    ratio = coarse[1] / coarse[0]
    low, high = max(best.min() / ratio, POWER_B_BOUNDS[0]), min(best.max() * ratio, POWER_B_BOUNDS[1])
    found = _best_nodes(np.geomspace(low, high, 400), x, reward, weights, ceiling)
    found[:, 1] *= np.exp(found[:, 2] * centre)
    return found


def _best_nodes(b: Array, x: Array, reward: Array, weights: Array, ceiling: float) -> Array:
    """(A, D, B) at the best of the nodes `b` for each row of weights, D for compute exp(x)."""
    g = np.exp(-b[:, None] * x)  # [G, N]
    w, wy, wyy = weights.sum(1)[:, None], (weights @ reward)[:, None], (weights @ reward**2)[:, None]
    wg, wgg, wgy = weights @ g.T, weights @ (g * g).T, weights @ (g * reward).T  # [draws, G]
    d = -(w * wgy - wg * wy) / np.maximum(w * wgg - wg * wg, 1e-300)
    a = (wy + d * wg) / w
    over = a > ceiling
    a = np.where(over, ceiling, a)
    d = np.where(over, (ceiling * wg - wgy) / wgg, d)
    sse = wyy + a * a * w + d * d * wgg - 2 * a * wy + 2 * d * wgy - 2 * a * d * wg
    rows, best = np.arange(len(weights)), np.argmin(sse, axis=1)
    return np.stack([a[rows, best], d[rows, best], b[best]], axis=1)


def _power(recipe: Recipe, weights: Array, compute: Array) -> Array:
    a, d, b = power_law(recipe.compute, recipe.reward, weights).T[..., None]
    return a - d * compute**-b


def _log_linear(recipe: Recipe, weights: Array, compute: Array) -> Array:
    x = np.log(recipe.compute)
    w, wx, wy = weights.sum(1), weights @ x, weights @ recipe.reward
    slope = (w * (weights @ (x * recipe.reward)) - wx * wy) / (w * (weights @ x**2) - wx**2)
    return ((wy - slope * wx) / w)[:, None] + slope[:, None] * np.log(compute)


def _sigmoid(recipe: Recipe, weights: Array, compute: Array, r0: float | None) -> Array:
    tied, optimum = fit_parameters([recipe.points], [r0])
    return reward_at(compute, solve_draws([recipe], tied, optimum, [weights])[:, 0])
