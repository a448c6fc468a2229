"""One evaluation in progress: every held-out problem, some rollouts each, and what its record says."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from pipeline.at_k import best_at_k, pass_at_k, powers_up_to, worst_at_k
from pipeline.coordinator.book import Result
from samplers.base import Problem

EXTREMES = "best_at_k", "worst_at_k"
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
        hard levels; pass@k, best@k and worst@k up to the fewest rollouts of any problem; rates by length and ending.
        """
        judged = self._judged
        by_level = _grouped(judged, lambda j: j.level)
        by_tokens = _grouped(judged, lambda j: 1 << max(j.num_tokens.bit_length() - 1, 0))
        rates = {level: _share_correct(rows) for level, rows in by_level.items()}
        return {
            "kind": "eval",
            "step": self.step,
            "phase": self.phase,
            "version_min": min(self._versions, default=self.step),
            "version_max": max(self._versions, default=self.step),
            "pass_at_1": rates,
            "num_rollouts": {level: len(rows) for level, rows in by_level.items()},
            "hard_pass_at_1": _weighted_mean(rates, dict.fromkeys(hard_levels, 1.0)),
            "mix_pass_at_1": _weighted_mean(rates, level_weights),
            "mean_tokens": sum(j.num_tokens for j in judged) / len(judged) if judged else None,
            "truncated_frac": _share_truncated(judged) if judged else None,
            "truncated_by_level": {level: _share_truncated(rows) for level, rows in by_level.items()},
            "correct_by_tokens": {str(n): _share_correct(rows) for n, rows in by_tokens.items()},
            "num_by_tokens": {str(n): len(rows) for n, rows in by_tokens.items()},
            "solved": _solved(judged),
        } | _at_k(judged)

    def extremes_by_level(self) -> tuple[dict[str, float], dict[str, float]]:
        """best@k and worst@k of each level, k being the fewest rollouts of any of its problems."""
        levels = _grouped(self._judged, lambda j: j.level).items()
        at_k = {level: _at_k(rows) for level, rows in levels}
        best, worst = ({level: [*found[name].values()][-1] for level, found in at_k.items()} for name in EXTREMES)
        return best, worst


def _at_k(judged: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """Means over problems, by k."""
    problems = _grouped(judged, lambda j: j.problem_id).values()
    n = np.array([len(rows) for rows in problems], np.int64)
    c = np.array([sum(j.is_correct for j in rows) for rows in problems], np.int64)
    rewards = [np.array([j.reward for j in rows]) for rows in problems]
    ks = powers_up_to(int(n.min())) if judged else []
    return {
        "pass_at_k": {str(k): float(pass_at_k(n, c, k).mean()) for k in ks},
        "best_at_k": {str(k): float(best_at_k(rewards, k).mean()) for k in ks},
        "worst_at_k": {str(k): float(worst_at_k(rewards, k).mean()) for k in ks},
    }


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
