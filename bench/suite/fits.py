"""How long the scaling-law fits take: many points, many bootstrap draws."""

import time
from collections.abc import Callable

import numpy as np

from bench.scaling.curves import Recipe
from bench.scaling.isocompute import fit_isocompute
from bench.scaling.isocompute_check import World
from bench.scaling.rivals import rank
from bench.scaling.scalerl import fit_recipe
from bench.suite.base import Benchmark, Row, Say, figure
from pipeline.sections import PositiveInt

SECONDS = 20.0  # the target
NOISE = 0.015
WORLD = World(128, 6e4, 2.0)


class FitsBench(Benchmark, frozen=True):
    """Wall seconds of one thread for `points` evaluations and `draws` bootstrap draws, without reading and drawing.

    `scalerl` is one recipe over three seeds, with the rival laws ranked; `isocompute` a sweep of seven n.
    """

    points: PositiveInt = 10_000
    draws: PositiveInt = 1_000
    repeats: PositiveInt = 3

    def run(self, say: Say) -> list[Row]:
        fits: dict[str, Callable[[int], object]] = {"scalerl": self._scalerl, "isocompute": self._isocompute}
        taken = {name: [_seconds(fit, seed) for seed in range(self.repeats)] for name, fit in fits.items()}
        return [figure(name, "s", seconds, at_most=SECONDS) for name, seconds in taken.items()]

    def _scalerl(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        compute = np.geomspace(1e3, 1e5, self.points)
        reward = 0.2 + 0.41 / (1 + (1e4 / compute) ** 1.5) + rng.uniform(-NOISE, NOISE, self.points)
        recipe = Recipe("made", compute, reward, np.arange(self.points) % 3, 0.2)
        fit_recipe(recipe, 0.2, "refined", self.draws, rng)
        rank(recipe, 0.2, rng)

    def _isocompute(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        fit_isocompute(WORLD.sweep(rng, num_points=self.points), self.draws, rng)


def _seconds(fit: Callable[[int], object], seed: int) -> float:
    started = time.perf_counter()
    fit(seed)
    return time.perf_counter() - started
