"""The whole of `ngu fit scalerl`, from files to report and figure."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bench.scaling.curves import UNIT_NAMES, PassRate, Recipe, Unit, check_recipe, load_recipes
from bench.scaling.rivals import rank
from bench.scaling.scalerl import PUBLISHED_MIN_COMPUTE, Method, compare, fit_recipe
from bench.scaling.scalerl_report import ScalerlReport, draw, sentences
from pipeline.errors import ConfigError


def run(
    paths: Sequence[Path],
    unit: Unit | None,
    pass_rate: PassRate,
    method: Method,
    r0: str,
    window: tuple[float | None, float | None],
    num_draws: int,
    seed: int,
) -> tuple[ScalerlReport, Figure, list[list[object]]]:
    """Read, fit, rank, compare and draw; raises ConfigError for input that cannot be fitted."""
    recipes, unit = load_recipes(paths, unit, pass_rate)
    recipes = [_windowed(recipe, window, method) for recipe in recipes]
    given = [_r0(recipe, r0) for recipe in recipes]
    rng = np.random.default_rng(seed)
    fits, draws = zip(
        *(fit_recipe(c, r, method, num_draws, rng) for c, r in zip(recipes, given, strict=True)), strict=True
    )
    comparison = compare(recipes, given, num_draws, rng) if len(recipes) > 1 else None
    rankings = [rank(c, r, rng) for c, r in zip(recipes, given, strict=True)]
    shown_unit = UNIT_NAMES.get(unit, unit)
    says = sentences(fits, rankings, comparison, shown_unit)
    inputs = [str(path) for path in paths]
    report = ScalerlReport(inputs, unit, pass_rate, method, num_draws, seed, list(fits), comparison, rankings, says)
    figure, rows = draw(recipes, fits, draws, rankings, shown_unit)
    return report, figure, rows


def _windowed(recipe: Recipe, window: tuple[float | None, float | None], method: Method) -> Recipe:
    low, high = window
    if low is None:
        low = PUBLISHED_MIN_COMPUTE if method == "published" else 0.0
    kept = recipe.where((recipe.compute >= low) & (recipe.compute <= (math.inf if high is None else high)))
    check_recipe(kept)
    return kept


def _r0(recipe: Recipe, r0: str) -> float | None:
    if r0 == "auto":
        return recipe.r0
    if r0 == "fit":
        return None
    try:
        value = float(r0)
    except ValueError:
        raise ConfigError(f"--r0 {r0!r}: give a number, fit or auto") from None
    if not 0 <= value < 1:
        raise ConfigError(f"--r0 {r0}: a pass rate before training is in [0, 1)")
    return value
