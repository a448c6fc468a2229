"""Made evaluations whose truth is known."""

import random

from learner.evaluation.outcomes import RolloutOutcome

N = 64  # rollouts of a problem


def two_strategies(share: float, seed: int, num_problems: int = 40, label: bool = True) -> list[RolloutOutcome]:
    """Half of the problems yield to strategy a (right in 60%), half only to b (30%), which also solves 5% of the first.

    `share` is how often a is chosen; a sharp policy (near 1) has the better pass@1 and the narrower coverage.
    """
    rng = random.Random(seed)
    rows = []
    for i in range(num_problems):
        level = "x" if i % 2 == 0 else "y"
        success = {"a": 0.6, "b": 0.05} if level == "x" else {"a": 0.0, "b": 0.3}
        for _ in range(N):
            name = "a" if rng.random() < share else "b"
            right = rng.random() < success[name]
            rows.append(RolloutOutcome(f"p{i}", level, right, float(right), 5, False, name if label else ""))
    return rows
