"""Problems with what the policy does on them: how often each rung is reached, and how long its completions are."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.lab.config import (
    BetaConfig,
    FileConfig,
    LabTable,
    LadderConfig,
    LedgerConfig,
    LengthsConfig,
    LevelsConfig,
    LogUniformConfig,
    TwoPointConfig,
)
from bench.lab.recorded import Record, read_ledger
from bench.scaling.tables import number, read_table, require_columns
from pipeline.errors import ConfigError
from samplers.base import Problem

Array = NDArray[np.float64]

# Difficulty as the lab reports it, and as the level of problems that have none of their own.
DIFFICULTY_EDGES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.7, 0.95, 1.0)
# A pass rate of exactly 0 or 1 has no logit; 1e-6 is solved once in more rollouts than any simulation draws.
MIN_RATE = 1e-6


@dataclass(frozen=True)
class Population:
    """P problems, each with R outcomes of rising reward ("rungs"): wrong and right, or the number of tests passed.

    `rates` [P, R]: probability of each rung at the start, rows sum to 1; the last rung is the right answer.
    `rewards` [R]: what each rung pays. `median_tokens` [P]: of a completion.
    """

    problems: list[Problem]
    rates: Array
    rewards: Array
    median_tokens: Array

    @property
    def pass_rates(self) -> Array:
        return self.rates[:, -1]


def make_population(lab: LabTable, seed: int) -> Population:
    """The same table and seed give the same problems. Raises ConfigError when a file does not hold what it should."""
    config, rng = lab.population, np.random.default_rng([seed, 1])
    match config:
        case LevelsConfig():
            levels, pass_rates = _levels(config, rng)
            return _two_rungs(pass_rates, levels, lab.lengths)
        case BetaConfig():
            return _two_rungs(rng.beta(config.a, config.b, config.num_problems), None, lab.lengths)
        case LogUniformConfig():
            return _two_rungs(_log_uniform(config, rng), None, lab.lengths)
        case TwoPointConfig():
            num_hard = round(config.hard_frac * config.num_problems)
            pass_rates = np.where(np.arange(config.num_problems) < num_hard, config.hard, config.easy)
            return _two_rungs(pass_rates, None, lab.lengths)
        case LadderConfig():
            return _ladder(config, rng, lab.lengths)
        case FileConfig():
            return _from_file(Path(config.path), lab.lengths)
        case LedgerConfig():
            return _from_ledger(config, lab.lengths)


def difficulty_index(pass_rates: Array) -> NDArray[np.int64]:
    """[P] The interval of `DIFFICULTY_EDGES` that holds each pass rate; each is closed below and open above."""
    return np.clip(np.searchsorted(DIFFICULTY_EDGES, pass_rates, side="right") - 1, 0, len(DIFFICULTY_EDGES) - 2)


def difficulty_name(index: int) -> str:
    return f"{DIFFICULTY_EDGES[index]:g}-{DIFFICULTY_EDGES[index + 1]:g}"


# --- kinds ---


def _two_rungs(
    pass_rates: Array,
    levels: list[str] | None,
    lengths: LengthsConfig,
    ids: list[str] | None = None,
    median_tokens: Array | None = None,
) -> Population:
    rates = np.clip(pass_rates, MIN_RATE, 1 - MIN_RATE)
    problems = _problems(rates, levels, ids)
    medians = _medians(rates, lengths) if median_tokens is None else median_tokens
    return Population(problems, np.stack([1 - rates, rates], axis=1), np.array([0.0, 1.0]), medians)


def _ladder(config: LadderConfig, rng: np.random.Generator, lengths: LengthsConfig) -> Population:
    pass_rates = _log_uniform(config, rng)
    passed = np.arange(config.num_tests + 1) / config.num_tests
    at_least = pass_rates[:, None] ** (passed**config.steepness)
    rates = at_least - np.append(at_least[:, 1:], np.zeros((len(pass_rates), 1)), axis=1)
    all_pass = (passed == 1.0).astype(np.float64)
    rewards = {"per_test": passed, "all_pass": all_pass, "mixed": (passed + all_pass) / 2}[config.reward]
    return Population(_problems(pass_rates, None, None), rates, rewards, _medians(pass_rates, lengths))


def _levels(config: LevelsConfig, rng: np.random.Generator) -> tuple[list[str], Array]:
    """Exact shares, by largest remainder, so that a rare level is there in a small population too."""
    names = list(config.levels)
    shares = np.array([share for share, _ in config.levels.values()])
    exact = config.num_problems * shares / shares.sum()
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: config.num_problems - counts.sum()]] += 1
    index = np.repeat(np.arange(len(names)), counts)
    rates = np.array([rate for _, rate in config.levels.values()])[index]
    logits = np.log(rates / (1 - rates)) + config.spread * rng.standard_normal(len(index))
    return [names[i] for i in index], 1 / (1 + np.exp(-logits))


def _from_file(path: Path, lengths: LengthsConfig) -> Population:
    rows = read_table(path)
    require_columns(path, rows, ("problem_id", "pass_rate"))
    rates = np.array([number(path, i, row, "pass_rate") for i, row in enumerate(rows)])
    outside = np.flatnonzero((rates < 0) | (rates > 1))
    if len(outside):
        raise ConfigError(f"{path}, row {outside[0] + 1}: pass_rate is {rates[outside[0]]:g}; it must lie in [0, 1]")
    ids = [str(row["problem_id"]) for row in rows]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"{path}: problem_id {twice!r} appears twice; give each problem one row")
    levels = [str(row["level"]) for row in rows] if "level" in rows[0] else None
    medians = None
    if "tokens" in rows[0]:
        medians = _median_of_mean(np.array([number(path, i, row, "tokens") for i, row in enumerate(rows)]), lengths)
    return _two_rungs(rates, levels, lengths, ids, medians)


def _from_ledger(config: LedgerConfig, lengths: LengthsConfig) -> Population:
    records = read_ledger(Path(config.run))
    priors = _level_rates(records)
    strength = config.prior_strength
    rates = np.array([(strength * priors[r.level] + r.correct) / (strength + r.judged) for r in records])
    medians = _median_of_mean(np.array([r.mean_tokens for r in records]), lengths)
    return _two_rungs(rates, [r.level for r in records], lengths, [r.problem_id for r in records], medians)


# --- parts ---


def _level_rates(records: list[Record]) -> dict[str, float]:
    """First-round rates by level, from all rounds where no first one is left; Laplace's rule keeps them above 0."""
    counts: dict[str, np.ndarray] = {}
    for r in records:
        found = np.array([r.first_correct, r.first_judged, r.correct, r.judged])
        counts[r.level] = counts.get(r.level, np.zeros(4)) + found
    first = {level: c[:2] if c[1] else c[2:] for level, c in counts.items()}
    return {level: float((1 + correct) / (2 + judged)) for level, (correct, judged) in first.items()}


def _log_uniform(config: LogUniformConfig | LadderConfig, rng: np.random.Generator) -> Array:
    return np.exp(rng.uniform(math.log(config.low), math.log(config.high), config.num_problems))


def _problems(rates: Array, levels: list[str] | None, ids: list[str] | None) -> list[Problem]:
    names = levels or [difficulty_name(i) for i in difficulty_index(rates)]
    ids = ids or [str(i) for i in range(len(rates))]
    return [Problem(problem_id, "lab", "", "", level) for problem_id, level in zip(ids, names, strict=True)]


def _medians(rates: Array, lengths: LengthsConfig) -> Array:
    return lengths.median_tokens * (1 + lengths.harder * (1 - rates))


def _median_of_mean(means: Array, lengths: LengthsConfig) -> Array:
    return np.maximum(means, 1.0) * math.exp(-(lengths.spread**2) / 2)
