"""One evaluation in progress: every held-out problem, some rollouts each, and what its record says."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from pipeline.at_k import Array, Ints, best_at_k, powers_up_to, worst_at_k
from pipeline.coordinator.book import Result
from pipeline.estimates import NUM_DRAWS, Estimate, at_ks, level_mean, rate_estimate
from samplers.base import Problem

AT_K = "pass_at_k", "best_at_k", "worst_at_k"
Phase = Literal["before", "during", "after"]
Key = TypeVar("Key", str, int)


class Judged(NamedTuple):
    problem_id: str
    level: str
    is_correct: bool
    reward: float
    num_tokens: int
    is_truncated: bool


class Evaluation:
    """Collects verdicts until `num_missing` is 0.

    Before and after training, and in a pinned evaluation, all tokens are of version `step`. Otherwise weights change
    under the rollouts; the record then says which versions its tokens came from.
    """

    def __init__(self, phase: Phase, step: int, launches: Sequence[Problem], is_pinned: bool = False):
        """`launches` holds a problem once for each rollout of it."""
        self.phase: Phase = phase
        self.step = step
        self.launches = launches
        self.is_pinned = is_pinned
        self.num_missing = len(self.launches)
        self._judged: list[Judged] = []
        self._versions: set[int] = set()

    def settle(self, problem: Problem, result: Result | None) -> None:
        """Count one result; a rollout that could not be judged (None) is missing from the rates, never a failure."""
        self.num_missing -= 1
        if result is None:
            return
        rollout, verdict = result.rollout, result.verdict
        self._versions.update(s.policy_version for s in rollout.version_spans)
        self._judged.append(
            Judged(
                problem.problem_id,
                problem.level,
                verdict.outcome == "correct",
                verdict.reward,
                rollout.num_tokens,
                rollout.finish_reason == "length",
            )
        )

    def record(self, level_weights: Mapping[str, float], hard_levels: Sequence[str]) -> dict[str, Any]:
        """The metrics record (`pipeline.metrics`): pass@1 by level, its mean under `level_weights` (mix) and over the
        hard levels; pass@k, best@k and worst@k up to the fewest rollouts of any problem; rates by length and ending;
        95% intervals over problems.
        """
        judged = self._judged
        by_level = _grouped(judged, lambda j: j.level)
        by_tokens = _grouped(judged, lambda j: 1 << max(j.num_tokens.bit_length() - 1, 0))
        rates = {level: _share_correct(rows) for level, rows in by_level.items()}
        weights = {"mix_pass_at_1": level_weights, "hard_pass_at_1": dict.fromkeys(hard_levels, 1.0)}
        return {
            "kind": "eval",
            "step": self.step,
            "phase": self.phase,
            "version_min": min(self._versions, default=self.step),
            "version_max": max(self._versions, default=self.step),
            "pass_at_1": rates,
            "num_rollouts": {level: len(rows) for level, rows in by_level.items()},
            **{name: _weighted_mean(rates, of_level) for name, of_level in weights.items()},
            "mean_tokens": sum(j.num_tokens for j in judged) / len(judged) if judged else None,
            "truncated_frac": _share_truncated(judged) if judged else None,
            "truncated_by_level": {level: _share_truncated(rows) for level, rows in by_level.items()},
            "correct_by_tokens": {str(n): _share_correct(rows) for n, rows in by_tokens.items()},
            "num_by_tokens": {str(n): len(rows) for n, rows in by_tokens.items()},
            "solved": _solved(judged),
        } | self._estimates(weights)

    def _estimates(self, weights: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """The rates at k, and the 95% intervals of these and of pass@1; the same for the same rollouts."""
        rng = np.random.default_rng(self.step)
        problems = _problems(self._judged)
        n, c = _counts(problems)
        at = at_ks(n, c, _rewards(problems), powers_up_to(int(n.min())) if problems else [], rng)
        by_k = {name: {str(row.k): getattr(row, name) for row in at} for name in AT_K}
        levels = [rows[0].level for rows in problems]
        means = {name: level_mean(c / n, levels, of_level, rng) for name, of_level in weights.items()}
        by_level = _grouped(self._judged, lambda j: j.level)
        intervals = {
            **{name: _bounds(found) for name, found in means.items() if found is not None},
            **{name: {k: _bounds(found) for k, found in by_k[name].items()} for name in AT_K},
            "pass_at_1": {level: _bounds(_pass_at_1(rows, rng)) for level, rows in by_level.items()},
        }
        rates = {name: {k: found.value for k, found in by_k[name].items()} for name in AT_K}
        return {**rates, "intervals": intervals}

    def extremes_by_level(self) -> tuple[dict[str, float], dict[str, float]]:
        """best@k and worst@k of each level, k being the fewest rollouts of any of its problems."""
        best, worst = {}, {}
        for level, rows in _grouped(self._judged, lambda j: j.level).items():
            rewards = _rewards(_problems(rows))
            k = min(map(len, rewards))
            best[level], worst[level] = (float(at_k(rewards, k).mean()) for at_k in (best_at_k, worst_at_k))
        return best, worst


def _problems(judged: Sequence[Judged]) -> list[list[Judged]]:
    return list(_grouped(judged, lambda j: j.problem_id).values())


def _counts(problems: Sequence[Sequence[Judged]]) -> tuple[Ints, Ints]:
    """Rollouts of each problem, [P], and how many of them are right, [P]."""
    n = np.array([len(rows) for rows in problems], np.int64)
    return n, np.array([sum(j.is_correct for j in rows) for rows in problems], np.int64)


def _rewards(problems: Sequence[Sequence[Judged]]) -> list[Array]:
    return [np.array([j.reward for j in rows]) for rows in problems]


def _pass_at_1(judged: Sequence[Judged], rng: np.random.Generator) -> Estimate:
    n, c = _counts(_problems(judged))
    return rate_estimate(c.astype(float), n.astype(float), NUM_DRAWS, rng)


def _bounds(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


def _solved(judged: Sequence[Judged]) -> dict[str, list[int]]:
    """By the rollouts n of a problem: how many problems were right 0, 1, ... n times."""
    found: dict[int, list[int]] = {}
    for rows in _grouped(judged, lambda j: j.problem_id).values():
        found.setdefault(len(rows), [0] * (len(rows) + 1))[sum(j.is_correct for j in rows)] += 1
    return {str(n): counts for n, counts in sorted(found.items())}


def _grouped(judged: Sequence[Judged], key: Callable[[Judged], Key]) -> dict[Key, list[Judged]]:
    groups: defaultdict[Key, list[Judged]] = defaultdict(list)
    for row in judged:
        groups[key(row)].append(row)
    return dict(sorted(groups.items()))


def _share_correct(judged: Sequence[Judged]) -> float:
    return sum(j.is_correct for j in judged) / len(judged)


def _share_truncated(judged: Sequence[Judged]) -> float:
    return sum(j.is_truncated for j in judged) / len(judged)


def _weighted_mean(rates: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    total = sum(weights.get(level, 0.0) for level in rates)
    if total <= 0:
        return None
    return sum(rate * weights.get(level, 0.0) for level, rate in rates.items()) / total
