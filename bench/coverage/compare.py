"""Two evaluations of the same problems side by side: everything that `ngu coverage` measures, before words."""

from collections.abc import Sequence

import msgspec
import numpy as np

from bench.scaling.coverage import Coverage, compare_by_level, compare_coverage
from bench.scaling.reshaping import (
    Interference,
    Matthew,
    Strategies,
    gained_and_lost,
    interference,
    matthew,
    strategies,
)
from learner.evaluation.outcomes import ProblemOutcomes, RolloutOutcome, by_problem, counts, tables
from pipeline.errors import ConfigError
from pipeline.estimates import NUM_DRAWS


class Pair(msgspec.Struct, frozen=True):
    """The same P problems before and after, with equally many rollouts of each problem on both sides."""

    base: list[ProblemOutcomes]
    tuned: list[ProblemOutcomes]
    num_left_out: int

    @property
    def levels(self) -> list[str]:
        return [p.level for p in self.base]


class Changed(msgspec.Struct, frozen=True):
    """Ids of problems; see `bench.scaling.reshaping.GainedLost`."""

    gained: list[str]
    lost: list[str]
    surely_better: list[str]
    surely_worse: list[str]


class Comparison(msgspec.Struct, frozen=True):
    """Every interval is 95% over problems, the same ones drawn for both models. `strategies` is None where the
    outcomes name none; `by_level` is empty where all problems are of one level.
    """

    num_problems: int
    num_rollouts: int
    num_left_out: int
    coverage: Coverage
    by_level: dict[str, Coverage]
    changed: Changed
    strategies: Strategies | None
    base_pass_at_1: Interference
    tuned_pass_at_1: Interference
    matthew: Matthew


def pair_up(base: Sequence[RolloutOutcome], tuned: Sequence[RolloutOutcome], num_rollouts: int) -> Pair:
    """Problems with at least `num_rollouts` on both sides, cut to the smaller of the two; raises ConfigError.

    A model may not have been judged as often as the other on a problem, and curves to different n would not be a pair.
    """
    before = {p.problem_id: p for p in by_problem(base)}
    after = {p.problem_id: p for p in by_problem(tuned)}
    common = [name for name in before if name in after]
    if not common:
        raise ConfigError("the two evaluations have no problem in common; evaluate both models on the same task")
    pairs = []
    for name in common:
        size = min(len(before[name].rollouts), len(after[name].rollouts))
        if size >= num_rollouts:
            pairs.append((_first(before[name], size), _first(after[name], size)))
    if len(pairs) < 2:
        raise ConfigError(
            f"{len(pairs)} of {len(common)} common problems have {num_rollouts} judged rollouts on both sides, "
            "at least 2 are needed; lower --k or evaluate with more --rollouts"
        )
    num_left_out = len(before.keys() | after.keys()) - len(pairs)
    return Pair([b for b, _ in pairs], [t for _, t in pairs], num_left_out)


def compare(pair: Pair, ks: Sequence[int], seed: int) -> Comparison:
    """A pure function of the outcomes; `ks` increase and end at 2 or more."""
    rng = np.random.default_rng(seed)
    n, before = counts(pair.base)
    _, after = counts(pair.tuned)
    names = [p.problem_id for p in pair.base]
    found = gained_and_lost(n, before, n, after)
    levels = sorted(set(pair.levels))
    return Comparison(
        len(n),
        int(n.sum()),
        pair.num_left_out,
        compare_coverage(n, before, after, list(ks), NUM_DRAWS, rng),
        compare_by_level(pair.levels, n, before, after, list(ks), NUM_DRAWS, rng) if len(levels) > 1 else {},
        Changed(
            *([names[i] for i in of] for of in (found.gained, found.lost, found.surely_better, found.surely_worse))
        ),
        _strategies(pair, rng),
        interference(n, before),
        interference(n, after),
        matthew(n, before, n, after, NUM_DRAWS, rng),
    )


def _strategies(pair: Pair, rng: np.random.Generator) -> Strategies | None:
    rollouts = (r for problems in (pair.base, pair.tuned) for p in problems for r in p.rollouts)
    names = sorted({r.strategy for r in rollouts})
    if names == [""]:
        return None
    before, after = (tables(problems, names) for problems in (pair.base, pair.tuned))
    return strategies(names, *before, *after, NUM_DRAWS, rng)


def _first(problem: ProblemOutcomes, size: int) -> ProblemOutcomes:
    return msgspec.structs.replace(problem, rollouts=problem.rollouts[:size])
