"""ScaleRL fits of recipes: point estimates, bootstrap intervals, and recipes compared under one ceiling."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from bench.scaling.curves import Recipe, check_recipe
from bench.scaling.law import LN_C_MID, NUM_PARAMETERS, R0, A, Array, B, Points, Tie, reward_at, solve, start, tie
from bench.scaling.resampling import interval, point_weights
from pipeline.errors import ConfigError
from pipeline.estimates import Estimate

Method = Literal["refined", "published"]

# The grid of ScaleRL (arXiv 2510.13786, appendix on fitting); compute below 1.5k GPU-hours is left out there.
PUBLISHED_A = np.linspace(0.45, 0.80, 71)
PUBLISHED_C_MID = np.linspace(100, 40_000, 100)
PUBLISHED_MIN_COMPUTE = 1500.0

CEILING = 1.0  # of a pass rate
AT_CEILING = 1e-6


class RecipeFit(msgspec.Struct, frozen=True):
    """One fitted recipe. `compute_90` is where 90% of the gain from R0 to A is reached.

    `a_determined` is false where the interval of A reaches its upper bound: these points then show no ceiling.
    """

    name: str
    num_points: int
    num_seeds: int
    compute_low: float
    compute_high: float
    a: Estimate
    c_mid: Estimate
    b: Estimate
    r0: Estimate
    r0_given: bool
    compute_90: Estimate
    residual_std: float
    a_determined: bool

    @property
    def parameters(self) -> Array:
        return np.array([self.a.value, np.log(self.c_mid.value), self.b.value, self.r0.value])


def fit_parameters(recipes: Sequence[Points], r0: Sequence[float | None], common_a: bool = False) -> tuple[Tie, Array]:
    """Refined least-squares fit: the tie and the free parameters [P] at the optimum."""
    tied = tie(recipes, r0, common_a=common_a, ceiling=CEILING)
    nodes = np.concatenate([start(p, r, ceiling=CEILING) for p, r in zip(recipes, r0, strict=True)])
    # A shared parameter starts at the mean of what its recipes would like.
    free = (tied.matrix @ nodes / tied.matrix.sum(1))[None]
    full, _ = solve(recipes, tied, free)
    return tied, (tied.matrix @ full.ravel() / tied.matrix.sum(1))


def fit_published(points: Points, r0: float) -> Array:
    """Parameters [4] at the best node of the published (A, C_mid) grid, B fitted at each node.

    For a fixed C_mid the sum of squares, minimal over B, has one minimum in A; so only the two grid values of A around
    the free optimum are fitted, which is the full search of 7,100 nodes at 3% of its cost.
    """
    num = len(PUBLISHED_C_MID)
    low, high = np.array([PUBLISHED_A[0], 0.05]), np.array([PUBLISHED_A[-1], 10.0])
    fixed = np.zeros((num, NUM_PARAMETERS))
    fixed[:, LN_C_MID], fixed[:, R0] = np.log(PUBLISHED_C_MID), r0
    matrix = np.zeros((2, NUM_PARAMETERS))
    matrix[0, A], matrix[1, B] = 1.0, 1.0
    free, _ = solve([points], Tie(matrix, fixed, low, high), np.tile([points.reward.max(), 1.5], (num, 1)))
    below = np.clip(np.searchsorted(PUBLISHED_A, free[:, 0, A], side="right") - 1, 0, len(PUBLISHED_A) - 2)
    fixed = np.tile(fixed, (2, 1))
    fixed[:, A] = PUBLISHED_A[np.concatenate([below, below + 1])]
    nodes, sse = solve([points], Tie(matrix[1:], fixed, low[1:], high[1:]), np.tile(free[:, 0, [B]], (2, 1)))
    return nodes[np.argmin(sse), 0]


def fit_draws(recipes: Sequence[Recipe], tied: Tie, optimum: Array, num_draws: int, rng: np.random.Generator) -> Array:
    """Bootstrap draws [D, R, 4] of the refined fit, over seeds and points, each started at the optimum."""
    return solve_draws(recipes, tied, optimum, [point_weights(r.seed, num_draws, rng) for r in recipes])


def solve_draws(recipes: Sequence[Recipe], tied: Tie, optimum: Array, weights: Sequence[Array]) -> Array:
    """Parameters [D, R, 4] of the fit under each row of the recipes' `weights` [D, N]."""
    draws, _ = solve([r.points for r in recipes], tied, np.tile(optimum, (len(weights[0]), 1)), weights)
    return draws


