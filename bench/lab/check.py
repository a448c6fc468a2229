"""`ngu lab simulate --check`: the sampler and the advantages of real runs against closed forms.

Every figure comes from `NeverGiveUpSampler` and `learner.advantages.chain_advantages` themselves. An estimator that the
learner does not offer is built from its own: a baseline over the kept rollouts is a chain of nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from bench.lab import closed_forms
from bench.lab.population import Array
from learner.advantages import Chain, chain_advantages
from pipeline.learner_config import AdvantageConfig, AdvantageKind, Rescale
from samplers.base import Outcome, Problem
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpHistoryConfig, NeverGiveUpSampler

# Some row is more than 3 standard errors off under one seed of fifteen, by chance alone (measured over 30): this is
# one of the other fourteen.
SEED = 1
NUM_CHAINS = 20_000
MAX_ERRORS = 3.0
PASS_RATES = (0.01, 0.05, 0.2, 0.5, 0.7)
SINGLE_PASS_RATES = (0.05, 0.3)
ROUND_SIZE, P_NGU, KEEP_ROUNDS = 4, 0.9, 2
BUDGET = 1024

Estimator = Callable[["Closed"], tuple[Array, tuple[int, ...]]]


class Row(msgspec.Struct, frozen=True):
    """`error` is the standard error of `measured`; 0 means that the two must be equal."""

    what: str
    name: str
    measured: float
    error: float
    expected: float

    @property
    def off_by(self) -> float:
        """In standard errors."""
        gap = abs(self.measured - self.expected)
        if self.error > 0:
            return gap / self.error
        return 0.0 if gap < 1e-12 else float("inf")

    @property
    def is_right(self) -> bool:
        return self.off_by <= MAX_ERRORS


@dataclass(frozen=True, slots=True)
class Closed:
    """One chain to its end: all rewards in launch order, and what the sampler decided."""

    rewards: tuple[float, ...]
    keep: tuple[int, ...]
    accepted: bool


def check(num_chains: int = NUM_CHAINS) -> Iterator[Row]:
    """Row by row, each p with fresh chains; the same figures every time."""
    yield from _examples()
    for p in PASS_RATES:
        config = _never_give_up(ROUND_SIZE, P_NGU, max_attempts=0, keep_versions=KEEP_ROUNDS - 1)
        what = f"rounds of {ROUND_SIZE}, p_ngu {P_NGU}, p {p}"
        chains = closed_chains(config, p, num_chains)
        yield from _fates(what, chains, closed_forms.rounds(p, ROUND_SIZE, P_NGU))
        yield from _weights(what, chains, p, ROUNDS, closed_forms.round_weights(p, ROUND_SIZE, P_NGU, KEEP_ROUNDS))
    for p in SINGLE_PASS_RATES:
        # A cap that no chain meets: q^4096 is below 1e-90.
        config = _never_give_up(1, 1.0, max_attempts=4096, keep_versions=-1)
        what = f"one by one until solved, p {p}"
        chains = closed_chains(config, p, num_chains)
        yield from _fates(what, chains, {"E[N]": 1 / p, "P(accept)": 1.0})
        yield from _weights(what, chains, p, SINGLES, closed_forms.single_weights(p))
    config = msgspec.structs.replace(NeverGiveUpConfig(), max_retry_frac=1.0, max_waiting=num_chains)
    for p in PASS_RATES[:2]:
        expected = closed_forms.doubling(p, config.round_size, config.max_attempts)
        yield from _fates(f"doubling to {config.max_attempts}, p {p}", closed_chains(config, p, num_chains), expected)


def closed_chains(config: NeverGiveUpConfig, p: float, num_chains: int) -> list[Closed]:
    """The first `num_chains` chains of the real sampler, whichever end first; the policy is a version older a round."""
    sampler = NeverGiveUpSampler(config, _Endless(), SEED)
    rng = np.random.default_rng([SEED, round(1e6 * p), config.round_size])
    rewards: dict[int, tuple[float, ...]] = {}
    closed: list[Closed | None] = [None] * num_chains
    num_open = num_chains
    while num_open:
        for launch in sampler.propose(BUDGET):
            drawn = tuple((rng.random(launch.num_rollouts) < p).astype(float).tolist())
            chain = rewards[launch.chain_id] = rewards.get(launch.chain_id, ()) + drawn
            right, cut = tuple(r == 1 for r in drawn), (False,) * len(drawn)
            outcome = Outcome(launch.chain_id, launch.round, drawn, right, cut, 0, launch.round, launch.round)
            (decision,) = sampler.observe(outcome)
            if decision.action == "retry":
                continue
            del rewards[launch.chain_id]
            if launch.chain_id < num_chains:
                accepted = decision.action == "train" or decision.reason == "solved"
                closed[launch.chain_id] = Closed(chain, decision.keep, accepted)
                num_open -= 1
    return [c for c in closed if c is not None]


# --- estimators: the weights of a trained chain's rollouts, and which they are ---


def _whole(chain: Closed, kind: AdvantageKind, divide: bool = False) -> tuple[Array, tuple[int, ...]]:
    keep = tuple(range(len(chain.rewards)))
    return _advantages(chain.rewards, keep, kind) / (len(keep) if divide else 1), keep


def _kept(chain: Closed, rescale: Rescale) -> tuple[Array, tuple[int, ...]]:
    return _advantages(chain.rewards, chain.keep, "centered", rescale), chain.keep


def _own_baseline(chain: Closed) -> tuple[Array, tuple[int, ...]]:
    rewards = tuple(chain.rewards[i] for i in chain.keep)
    return _advantages(rewards, tuple(range(len(rewards))), "centered"), chain.keep


def _predictable(chain: Closed) -> tuple[Array, tuple[int, ...]]:
    """Whether a round is drawn depends on those before it only, so its own leave-one-out baseline, which counts them
    too, is fair; the failures before it were all that their round knew, and stand at their baseline.
    """
    weights, keep = _whole(chain, "leave_one_out")
    return weights[-ROUND_SIZE:], keep[-ROUND_SIZE:]


def _leave_one_out_or_all(chain: Closed) -> tuple[Array, tuple[int, ...]]:
    """A lone success has nobody to be compared with; here it keeps its reward."""
    return (np.ones(1), (0,)) if len(chain.rewards) == 1 else _whole(chain, "leave_one_out")


def _power(chain: Closed, alpha: float, round_size: int) -> tuple[Array, tuple[int, ...]]:
    num = len(chain.rewards)
    drawn = Chain(np.array(chain.rewards), np.arange(num), (round_size,) * (num // round_size))
    return chain_advantages(drawn, AdvantageConfig(kind="power", alpha=alpha)), tuple(range(num))


ROUNDS: dict[str, Estimator] = {
    "predictable": _predictable,
    "centered": partial(_whole, kind="centered"),
    "anchored, kept": partial(_kept, rescale="anchor"),
    "not rescaled, kept": partial(_kept, rescale="none"),
    "own baseline, kept": _own_baseline,
    "standardized / N": partial(_whole, kind="standardized", divide=True),
    "centered / N": partial(_whole, kind="centered", divide=True),
    "power 1": partial(_power, alpha=1.0, round_size=ROUND_SIZE),
    "power 1/2": partial(_power, alpha=0.5, round_size=ROUND_SIZE),
}
SINGLES: dict[str, Estimator] = {
    "leave-one-out, N = 1 dropped": partial(_whole, kind="leave_one_out"),
    "leave-one-out, N = 1 kept": _leave_one_out_or_all,
    "leave-one-out / N": partial(_whole, kind="leave_one_out", divide=True),
    "centered": partial(_whole, kind="centered"),
    "centered / N": partial(_whole, kind="centered", divide=True),
    "standardized / N": partial(_whole, kind="standardized", divide=True),
    "max_rl / N": partial(_whole, kind="max_rl", divide=True),
    "power 1": partial(_power, alpha=1.0, round_size=1),
    "power 1/2": partial(_power, alpha=0.5, round_size=1),
}
# Their baseline is fair only if chains that were given up are trained too.
TRAIN_ALL = frozenset({"power 1", "power 1/2"})


def _advantages(
    rewards: tuple[float, ...], keep: tuple[int, ...], kind: AdvantageKind, rescale: Rescale = "none"
) -> Array:
    """The learner's own, before its clip: closed forms know no clip."""
    chain = Chain(np.array(rewards), np.array(keep), (len(rewards),))
    return chain_advantages(chain, AdvantageConfig(kind=kind, rescale=rescale))


