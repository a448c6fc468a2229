"""What a simulation is asked: where the rollouts went, what they taught, and how far the policy came."""

from collections import Counter

import msgspec
import numpy as np

from bench.lab.chain import Chain
from bench.lab.config import LabConfig
from bench.lab.policy import Policy
from bench.lab.population import Array, Population, difficulty_index, difficulty_name
from samplers.base import Decision, Launch


class Point(msgspec.Struct, frozen=True):
    """The policy after `step` steps. `tests_passed_frac` is the mean share of rungs climbed."""

    step: int
    rollouts: int
    seconds: float
    pass_rate: float
    hard_pass_rate: float | None
    pass_at_8: float
    tests_passed_frac: float
    solved: int


class Bin(msgspec.Struct, frozen=True):
    """Visits to problems whose pass rate, when the chain was opened, lay in one interval.

    `weight` is the mean over visits of sum_i u_i A_i (r_i/p - (1-r_i)/(1-p)): the w(p) of E[sum_i u_i A_i s_i] =
    w(p) grad p, with u_i the weight that the loss aggregation gives a rollout. `signal_to_noise` is per rollout:
    E[G]^2 / ((Var G + E[sum_i (u_i A_i)^2]) E[N]) with G = sum_i u_i A_i (r_i - p). The first noise is that of what
    points along the problem's own gradient, the second that of all other directions, where every score is taken to
    have length 1.
    """

    difficulty: str
    pass_rate: float
    visits: int
    trained: int
    rollouts: int
    weight: float
    weight_se: float
    signal_to_noise: float


class Report(msgspec.Struct, frozen=True):
    """One simulation. `time_to_solve_*` is the mean over problems until the first right rollout, where those that were
    never solved count the whole simulation. `hard_pass_rate_area` is the mean of the hard pass rate over the rollouts
    spent; None without hard problems. `wasted_*_frac` are shares of the judged rollouts that belong to chains dropped
    without a right or without a wrong one, `trained_frac` the share that was trained.
    """

    seed: int
    rollouts: int
    tokens: int
    seconds: float
    steps: int
    groups: int
    stale_groups: int
    num_problems: int
    num_hard: int
    visited: int
    solved: int
    hard_solved: int
    time_to_solve_s: float
    time_to_solve_rollouts: float
    hard_time_to_solve_s: float | None
    hard_time_to_solve_rollouts: float | None
    wasted_right_frac: float
    wasted_wrong_frac: float
    trained_frac: float
    groups_after_retry_frac: float
    groups_with_right_frac: float
    lag_mean: float
    pass_rate_area: float
    hard_pass_rate_area: float | None
    decisions: dict[str, int]
    levels: dict[str, dict[str, int]]
    bins: list[Bin]
    curve: list[Point]

    @property
    def end(self) -> Point:
        return self.curve[-1]


class _Sums:
    """Over the chains of one difficulty that have come to their end."""

    def __init__(self) -> None:
        self.pass_rates, self.rollouts, self.trained, self.noise = 0.0, 0, 0, 0.0
        self.weights: list[float] = []
        self.signals: list[float] = []

    def add(self, chain: Chain, advantages: Array | None, top: int) -> None:
        p = chain.pass_rate
        self.pass_rates += p
        self.rollouts += len(chain.rungs)
        if advantages is None:
            self.weights.append(0.0)
            self.signals.append(0.0)
            return
        right = np.array([chain.rungs[i] == top for i in chain.keep])
        signal = float((advantages * (right - p)).sum())
        self.trained += 1
        self.noise += float((advantages**2).sum())
        self.signals.append(signal)
        self.weights.append(signal / (p * (1 - p)))

    def bin(self, difficulty: str) -> Bin:
        n = len(self.weights)
        noise = (float(np.var(self.signals)) + self.noise / n) * self.rollouts / n
        return Bin(
            difficulty=difficulty,
            pass_rate=self.pass_rates / n,
            visits=n,
            trained=self.trained,
            rollouts=self.rollouts,
            weight=float(np.mean(self.weights)),
            weight_se=float(np.std(self.weights)) / n**0.5,
            signal_to_noise=float(np.mean(self.signals)) ** 2 / noise if noise > 0 else 0.0,
        )


