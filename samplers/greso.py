"""GRESO (arXiv 2506.02177): problems that taught nothing of late are skipped before a rollout is spent on them."""

from copy import copy
from typing import Annotated, Any

import msgspec

from samplers.base import Decision, Outcome, Problem, ProblemStream
from samplers.coin import uniform
from samplers.history import HistoryConfig
from samplers.rewards import all_equal
from samplers.rounds import AtLeast1, AtLeast2, Chain, Frac, RoundsSampler, train_if_mixed


class GresoConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="greso"):
    """`num_rollouts` a visit; after z visits in a row without variance the next offer is taken with probability
    max(p^z, `min_explore`).

    There is a p for problems that were all right and one for all the others, both `p_start` at first. After every
    `adjust_every` visits each moves by `step`: down when the share of its kind among them is above its target, else
    up. The targets are `target_easy` and `target_hard`. Published: p_start 0.5, step and min_explore 0.01, a target of
    0.25 in all, one third easy and two thirds hard; the paper adjusts after a batch, `adjust_every` is ours. An
    endless stream never offers a problem again, so nothing is skipped there.
    Cost: `num_rollouts` a visit; a skipped offer is free.
    """

    num_rollouts: AtLeast2 = 8
    p_start: Frac = 0.5
    step: Frac = 0.01
    min_explore: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.01
    target_easy: Frac = 0.25 / 3
    target_hard: Frac = 0.5 / 3
    adjust_every: AtLeast1 = 64
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)


class Side(msgspec.Struct):
    """One kind of group without variance: the p that skips it and how many came since p was last adjusted."""

    p: float
    seen: int = 0

    def adjust(self, num_visits: int, target: float, step: float) -> None:
        moved = self.p - step if self.seen > target * num_visits else self.p + step
        self.p = min(max(moved, 0.0), 1.0)
        self.seen = 0


class Streak(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Visits in a row without variance, all of the same kind."""

    is_easy: bool
    length: int


class GresoState(msgspec.Struct):
    easy: Side
    hard: Side
    streaks: dict[str, Streak]
    visits: int = 0
    offers: int = 0


class GresoSampler(RoundsSampler):
    def __init__(self, config: GresoConfig, stream: ProblemStream, seed: int):
        super().__init__(config.history, stream)
        self._config, self._seed = config, seed
        self._remembers = stream.num_problems is not None
        self._state = GresoState(Side(config.p_start), Side(config.p_start), {})

    def _size(self, problem: Problem) -> int:
        return self._config.num_rollouts

    def _passes_by(self, problem: Problem) -> bool:
        streak = self._state.streaks.get(problem.problem_id)
        if streak is None:
            return False
        self._state.offers += 1
        p = self._side(streak.is_easy).p
        return uniform(self._seed, self._state.offers) >= max(p**streak.length, self._config.min_explore)

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision:
        self._count(chain.problem.problem_id, all_equal(outcome.rewards), all(outcome.correct))
        return train_if_mixed(chain, outcome)

    def _count(self, problem_id: str, no_variance: bool, is_easy: bool) -> None:
        state, config = self._state, self._config
        if no_variance:
            self._side(is_easy).seen += 1
        if not no_variance:
            state.streaks.pop(problem_id, None)
        elif self._remembers:
            last = state.streaks.get(problem_id)
            length = last.length + 1 if last is not None and last.is_easy == is_easy else 1
            state.streaks[problem_id] = Streak(is_easy, length)
        state.visits += 1
        if state.visits == config.adjust_every:
            state.easy.adjust(state.visits, config.target_easy, config.step)
            state.hard.adjust(state.visits, config.target_hard, config.step)
            state.visits = 0

    def _side(self, is_easy: bool) -> Side:
        return self._state.easy if is_easy else self._state.hard

    def _gauges(self) -> dict[str, float]:
        return {"p_easy": self._state.easy.p, "p_hard": self._state.hard.p}

    def _rule_state(self) -> Any:
        state = self._state
        return GresoState(copy(state.easy), copy(state.hard), dict(state.streaks), state.visits, state.offers)

    def _restore_rule(self, state: Any) -> None:
        saved = msgspec.convert(state, GresoState)
        streaks = dict(saved.streaks)
        self._state = GresoState(copy(saved.easy), copy(saved.hard), streaks, saved.visits, saved.offers)
