"""`ngu fit scalerl --check`: the fitter against the published table, from curves of which the truth is known."""

from collections.abc import Iterator

import msgspec
import numpy as np

from bench.scaling.curves import Recipe
from bench.scaling.law import LN_C_MID, A, Array, B, reward_at
from bench.scaling.resampling import interval
from bench.scaling.rivals import power_law, rank
from bench.scaling.scalerl import fit_draws, fit_parameters, fit_published

# (C_mid in GPU-hours, B, A, end of training): ScaleRL, arXiv 2510.13786, table 1.
PUBLISHED = {
    "ScaleRL": (2542, 1.92, 0.610, 16_000),
    "32k context": (11272, 1.89, 0.645, 50_000),
    "8 generations": (2542, 2.44, 0.585, 16_000),
    "24 generations": (3054, 2.22, 0.590, 16_000),
    "32 generations": (2936, 2.07, 0.595, 16_000),
    "Scout": (4242, 1.65, 0.710, 16_000),
    "batch 512": (2818, 1.77, 0.605, 16_000),
    "batch 2048": (10909, 1.70, 0.645, 50_000),
    "math of math+code": (2896, 2.05, 0.595, 16_000),
    "code of math+code": (1675, 1.09, 0.615, 16_000),
}
# f(C) = 1 / (1 + (C_mid / C)^B) of those rows, to four digits.
VECTORS = {
    ("ScaleRL", 8_000): 0.9004,
    ("ScaleRL", 16_000): 0.9716,
    ("batch 2048", 50_000): 0.9301,
    ("batch 2048", 100_000): 0.9774,
    ("Scout", 16_000): 0.8994,
    ("Scout", 50_000): 0.9832,
}
# Not published: R0, and how often was evaluated. 1,500 GPU-hours is where the published fits begin.
SYNTHETIC_R0 = 0.2
FIRST_COMPUTE, NUM_POINTS = 1500.0, 73
NOISE = 0.015  # uniform in +-NOISE
NUM_TRIALS, NUM_DRAWS = 200, 200
EXACT, NOISY = 0.005, 0.02
COVERAGE = (0.90, 0.99)


class Line(msgspec.Struct, frozen=True):
    """One checked claim."""

    name: str
    passed: bool
    detail: str


def check(seed: int) -> Iterator[Line]:
    """Every check in turn; about half a minute of one core."""
    rng = np.random.default_rng(seed)
    yield _vectors()
    for name in PUBLISHED:
        yield _row(name, rng)
    yield _extrapolation(rng)
    yield _power_law()


def curve(name: str, r0: float = SYNTHETIC_R0, first: float = FIRST_COMPUTE) -> tuple[Array, Array, Array]:
    """Compute [N], noise-free reward [N] and the true (A, ln C_mid, B, R0) of a row of the table."""
    c_mid, b, a, end = PUBLISHED[name]
    truth = np.array([a, np.log(c_mid), b, r0])
    compute = np.linspace(first, end, NUM_POINTS)
    return compute, reward_at(compute, truth), truth


def recipe(name: str, compute: Array, reward: Array) -> Recipe:
    return Recipe(name, compute, reward, np.zeros(len(compute), np.int64), SYNTHETIC_R0)


def _vectors() -> Line:
    wrong = []
    for (name, compute), expected in VECTORS.items():
        c_mid, b, _, _ = PUBLISHED[name]
        got = float(reward_at([compute], np.array([1.0, np.log(c_mid), b, 0.0]))[0])
        if round(got, 4) != expected:
            wrong.append(f"{name} f({compute}) = {got:.4f}, not {expected}")
    return Line("test vectors", not wrong, "; ".join(wrong) or f"all {len(VECTORS)} to four digits")


def _row(name: str, rng: np.random.Generator) -> Line:
    compute, exact, truth = curve(name)
    clean = recipe(name, compute, exact)
    tied, optimum = fit_parameters([clean.points], [SYNTHETIC_R0])
    exact_error = abs(float(optimum[A]) - truth[A])
    grid_error = abs(float(fit_published(clean.points, SYNTHETIC_R0)[A]) - truth[A])
    errors, inside = [], []
    for _ in range(NUM_TRIALS):
        noisy = recipe(name, compute, exact + rng.uniform(-NOISE, NOISE, NUM_POINTS))
        tied, optimum = fit_parameters([noisy.points], [SYNTHETIC_R0])
        draws = fit_draws([noisy], tied, optimum, NUM_DRAWS, rng)[:, 0]
        errors.append(abs(float(optimum[A]) - truth[A]))
        bounds = [interval(draws[:, j], NUM_POINTS, 3) for j in (A, LN_C_MID, B)]
        inside.append([low <= truth[j] <= high for (low, high), j in zip(bounds, (A, LN_C_MID, B), strict=True)])
    within = float(np.mean(np.array(errors) <= NOISY))
    coverage = np.mean(inside, axis=0)
    passed = (
        exact_error <= EXACT and within >= 0.95 and bool(((COVERAGE[0] <= coverage) & (coverage <= COVERAGE[1])).all())
    )
    return Line(
        name,
        passed,
        f"A off by {exact_error:.4f} noise-free ({grid_error:.3f} on the published grid); noisy within {NOISY} in "
        f"{within:.1%} of {NUM_TRIALS}, 95th percentile {np.quantile(errors, 0.95):.4f}; 95% intervals hold A "
        f"{coverage[0]:.1%}, C_mid {coverage[1]:.1%}, B {coverage[2]:.1%}",
    )


def _extrapolation(rng: np.random.Generator) -> Line:
    """On curves that come to R / A > 0.8 a law without a ceiling must lose."""
    lost = []
    for name in PUBLISHED:
        compute, exact, _ = curve(name)
        ranking = rank(recipe(name, compute, exact + rng.uniform(-NOISE, NOISE, NUM_POINTS)), SYNTHETIC_R0, rng)
        if ranking is None or ranking.scores[0].law in ("log-linear", "power law"):
            lost.append(name)
    won = len(PUBLISHED) - len(lost)
    return Line("held-out extrapolation", not lost, f"a sigmoid predicts best on {won} of {len(PUBLISHED)} noisy rows")


def _power_law() -> Line:
    """The published failure of a power law on a run whose A is 0.645: 1.0 from 1.5k GPU-hours on, 0.74 from 5k on.

    Below the bound the fitted A is affine in R0, so the unpublished R0 that gives 0.74 is solved for, and the other
    figure then has to come out at the same R0.
    """

    def fitted(first: float, r0: float) -> float:
        compute, reward, _ = curve("batch 2048", r0, first)
        return float(power_law(compute, reward, np.ones((1, NUM_POINTS)))[0, 0])

    a = PUBLISHED["batch 2048"][2]
    per_r0 = (fitted(5000, 0.3) - fitted(5000, 0.2)) / 0.1
    r0 = 0.2 + (0.74 - fitted(5000, 0.2)) / per_r0
    early, late = fitted(1500, r0), fitted(5000, r0)
    return Line(
        "power law on a sigmoid",
        0 <= r0 < a and early == 1.0 and round(late, 2) == 0.74,
        f"A = {fitted(1500, SYNTHETIC_R0):.2f} on (1.5k, 50k) and {fitted(5000, SYNTHETIC_R0):.2f} on (5k, 50k) at R0 "
        f"= {SYNTHETIC_R0}, where the truth is {a}; the published {early:.2f} and {late:.2f} come out at R0 = {r0:.2f}",
    )
