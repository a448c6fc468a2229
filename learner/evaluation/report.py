"""The numbers of an evaluation, and how they are printed."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from learner.evaluation.outcomes import ProblemOutcomes, RolloutOutcome, by_problem, counts, rewards
from pipeline.at_k import pass_at_k
from pipeline.errors import ConfigError
from pipeline.estimates import NUM_DRAWS, AtK, Estimate, at_ks, level_mean, rate_estimate

LENGTH_BUCKETS = 4


class LevelRow(msgspec.Struct, frozen=True):
    level: str
    num_problems: int
    num_rollouts: int
    pass_at_1: Estimate
    pass_at_k: Estimate
    mean_tokens: float
    truncated: Estimate


class Bucket(msgspec.Struct, frozen=True):
    """Rollouts alike in length or ending, and the share of them that are right."""

    name: str
    num_rollouts: int
    correct: Estimate


class EvalReport(msgspec.Struct, frozen=True):
    """Every interval is over problems. `mix_pass_at_1` weighs levels as training does, `hard_pass_at_1` averages the
    hard levels; both are None where the task has no such levels. `left_out` names problems with fewer than the largest
    k judged rollouts, which count nowhere else.
    """

    model: str
    task: str
    num_problems: int
    num_rollouts: int
    at: list[AtK]
    mix_pass_at_1: Estimate | None
    hard_pass_at_1: Estimate | None
    by_level: list[LevelRow]
    by_length: list[Bucket]
    by_ending: list[Bucket]
    left_out: list[str]


def evaluate_outcomes(
    outcomes: Sequence[RolloutOutcome],
    ks: Sequence[int],
    level_weights: Mapping[str, float],
    hard_levels: Sequence[str],
    seed: int,
    model: str,
    task: str,
) -> EvalReport:
    """The report on `outcomes`, a pure function of them; raises ConfigError when no problem has enough rollouts."""
    rng = np.random.default_rng(seed)
    kept, left_out = split_by_size(by_problem(outcomes), ks[-1])
    n, c = counts(kept)
    levels = [p.level for p in kept]
    return EvalReport(
        model,
        task,
        len(kept),
        int(n.sum()),
        at_ks(n, c, rewards(kept), ks, rng),
        level_mean(c / n, levels, level_weights, rng),
        level_mean(c / n, levels, dict.fromkeys(hard_levels, 1.0), rng),
        [_level_row(level, [p for p in kept if p.level == level], ks[-1], rng) for level in sorted(set(levels))],
        _by_length(kept, rng),
        _by_ending(kept, rng),
        left_out,
    )


def split_by_size(problems: Sequence[ProblemOutcomes], num_rollouts: int) -> tuple[list[ProblemOutcomes], list[str]]:
    """Problems with at least so many judged rollouts, and the names of the others; ConfigError if none has."""
    kept = [p for p in problems if len(p.rollouts) >= num_rollouts]
    if not kept:
        most = max((len(p.rollouts) for p in problems), default=0)
        raise ConfigError(f"no problem has {num_rollouts} judged rollouts, the most are {most}; lower --k")
    return kept, [p.problem_id for p in problems if len(p.rollouts) < num_rollouts]


def _level_row(level: str, problems: Sequence[ProblemOutcomes], k: int, rng: np.random.Generator) -> LevelRow:
    n, c = counts(problems)
    ones = np.ones(len(problems))
    truncated = np.array([sum(r.truncated for r in p.rollouts) for p in problems], float)
    return LevelRow(
        level,
        len(problems),
        int(n.sum()),
        rate_estimate(c / n, ones, NUM_DRAWS, rng),
        rate_estimate(pass_at_k(n, c, k), ones, NUM_DRAWS, rng),
        float(np.mean([r.num_tokens for p in problems for r in p.rollouts])),
        rate_estimate(truncated, n.astype(float), NUM_DRAWS, rng),
    )


def _by_length(problems: Sequence[ProblemOutcomes], rng: np.random.Generator) -> list[Bucket]:
    """Buckets between the quartiles of the rollouts' lengths; fewer where lengths repeat."""
    tokens = [r.num_tokens for p in problems for r in p.rollouts]
    shares = np.arange(1, LENGTH_BUCKETS) / LENGTH_BUCKETS
    edges = sorted({min(tokens) - 1, *(int(edge) for edge in np.quantile(tokens, shares)), max(tokens)})
    buckets = []
    for low, high in itertools.pairwise(edges):
        name = f"{low + 1}-{high} tokens" if high > low + 1 else f"{high} tokens"
        buckets.append(_bucket(name, problems, lambda r, low=low, high=high: low < r.num_tokens <= high, rng))
    return [b for b in buckets if b.num_rollouts]


def _by_ending(problems: Sequence[ProblemOutcomes], rng: np.random.Generator) -> list[Bucket]:
    ended = _bucket("ended by itself", problems, lambda r: not r.truncated, rng)
    truncated = _bucket("truncated", problems, lambda r: r.truncated, rng)
    return [b for b in (ended, truncated) if b.num_rollouts]


def _bucket(
    name: str,
    problems: Sequence[ProblemOutcomes],
    belongs: Callable[[RolloutOutcome], bool],
    rng: np.random.Generator,
) -> Bucket:
    inside = [[r for r in p.rollouts if belongs(r)] for p in problems]
    trials = np.array([len(rows) for rows in inside], float)
    successes = np.array([sum(r.correct for r in rows) for rows in inside], float)
    return Bucket(name, int(trials.sum()), rate_estimate(successes, trials, NUM_DRAWS, rng))


# --- text ---


def text(report: EvalReport) -> str:
    """The report as aligned text."""
    lines = [
        f"{report.model} on {report.task}: {report.num_problems} problems, {report.num_rollouts} rollouts; "
        "95% intervals over problems"
    ]
    if report.left_out:
        shown_ids = ", ".join(report.left_out[:5]) + (", …" if len(report.left_out) > 5 else "")
        lines.append(f"left out, with too few judged rollouts: {len(report.left_out)} ({shown_ids})")
    lines += ["", *_columns(("k", "pass@k", "best@k", "worst@k"), [_at_row(at) for at in report.at])]
    overall = [("as training mixes levels", report.mix_pass_at_1), ("hard levels", report.hard_pass_at_1)]
    lines += [""] + [f"pass@1, {name}: {shown(e)}" for name, e in overall if e is not None]
    k = report.at[-1].k
    header = ("level", "problems", "pass@1", f"pass@{k}", "tokens", "truncated")
    lines += ["", *_columns(header, [_shown_level(row) for row in report.by_level])]
    buckets = [(b.name, f"{b.num_rollouts}", shown(b.correct)) for b in report.by_length + report.by_ending]
    lines += ["", *_columns(("rollouts of", "number", "right"), buckets)]
    return "\n".join(lines)


def shown(e: Estimate) -> str:
    if math.isnan(e.value):
        return "-"
    return f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"


def _at_row(at: AtK) -> tuple[str, ...]:
    return f"{at.k}", shown(at.pass_at_k), shown(at.best_at_k), shown(at.worst_at_k)


def _shown_level(row: LevelRow) -> tuple[str, ...]:
    return (
        row.level or "all",
        f"{row.num_problems}",
        shown(row.pass_at_1),
        shown(row.pass_at_k),
        f"{row.mean_tokens:.1f}",
        shown(row.truncated),
    )


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]
