"""A fixed number of rollouts a problem: GRPO's group (arXiv 2402.03300), the baseline for every other sampler."""

from typing import Annotated

import msgspec

from samplers.base import Decision, Launch, Outcome, ProblemStream
from samplers.history import History, HistoryConfig, HistoryState
from samplers.intake import Intake, IntakeState
from samplers.rewards import all_equal, no_variance_reason


class FixedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """`num_rollouts` for each visit to a problem; groups whose rewards are all equal are dropped, not trained."""

    num_rollouts: Annotated[int, msgspec.Meta(ge=2)] = 8
    history: HistoryConfig = msgspec.field(default_factory=HistoryConfig)


class FixedState(msgspec.Struct, forbid_unknown_fields=True):
    open: list[tuple[int, str]]
    intake: IntakeState
    history: HistoryState


class FixedSampler:
    def __init__(self, config: FixedConfig, stream: ProblemStream, seed: int):
        """`seed` is unused: nothing here is drawn at random."""
        self._num_rollouts = config.num_rollouts
        self._history = History(config.history, stream.num_problems)
        self._intake = Intake(stream, self._history)
        self._open: dict[int, str] = {}

    def propose(self, budget: int) -> list[Launch]:
        launches = self._intake.open_chains(budget, self._num_rollouts)
        for launch in launches:
            self._open[launch.chain_id] = launch.problem.problem_id
        return launches

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Raises ValueError if that chain is not open."""
        problem_id = self._close(outcome.chain_id)
        if not outcome.rewards:
            return [Decision(outcome.chain_id, "drop", "unverifiable")]
        self._history.observe(problem_id, outcome)
        if all_equal(outcome.rewards):
            return [Decision(outcome.chain_id, "drop", no_variance_reason(outcome))]
        return [Decision(outcome.chain_id, "train", "mixed", tuple(range(len(outcome.rewards))))]

    def abandon(self, chain_id: int) -> None:
        """Raises ValueError if that chain is not open."""
        self._close(chain_id)

    def stats(self) -> dict[str, float]:
        return {"open_chains": float(len(self._open)), **self._history.stats()}

    def state(self) -> dict[str, object]:
        return msgspec.to_builtins(FixedState(list(self._open.items()), self._intake.state(), self._history.state()))

    def restore(self, state: dict[str, object]) -> None:
        saved = msgspec.convert(state, FixedState)
        self._open = dict(saved.open)
        self._intake.restore(saved.intake, self._open.values())
        self._history.restore(saved.history)

    def _close(self, chain_id: int) -> str:
        problem_id = self._open.pop(chain_id, None)
        if problem_id is None:
            raise ValueError(f"chain {chain_id} is not open; an outcome or abandon may end it only once")
        self._intake.close(problem_id)
        return problem_id
