"""Fresh problems from the stream, and the numbering of chains and launches."""

from collections.abc import Callable, Iterable

import msgspec

from samplers.base import Launch, Problem, ProblemStream
from samplers.history import History


class IntakeState(msgspec.Struct):
    next_chain_id: int
    next_ticket: int


class Intake:
    """Opens chains on problems that are neither pending (in an open chain) nor cooling down nor retired.

    A search passes by at most `num_problems` problems a call, so that one which finds everything pending or cooling
    ends. Cooling down is a preference: while no chain is open at all, the problem nearest to its end is taken, or the
    run would wait for ever. So an empty answer with nothing open means that (nearly) every problem is retired.
    """

    def __init__(self, stream: ProblemStream, history: History):
        self._stream = stream
        self._history = history
        self._pending: set[str] = set()
        self._next_chain_id = 0
        self._next_ticket = 0

    def open_chains(
        self, budget: int, size: Callable[[Problem], int], passes_by: Callable[[Problem], bool] | None = None
    ) -> list[Launch]:
        """First rounds of `size(problem)` rollouts until `budget` is used up or no problem is found.

        A problem that `passes_by` declines waits for the stream's next offer. That is a preference too: with no chain
        open it is taken all the same, before any that cools down.
        """
        launches: list[Launch] = []
        next_problem, pending, records = self._stream.next_problem, self._pending, self._history.records
        num_problems = self._stream.num_problems
        # An endless stream repeats nothing, so only a broken one could show pending problems over and over.
        skips_left = len(pending) + 1 if num_problems is None else num_problems
        num_free = budget if num_problems is None else self._num_free(num_problems)
        nearest: Problem | None = None
        nearest_skips = 0
        while budget > 0 and skips_left > 0 and num_free > 0:
            problem = next_problem()
            problem_id = problem.problem_id
            record = records.get(problem_id)
            is_due = (record is None or not (record.skips_left or record.retired)) and problem_id not in pending
            if is_due and (passes_by is None or not passes_by(problem)):
                launches.append(launch := self._open(problem, size(problem)))
                budget -= launch.num_rollouts
                num_free -= 1
                continue
            skips_left -= 1
            if is_due and (nearest is None or nearest_skips > 0):
                nearest, nearest_skips = problem, 0
            elif record is not None and record.skips_left > 0 and not record.retired:
                skips = self._history.pass_by(problem_id)
                if nearest is None or skips < nearest_skips:
                    nearest, nearest_skips = problem, skips
        if nearest is not None and not pending and budget > 0:
            launches.append(self._open(nearest, size(nearest)))
        return launches

    def reopen(self, chain_id: int, round: int, problem: Problem, num_rollouts: int, num_resumed: int = 0) -> Launch:
        """Another round of an open chain."""
        launch = Launch(chain_id, round, problem, num_rollouts, self._next_ticket, num_resumed)
        self._next_ticket += 1
        return launch

    def hold(self, problem_ids: Iterable[str]) -> None:
        """Count problems as pending that a restored sampler has drawn and not launched yet."""
        self._pending.update(problem_ids)

    def close(self, problem_id: str) -> None:
        """Its chain ended: the problem may be launched again."""
        self._pending.remove(problem_id)

    def state(self) -> IntakeState:
        return IntakeState(self._next_chain_id, self._next_ticket)

    def restore(self, state: IntakeState, pending: Iterable[str]) -> None:
        self._next_chain_id = state.next_chain_id
        self._next_ticket = state.next_ticket
        self._pending = set(pending)

    def _open(self, problem: Problem, num_rollouts: int) -> Launch:
        chain_id, ticket = self._next_chain_id, self._next_ticket
        self._pending.add(problem.problem_id)
        self._next_chain_id, self._next_ticket = chain_id + 1, ticket + 1
        return Launch(chain_id, 0, problem, num_rollouts, ticket)

    def _num_free(self, num_problems: int) -> int:
        """At least how many problems are neither pending nor retired (one may be both: retired in its last round)."""
        return num_problems - len(self._pending) - self._history.num_retired