# --- rows ---


def _fates(what: str, chains: list[Closed], expected: dict[str, float]) -> Iterator[Row]:
    lengths = np.array([len(c.rewards) for c in chains], dtype=float)
    yield _row(what, "E[N]", lengths, expected["E[N]"], np.ones(len(chains)))
    share, theory = sum(c.accepted for c in chains) / len(chains), expected["P(accept)"]
    # Theory's own error: where all but one in ten thousand are accepted, the measured one is often 0.
    yield Row(what, "P(accept)", share, (theory * (1 - theory) / len(chains)) ** 0.5, theory)


def _weights(
    what: str, chains: list[Closed], p: float, estimators: dict[str, Estimator], expected: dict[str, float]
) -> Iterator[Row]:
    alike = Counter(chains)
    counts = np.array(list(alike.values()), dtype=float)
    for name, estimator in estimators.items():
        yield _row(
            what, f"w(p), {name}", np.array([_weight(name, estimator, c, p) for c in alike]), expected[name], counts
        )


def _weight(name: str, estimator: Estimator, chain: Closed, p: float) -> float:
    """sum_i A_i (r_i/p - (1-r_i)/q) of one chain."""
    if not (chain.accepted or name in TRAIN_ALL):
        return 0.0
    advantages, indices = estimator(chain)
    rewards = np.array([chain.rewards[i] for i in indices])
    return float((advantages * (rewards / p - (1 - rewards) / (1 - p))).sum())


