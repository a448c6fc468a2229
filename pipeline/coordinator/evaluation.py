"""One evaluation in progress: every held-out problem, some rollouts each, pass@1 by level."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pipeline.coordinator.book import Result
from samplers.base import Problem

Phase = Literal["before", "during", "after"]


class Evaluation:
    """Collects verdicts until `num_missing` is 0.

    Before and after training the policy is pinned. During training weights change under the rollouts; the record then
    says which versions its tokens came from.
    """

    def __init__(self, phase: Phase, step: int, launches: Sequence[Problem]):
        """`launches` holds a problem once for each rollout of it."""
        self.phase: Phase = phase
        self.step = step
        self.launches = launches
        self.num_missing = len(self.launches)
        self._correct: dict[str, list[bool]] = defaultdict(list)
        self._versions: set[int] = set()
        self._num_tokens = 0
        self._num_truncated = 0

    def settle(self, problem: Problem, result: Result | None) -> None:
        """Count one result; a rollout that could not be judged (None) is missing from the rates, never a failure."""
        self.num_missing -= 1
        if result is None:
            return
        rollout = result.rollout
        self._correct[problem.level].append(result.verdict.outcome == "correct")
        self._versions.update(s.policy_version for s in rollout.version_spans)
        self._num_tokens += rollout.num_tokens
        self._num_truncated += rollout.finish_reason == "length"

    def record(self, level_weights: Mapping[str, float], hard_levels: Sequence[str]) -> dict[str, object]:
        """The metrics record: pass@1 by level, its mean under `level_weights` (mix) and over the hard levels."""
        rates = {level: sum(c) / len(c) for level, c in sorted(self._correct.items())}
        counts = {level: len(c) for level, c in sorted(self._correct.items())}
        num = sum(counts.values())
        return {
            "kind": "eval",
            "step": self.step,
            "phase": self.phase,
            "version_min": min(self._versions, default=self.step),
            "version_max": max(self._versions, default=self.step),
            "pass_at_1": rates,
            "num_rollouts": counts,
            "hard_pass_at_1": _weighted_mean(rates, dict.fromkeys(hard_levels, 1.0)),
            "mix_pass_at_1": _weighted_mean(rates, level_weights),
            "mean_tokens": self._num_tokens / num if num else None,
            "truncated_frac": self._num_truncated / num if num else None,
        }


def _weighted_mean(rates: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    total = sum(weights.get(level, 0.0) for level in rates)
    if total <= 0:
        return None
    return sum(rate * weights.get(level, 0.0) for level, rate in rates.items()) / total
