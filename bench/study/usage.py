"""Where the rollouts of a run went, from its ledger."""

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

_CHAINS = """
SELECT problem_id, max(CASE name WHEN 'trained' THEN step END) AS trained_step, max(round) > 0, count(*),
       min(outcome = 'correct'), max(outcome = 'correct'), sum(name = 'trained'), max(reward)
FROM attempts JOIN fates ON code = fate WHERE outcome IS NOT NULL GROUP BY chain_id ORDER BY trained_step, chain_id
"""


class Kinds(msgspec.Struct, frozen=True):
    """Groups that one optimizer step trained on, told apart as in `Usage`; `other` ones neither solve nor improve."""

    step: int
    full: int
    improving: int
    other: int


class Usage(msgspec.Struct, frozen=True):
    """`trained_frac`, `wasted_*_frac`: shares of the judged rollouts that were trained, or in chains that were left out
    as a whole because all were right, or all wrong. `ever_solved_frac`: of the problems tried, those solved at least
    once.

    Of the trained groups, `full_frac` hold a solution; `improving_frac` hold none, but a reward above that of every
    group trained before on the problem (its first group counts); `retried_frac` took more than one round. `kinds` are
    they by step, in order.
    """

    trained_frac: float
    wasted_right_frac: float
    wasted_wrong_frac: float
    ever_solved_frac: float
    num_groups: int
    full_frac: float
    improving_frac: float
    retried_frac: float
    kinds: list[Kinds]


def read_usage(ledger: Path) -> Usage | None:
    """None where a run has no ledger, or judged nothing."""
    try:
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return _usage(db.execute(_CHAINS))
    except sqlite3.Error:
        return None


def _usage(chains: Iterable[tuple[str, int | None, bool, int, bool, bool, int, float]]) -> Usage | None:
    judged = trained = right = wrong = retried = 0
    by_step: defaultdict[int, Counter[str]] = defaultdict(Counter)
    solved: dict[str, bool] = {}
    best: dict[str, float] = {}
    for problem, step, is_retried, size, all_right, any_right, num_trained, reward in chains:
        judged += size
        trained += num_trained
        solved[problem] = solved.get(problem, False) or bool(any_right)
        if step is None:
            right += size * all_right
            wrong += size * (not any_right)
            continue
        retried += is_retried
        before = best.get(problem, -math.inf)
        by_step[step]["full" if any_right else "improving" if reward > before else "other"] += 1
        best[problem] = max(reward, before)
    if not judged:
        return None
    of_kind = sum(by_step.values(), Counter[str]())
    of_groups = max(of_kind.total(), 1)
    return Usage(
        trained_frac=trained / judged,
        wasted_right_frac=right / judged,
        wasted_wrong_frac=wrong / judged,
        ever_solved_frac=sum(solved.values()) / len(solved),
        num_groups=of_kind.total(),
        full_frac=of_kind["full"] / of_groups,
        improving_frac=of_kind["improving"] / of_groups,
        retried_frac=retried / of_groups,
        kinds=[Kinds(step, found["full"], found["improving"], found["other"]) for step, found in by_step.items()],
    )