def _row(what: str, name: str, values: Array, expected: float, counts: Array) -> Row:
    """`values` [V], each of which came `counts` [V] times."""
    num, mean = float(counts.sum()), float(np.average(values, weights=counts))
    variance = float((counts * (values - mean) ** 2).sum()) / (num - 1)
    return Row(what, name, mean, (variance / num) ** 0.5, expected)


def _examples() -> Iterator[Row]:
    """By hand: 4 stale failures, 3 fresh ones and a success; then the last three of five attempts, sum 1."""
    anchored, plain = (_advantages((0.0,) * 7 + (1.0,), (4, 5, 6, 7), "centered", a) for a in ("anchor", "none"))
    yield Row("7 failures, 1 success, 4 kept", "factor on the failures", float(anchored[0] / plain[0]), 0.0, 7 / 3)
    found = _advantages((0.0,) * 4 + (1.0,), (2, 3, 4), "centered", "anchor")
    for name, value, expected in zip(("1st", "2nd", "3rd"), found.tolist(), (-0.4, -0.4, 0.8), strict=True):
        yield Row("5 attempts, 1 success, 3 kept", f"advantage of the {name}", value, 0.0, expected)


def _never_give_up(round_size: int, p_ngu: float, max_attempts: int, keep_versions: int) -> NeverGiveUpConfig:
    """As published: no bound on retries, no cap on failures, no cool-down."""
    return NeverGiveUpConfig(
        round_size=round_size,
        retry="probability",
        p_ngu=p_ngu,
        max_attempts=max_attempts,
        keep_failures=0,
        keep_versions=keep_versions,
        max_retry_frac=1.0,
        max_waiting=1 << 30,
        history=NeverGiveUpHistoryConfig(cool_down=0),
    )


class _Endless:
    num_problems: int | None = None

    def __init__(self) -> None:
        self._drawn = 0

    def next_problem(self) -> Problem:
        self._drawn += 1
        return Problem(str(self._drawn), "lab", "", "")