class Tally:
    def __init__(self, config: LabConfig, population: Population):
        self._seed, self._population = config.seed, population
        self._hard = population.pass_rates < config.lab.hard_below
        num_problems = len(population.problems)
        self.launched = 0
        self._tokens = self._judged = self._steps = self._groups = self._stale = self._kept = 0
        self._wasted_right = self._wasted_wrong = self._after_retry = self._with_right = 0
        self._lags = 0
        self._launched_by_problem = np.zeros(num_problems, dtype=np.int64)
        self._trained_by_problem = np.zeros(num_problems, dtype=np.int64)
        self._solved_s = np.full(num_problems, np.inf)
        self._solved_rollouts = np.full(num_problems, np.inf)
        self._decisions: Counter[str] = Counter()
        self._bins: dict[int, _Sums] = {}
        self._curve: list[Point] = []

    def launch(self, index: int, launch: Launch) -> None:
        self.launched += launch.num_rollouts
        self._launched_by_problem[index] += launch.num_rollouts

    def finish_round(self, index: int, num_tokens: int, any_right: bool, now: float) -> None:
        self._tokens += num_tokens
        if any_right and self._solved_s[index] == np.inf:
            self._solved_s[index], self._solved_rollouts[index] = now, self.launched

    def decide(self, decision: Decision) -> None:
        self._decisions[decision.reason] += 1

    def drop(self, chain: Chain, top: int) -> None:
        num_right = sum(rung == top for rung in chain.rungs)
        if num_right == len(chain.rungs):
            self._wasted_right += num_right
        elif num_right == 0:
            self._wasted_wrong += len(chain.rungs)
        self._end(chain, None, top)

    def stale(self, chain: Chain) -> None:
        """Left out by the rule at consumption; it says nothing of what the sampler's groups teach."""
        self._stale += 1
        self._judged += len(chain.rungs)

    def train(self, chain: Chain, advantages: Array, version: int, top: int) -> None:
        """`advantages` [K] of the kept rollouts, times their loss weights; `version` before the step."""
        self._groups += 1
        self._kept += len(chain.keep)
        self._after_retry += len(chain.round_sizes) > 1
        self._with_right += any(chain.rungs[i] == top for i in chain.keep)
        self._lags += sum(version - chain.versions[i] for i in chain.keep)
        self._trained_by_problem[chain.index] += len(chain.keep)
        self._end(chain, advantages, top)

    def _end(self, chain: Chain, advantages: Array | None, top: int) -> None:
        self._judged += len(chain.rungs)
        difficulty = int(difficulty_index(np.array([chain.pass_rate]))[0])
        self._bins.setdefault(difficulty, _Sums()).add(chain, advantages, top)

    def evaluate(self, policy: Policy, step: int, now: float) -> None:
        """Record the policy as it is: its rates are known, so there is no evaluation noise."""
        rates = policy.rates(slice(None))
        passed, hard = rates[:, -1], self._hard
        point = Point(
            step=step,
            rollouts=self.launched,
            seconds=now,
            pass_rate=float(passed.mean()),
            hard_pass_rate=float(passed[hard].mean()) if hard.any() else None,
            pass_at_8=float((1 - (1 - passed) ** 8).mean()),
            tests_passed_frac=float((rates @ np.arange(rates.shape[1])).mean()) / (rates.shape[1] - 1),
            solved=int(np.isfinite(self._solved_s).sum()),
        )
        self._steps = step
        if self._curve and self._curve[-1].rollouts == point.rollouts:
            self._curve.pop()
        self._curve.append(point)

    def report(self, now: float) -> Report:
        hard, judged, groups = self._hard, max(self._judged, 1), max(self._groups, 1)
        seconds, rollouts = np.minimum(self._solved_s, now), np.minimum(self._solved_rollouts, self.launched)
        solved = np.isfinite(self._solved_s)
        return Report(
            seed=self._seed,
            rollouts=self.launched,
            tokens=self._tokens,
            seconds=now,
            steps=self._steps,
            groups=self._groups,
            stale_groups=self._stale,
            num_problems=len(hard),
            num_hard=int(hard.sum()),
            visited=int((self._launched_by_problem > 0).sum()),
            solved=int(solved.sum()),
            hard_solved=int((solved & hard).sum()),
            time_to_solve_s=float(seconds.mean()),
            time_to_solve_rollouts=float(rollouts.mean()),
            hard_time_to_solve_s=float(seconds[hard].mean()) if hard.any() else None,
            hard_time_to_solve_rollouts=float(rollouts[hard].mean()) if hard.any() else None,
            wasted_right_frac=self._wasted_right / judged,
            wasted_wrong_frac=self._wasted_wrong / judged,
            trained_frac=self._kept / judged,
            groups_after_retry_frac=self._after_retry / groups,
            groups_with_right_frac=self._with_right / groups,
            lag_mean=self._lags / max(self._kept, 1),
            pass_rate_area=self._area([p.pass_rate for p in self._curve]),
            hard_pass_rate_area=self._area([p.hard_pass_rate or 0.0 for p in self._curve]) if hard.any() else None,
            decisions=dict(sorted(self._decisions.items())),
            levels=self._levels(),
            bins=[self._bins[i].bin(difficulty_name(i)) for i in sorted(self._bins)],
            curve=self._curve,
        )

    def _area(self, values: list[float]) -> float:
        """The mean of a curve over the rollouts spent, by trapezoids."""
        spent = [p.rollouts for p in self._curve]
        return float(np.trapezoid(values, spent)) / spent[-1] if spent[-1] else values[0]

    def _levels(self) -> dict[str, dict[str, int]]:
        levels: dict[str, dict[str, int]] = {}
        for problem, launched, trained, solved_s in zip(
            self._population.problems, self._launched_by_problem, self._trained_by_problem, self._solved_s, strict=True
        ):
            level = levels.setdefault(problem.level, {"problems": 0, "launched": 0, "trained": 0, "solved": 0})
            level["problems"] += 1
            level["launched"] += int(launched)
            level["trained"] += int(trained)
            level["solved"] += bool(np.isfinite(solved_s))
        return dict(sorted(levels.items()))