def fit_recipe(
    recipe: Recipe, r0: float | None, method: Method, num_draws: int, rng: np.random.Generator
) -> tuple[RecipeFit, Array]:
    """Fit one recipe; also returns the bootstrap draws [D, 4]. Raises ConfigError for data that cannot be fitted.

    Intervals are of the refined fit: the published grid is a rounding of it and has no interval of its own.
    """
    check_recipe(recipe)
    tied, optimum = fit_parameters([recipe.points], [r0])
    draws = fit_draws([recipe], tied, optimum, num_draws, rng)[:, 0]
    value = tied.expand(optimum[None])[0, 0]
    if method == "published":
        _check_published(recipe)
        value = fit_published(recipe.points, float(value[R0]))
    return _summary(recipe, value, draws, r0 is not None), draws


class Comparison(msgspec.Struct, frozen=True):
    """Recipes refitted with one A: B and C_mid may be compared only there (ScaleRL).

    `faster` [R][R]: the share of draws in which the recipe of the row needs less compute than that of the column for
    half of the gain.
    """

    fits: list[RecipeFit]
    common_a: Estimate
    faster: list[list[float]]


def compare(
    recipes: Sequence[Recipe], r0: Sequence[float | None], num_draws: int, rng: np.random.Generator
) -> Comparison:
    """Refit all recipes with a common A."""
    tied, optimum = fit_parameters([r.points for r in recipes], r0, common_a=True)
    draws = fit_draws(recipes, tied, optimum, num_draws, rng)
    value = tied.expand(optimum[None])[0]
    fits = [_summary(r, value[i], draws[:, i], r0[i] is not None) for i, r in enumerate(recipes)]
    c_mid = draws[:, :, LN_C_MID]
    faster = (c_mid[:, :, None] < c_mid[:, None, :]).mean(0)
    return Comparison(fits, fits[0].a, faster.tolist())


def compute_at(fraction: float, parameters: Array) -> Array:
    """Compute at which `fraction` of the gain from R0 to A is reached, for parameters [..., 4]."""
    return np.exp(parameters[..., LN_C_MID] + np.log(fraction / (1 - fraction)) / parameters[..., B])


def _check_published(recipe: Recipe) -> None:
    high = recipe.compute.max()
    if high < PUBLISHED_C_MID[0]:
        raise ConfigError(
            f"{recipe.name}: the published grid spans C_mid from {PUBLISHED_C_MID[0]:g} to {PUBLISHED_C_MID[-1]:g}, "
            f"but this recipe ends at compute {high:g}; use --method refined"
        )


def _summary(recipe: Recipe, value: Array, draws: Array, r0_given: bool) -> RecipeFit:
    def estimate(at: float, samples: Array) -> Estimate:
        return Estimate(float(at), *interval(samples, len(recipe.reward), num_free))

    num_free = NUM_PARAMETERS - r0_given
    residual = recipe.reward - reward_at(recipe.compute, value)
    a = estimate(value[A], draws[:, A])
    return RecipeFit(
        name=recipe.name,
        num_points=len(recipe.reward),
        num_seeds=recipe.num_seeds,
        compute_low=float(recipe.compute.min()),
        compute_high=float(recipe.compute.max()),
        a=a,
        c_mid=estimate(np.exp(value[LN_C_MID]), np.exp(draws[:, LN_C_MID])),
        b=estimate(value[B], draws[:, B]),
        r0=estimate(value[R0], draws[:, R0]),
        r0_given=r0_given,
        compute_90=estimate(float(compute_at(0.9, value)), compute_at(0.9, draws)),
        residual_std=float(np.sqrt((residual**2).sum() / max(1, len(residual) - num_free))),
        a_determined=a.high < CEILING - AT_CEILING,
    )
