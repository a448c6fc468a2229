"""The saturating law of RL compute and its exact least-squares fit, many resampled data sets at a time.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)          (ScaleRL, arXiv 2510.13786, eq. 1)

A logistic in ln C: `A` is the reward at infinite compute, `C_mid` the compute of half the gain, `B` the steepness.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]

A, LN_C_MID, B, R0 = range(4)
NUM_PARAMETERS = 4
B_BOUNDS = (0.05, 10.0)
# C_mid may lie this far outside the observed compute; beyond it the curve is a line and the data cannot tell.
C_MID_MARGIN = 30.0

GRID_C_MID, GRID_B, GRID_POINTS = 32, 16, 400
MAX_ITERATIONS = 80
STEP_TOLERANCE = 1e-9
SSE_TOLERANCE = 1e-11
# Draws are fitted in blocks that stay in the processor's cache.
BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Points:
    """The observations of one recipe: `ln_compute` and `reward`, both [N]; compute 0 is allowed and means R = R0."""

    ln_compute: Array
    reward: Array

    @classmethod
    def of(cls, compute: Array, reward: Array) -> "Points":
        return cls(np.log(np.maximum(compute, 1e-300)), np.asarray(reward, float))

    @property
    def positive(self) -> Array:
        """`ln_compute` without the points at compute 0."""
        return self.ln_compute[self.ln_compute > -600]


@dataclass(frozen=True)
class Tie:
    """Which parameters are free and which recipes share them.

    Parameters [R * 4] = free [P] @ `matrix` [P, R * 4] + `fixed`. `fixed` is [R * 4], or [D, R * 4] where every draw
    has constants of its own. `low` and `high` bound the free ones.
    """

    matrix: Array
    fixed: Array
    low: Array
    high: Array

    def expand(self, free: Array) -> Array:
        """[D, P] -> [D, R, 4]."""
        full = free @ self.matrix + self.fixed
        return full.reshape(len(free), -1, NUM_PARAMETERS)

    def rows(self, index: NDArray[np.intp]) -> "Tie":
        """The same tie for a subset of the draws."""
        return self if self.fixed.ndim == 1 else Tie(self.matrix, self.fixed[index], self.low, self.high)


def reward_at(compute: Any, parameters: Array) -> Array:
    """R(C) for parameters [..., 4] = (A, ln C_mid, B, R0) and compute [N] -> [..., N]."""
    a, ln_c_mid, b, r0 = (parameters[..., i, None] for i in range(NUM_PARAMETERS))
    ln_c = np.log(np.maximum(np.asarray(compute, float), 1e-300))
    return r0 + (a - r0) * expit(b * (ln_c - ln_c_mid))


def bounds(recipes: Sequence[Points], ceiling: float, floor: float = 0.0) -> tuple[Array, Array]:
    """Lower and upper bounds [4] of (A, ln C_mid, B, R0) for data of which no reward can exceed `ceiling`."""
    x = np.concatenate([p.positive for p in recipes])
    margin = np.log(C_MID_MARGIN)
    low = np.array([floor, x.min() - margin, B_BOUNDS[0], floor])
    high = np.array([ceiling, x.max() + margin, B_BOUNDS[1], ceiling])
    return low, high


def tie(
    recipes: Sequence[Points],
    r0: Sequence[float | None],
    *,
    common_a: bool = False,
    common_r0: bool = False,
    ceiling: float = 1.0,
    floor: float = 0.0,
) -> Tie:
    """Free A, C_mid and B for each recipe, and R0 where it is not given; `common_a` and `common_r0` share one value."""
    low, high = bounds(recipes, ceiling, floor)
    columns: list[list[int]] = []  # for each free parameter, the full parameters that equal it
    fixed = np.zeros(len(recipes) * NUM_PARAMETERS)
    shared: dict[int, list[int]] = {}
    for i, given in enumerate(r0):
        for j in range(NUM_PARAMETERS):
            at = i * NUM_PARAMETERS + j
            if j == R0 and given is not None:
                fixed[at] = given
            elif (j == A and common_a) or (j == R0 and common_r0):
                if j not in shared:
                    columns.append(shared.setdefault(j, []))
                shared[j].append(at)
            else:
                columns.append([at])
    matrix = np.zeros((len(columns), len(fixed)))
    for row, column in enumerate(columns):
        matrix[row, column] = 1.0
    kind = [column[0] % NUM_PARAMETERS for column in columns]
    return Tie(matrix, fixed, low[kind], high[kind])


def start(points: Points, r0: float | None, *, ceiling: float = 1.0, floor: float = 0.0) -> Array:
    """Best node [4] of a grid over C_mid (spanning the data) and B; A, and R0 if not given, are solved for there."""
    low, high = bounds([points], ceiling, floor)
    ln_c_mid, b = (
        g.ravel()
        for g in np.meshgrid(
            np.linspace(low[LN_C_MID], high[LN_C_MID], GRID_C_MID), np.geomspace(*B_BOUNDS, GRID_B), indexing="ij"
        )
    )
    thin = slice(None, None, max(1, len(points.reward) // GRID_POINTS))
    y = points.reward[thin]
    f = expit(b[:, None] * (points.ln_compute[thin] - ln_c_mid[:, None]))  # [G, N]
    if r0 is None:
        # R = R0 (1 - f) + A f: a 2 x 2 system at each node; the ridge only keeps flat nodes solvable.
        g = 1 - f
        ff, fg, gg = ((f * f).sum(1) + 1e-9, (f * g).sum(1), (g * g).sum(1) + 1e-9)
        det = ff * gg - fg * fg
        a = np.clip((gg * (f @ y) - fg * (g @ y)) / det, floor, ceiling)
        base = np.clip((ff * (g @ y) - fg * (f @ y)) / det, floor, ceiling)
    else:
        base = np.full(len(b), r0)
        a = np.clip(r0 + f @ (y - r0) / ((f * f).sum(1) + 1e-12), floor, ceiling)
    sse = ((y - base[:, None] - (a - base)[:, None] * f) ** 2).sum(1)
    best = int(np.argmin(sse))
    return np.array([a[best], ln_c_mid[best], b[best], base[best]])


def solve(
    recipes: Sequence[Points], tied: Tie, free: Array, weights: Sequence[Array] | None = None
) -> tuple[Array, Array]:
    """Weighted least squares for D draws at once, by Levenberg-Marquardt projected on the bounds.

    `free` [D, P] are the starting values; `weights[i]` [D, N_i] are the weights of the points of recipe i (default 1).
    Returns the parameters [D, R, 4] and the weighted sum of squares [D].
    """
    num_points = sum(len(p.reward) for p in recipes)
    block = max(1, BLOCK_ELEMENTS // num_points)
    found, sse = np.empty_like(free), np.empty(len(free))
    for first in range(0, len(free), block):
        part = np.arange(first, min(first + block, len(free)))
        own = None if weights is None else [w[part] for w in weights]
        found[part], sse[part] = _descend(recipes, tied.rows(part), free[part], own)
    return tied.expand(found), sse


def _descend(recipes: Sequence[Points], tied: Tie, free: Array, weights: list[Array] | None) -> tuple[Array, Array]:
    free = np.clip(free, tied.low, tied.high)
    sse, gradient, hessian = _normal_equations(recipes, tied, free, weights)
    damping = np.full(len(free), 1e-4)
    open_ = np.arange(len(free))
    for _ in range(MAX_ITERATIONS):
        step = _step(free[open_], gradient[open_], hessian[open_], damping[open_], tied)
        trial = np.clip(free[open_] + step, tied.low, tied.high)
        own = None if weights is None else [w[open_] for w in weights]
        new_sse, new_gradient, new_hessian = _normal_equations(recipes, tied.rows(open_), trial, own)
        better = new_sse <= sse[open_]
        moved = np.abs(trial - free[open_]).max(1)
        settled = (moved < STEP_TOLERANCE) | (better & (sse[open_] - new_sse <= SSE_TOLERANCE * sse[open_]))
        at = open_[better]
        free[at], sse[at] = trial[better], new_sse[better]
        gradient[at], hessian[at] = new_gradient[better], new_hessian[better]
        damping[open_] = np.where(better, damping[open_] * 0.2, damping[open_] * 6.0).clip(1e-12, 1e12)
        open_ = open_[~settled]
        if len(open_) == 0:
            break
    return free, sse


def _step(free: Array, gradient: Array, hessian: Array, damping: Array, tied: Tie) -> Array:
    """The damped Gauss-Newton step; a parameter that its bound holds back stays where it is."""
    held = ((free <= tied.low) & (gradient < 0)) | ((free >= tied.high) & (gradient > 0))
    gradient = np.where(held, 0.0, gradient)
    matrix = np.where(held[:, :, None] | held[:, None, :], 0.0, hessian)
    diagonal = np.einsum("dii->di", matrix)
    diagonal *= 1 + damping[:, None]
    diagonal += held + 1e-12 * (1 + diagonal.max(1, keepdims=True))
    return np.asarray(np.linalg.solve(matrix, gradient[..., None])[..., 0], float)


def _normal_equations(
    recipes: Sequence[Points], tied: Tie, free: Array, weights: list[Array] | None
) -> tuple[Array, Array, Array]:
    """Sum of squares [D], J' W r [D, P] and J' W J [D, P, P] with r = reward - R(C) and J = dR / d free."""
    parameters = tied.expand(free)
    num_draws, num_free = free.shape
    sse, gradient, hessian = (
        np.zeros(num_draws),
        np.zeros((num_draws, num_free)),
        np.zeros((num_draws, num_free, num_free)),
    )
    for i, points in enumerate(recipes):
        a, ln_c_mid, b, r0 = (parameters[:, i, j, None] for j in range(NUM_PARAMETERS))
        t = points.ln_compute - ln_c_mid
        f = expit(b * t)
        slope = (a - r0) * f * (1 - f)
        # Jacobian rows and the residual together, so that one product gives J'WJ, J'Wr and r'Wr.
        stacked = np.stack([f, -b * slope, t * slope, 1 - f, points.reward - r0 - (a - r0) * f], axis=1)  # [D, 5, N]
        weighted = stacked if weights is None else stacked * weights[i][:, None, :]
        products = weighted @ stacked.transpose(0, 2, 1)
        own = tied.matrix[:, i * NUM_PARAMETERS : (i + 1) * NUM_PARAMETERS]  # [P, 4]
        sse += products[:, 4, 4]
        gradient += products[:, :4, 4] @ own.T
        hessian += own @ products[:, :4, :4] @ own.T
    return sse, gradient, hessian
