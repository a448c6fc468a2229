"""What methods of training did to one base model, each over its seeds: everything that `ngu methods` measures.

Pure functions of judged rollouts. A method's figures are means over its runs, on the same held-out problems, with
intervals over seeds: they say how far another seed may move them, not what other problems would give.
"""

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from bench.scaling.law import Array
from bench.scaling.reshaping import Interference, interference, matthew, strategies
from bench.study.estimates import Estimate, estimate
from learner.evaluation.outcomes import ProblemOutcomes, RolloutOutcome, by_problem, counts, tables
from pipeline.at_k import pass_at_k
from pipeline.errors import ConfigError

# The spread over seeds is what is shown; those over problems that the measures bring along are not used.
NUM_DRAWS = 1


class Trained(msgspec.Struct, frozen=True):
    """The judged rollouts of one run's model."""

    method: str
    seed: int
    outcomes: list[RolloutOutcome]


class Method(msgspec.Struct, frozen=True):
    """`gain`: pass@k minus that of the base model, at each k; `gain_by_level`: at the largest. `against_first`: pass@k
    minus the first method's, paired by seed; empty for the first one, and where they share no seed.

    `reweighted`, `taught`: the two parts of the change of pass@1 (`reshaping.Strategies`), and `shares` of rollouts by
    strategy; None and empty where no strategies are told apart. `matthew`: slope of the gain against the initial pass
    rate.
    """

    name: str
    seeds: list[int]
    pass_at_k: list[Estimate]
    gain: list[Estimate]
    gain_by_level: dict[str, Estimate]
    against_first: list[Estimate]
    matthew: Estimate
    zero_mass: Estimate
    distance_to_uniform: Estimate
    histogram: list[float]
    shares: dict[str, Estimate]
    reweighted: Estimate | None
    taught: Estimate | None


class Methods(msgspec.Struct, frozen=True):
    """`base` is pass@k of the base model at each of `ks`."""

    ks: list[int]
    num_problems: int
    num_left_out: int
    base: list[float]
    base_pass_at_1: Interference
    base_shares: dict[str, float]
    methods: list[Method]


class _Side:
    """One model on the common problems, with its rollouts by strategy, [P, Z]."""

    def __init__(self, outcomes: Sequence[RolloutOutcome], names: Sequence[str], ks: Sequence[int], labels: list[str]):
        found = {p.problem_id: p for p in by_problem(outcomes)}
        self.problems: list[ProblemOutcomes] = [found[name] for name in names]
        self.n, self.correct = counts(self.problems)
        self.per_problem: Array = np.stack([pass_at_k(self.n, self.correct, k) for k in ks], axis=1)  # [P, K]
        self.pass_at_k: Array = self.per_problem.mean(0)
        self.used, self.right = tables(self.problems, labels) if labels else (None, None)
        self.shares: dict[str, float] = {}
        if self.used is not None:
            self.shares = dict(zip(labels, (self.used.sum(0) / self.used.sum()).tolist(), strict=True))


def compare_methods(base: Sequence[RolloutOutcome], runs: Sequence[Trained], ks: Sequence[int]) -> Methods:
    """Every method in the order of its first run; raises ConfigError when the models share too few problems."""
    names, num_left_out = _common([base, *(run.outcomes for run in runs)], ks[-1])
    labels = sorted({r.strategy for outcomes in (base, *(run.outcomes for run in runs)) for r in outcomes})
    labels = [] if labels == [""] else labels
    before = _Side(base, names, ks, labels)
    sides: dict[str, dict[int, _Side]] = {}
    for run in runs:
        of_method = sides.setdefault(run.method, {})
        if run.seed in of_method:
            raise ConfigError(f"two runs of {run.method} have the seed {run.seed}; give each run once")
        of_method[run.seed] = _Side(run.outcomes, names, ks, labels)
    first = next(iter(sides.values()))
    return Methods(
        list(ks),
        len(names),
        num_left_out,
        before.pass_at_k.tolist(),
        interference(before.n, before.correct),
        before.shares,
        [_method(name, of_method, before, first, labels) for name, of_method in sides.items()],
    )


def _common(models: Sequence[Sequence[RolloutOutcome]], num_rollouts: int) -> tuple[list[str], int]:
    """Problems with enough judged rollouts of every model, and how many there are beside them."""
    sizes = [{p.problem_id: len(p.rollouts) for p in by_problem(outcomes)} for outcomes in models]
    known = {name: None for of in sizes for name in of}
    names = [name for name in known if all(of.get(name, 0) >= num_rollouts for of in sizes)]
    if len(names) < 2:
        raise ConfigError(
            f"{len(names)} of {len(known)} problems have {num_rollouts} judged rollouts of every model, at least 2 are "
            "needed; evaluate all models on the same task, lower --k or raise --rollouts"
        )
    return names, len(known) - len(names)


def _method(name: str, runs: dict[int, _Side], before: _Side, first: dict[int, _Side], labels: list[str]) -> Method:
    def over(measure: Callable[[_Side], float]) -> Estimate:
        """NaN of a run (a slope that cannot be measured) is left out."""
        found = {seed: value for seed, run in runs.items() if not math.isnan(value := measure(run))}
        return estimate(found) if found else Estimate(math.nan, None, None)

    levels = np.array([p.level for p in before.problems])
    gains = {seed: run.per_problem - before.per_problem for seed, run in runs.items()}  # [P, K]
    ks = range(before.per_problem.shape[1])
    shared = [seed for seed in runs if seed in first] if runs is not first else []
    parts = {seed: _two_stages(run, before, labels) for seed, run in runs.items()} if len(labels) > 1 else {}
    shapes = {seed: interference(run.n, run.correct) for seed, run in runs.items()}
    return Method(
        name=name,
        seeds=list(runs),
        pass_at_k=[over(lambda run, k=k: run.pass_at_k[k]) for k in ks],
        gain=[estimate({seed: float(gain[:, k].mean()) for seed, gain in gains.items()}) for k in ks],
        gain_by_level={
            str(level): estimate({seed: float(gain[levels == level, -1].mean()) for seed, gain in gains.items()})
            for level in np.unique(levels)
        },
        against_first=[
            estimate({seed: float(runs[seed].pass_at_k[k] - first[seed].pass_at_k[k]) for seed in shared})
            for k in ks
            if shared
        ],
        matthew=over(lambda run: _slope(run, before)),
        zero_mass=estimate({seed: shape.zero_mass for seed, shape in shapes.items()}),
        distance_to_uniform=estimate({seed: shape.distance_to_uniform for seed, shape in shapes.items()}),
        histogram=np.mean([shape.histogram for shape in shapes.values()], axis=0).tolist(),
        shares={label: over(lambda run, label=label: run.shares[label]) for label in labels},
        reweighted=estimate({seed: part[0] for seed, part in parts.items()}) if parts else None,
        taught=estimate({seed: part[1] for seed, part in parts.items()}) if parts else None,
    )


def _slope(run: _Side, before: _Side) -> float:
    found = matthew(before.n, before.correct, run.n, run.correct, NUM_DRAWS, np.random.default_rng(0))
    return found.slope.value


def _two_stages(run: _Side, before: _Side, labels: list[str]) -> tuple[float, float]:
    """What of the change of pass@1 is choosing strategies differently, and what carrying them out better."""
    assert before.used is not None and before.right is not None and run.used is not None and run.right is not None
    rng = np.random.default_rng(0)
    found = strategies(labels, before.used, before.right, run.used, run.right, NUM_DRAWS, rng)
    return found.reweighted.value, found.taught.value
