"""Chains of rounds: the mechanics that every sampler but Never Give Up shares, so that a sampler is its rule alone.

A sampler built on this says how many rollouts a fresh problem gets, whether a problem passes by, and what becomes of a
chain whose round came back. Rounds that wait go before fresh problems, longest wait first: every rule here has a
bounded number of rounds, so they cannot crowd fresh problems out for long, and a chain that ends early is less stale.
"""

from collections import deque
from copy import copy
from typing import Annotated, Any

import msgspec

from samplers.base import Decision, Launch, Outcome, Problem, ProblemStream
from samplers.history import History, HistoryConfig, HistoryState
from samplers.intake import Intake, IntakeState
from samplers.rewards import all_equal, no_variance_reason

AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
AtLeast2 = Annotated[int, msgspec.Meta(ge=2)]
Frac = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Chain(msgspec.Struct, gc=False):
    """An open chain, now at round `round`, in flight unless `waiting` rollouts of that round are still to be launched.

    `rewards` and `correct` are those of all judged attempts in launch order.
    """

    chain_id: int
    problem: Problem
    waiting: int = 0
    round: int = 0
    rewards: tuple[float, ...] = ()
    correct: tuple[bool, ...] = ()


class RoundsState(msgspec.Struct, forbid_unknown_fields=True):
    chains: list[Chain]
    waiting: list[int]
    intake: IntakeState
    history: HistoryState
    rule: Any


class RoundsSampler:
    """Base of a sampler; a rule overrides `_size` and `_decide`, and the other hooks where it needs them."""

    def __init__(self, history: HistoryConfig, stream: ProblemStream):
        self._history = History(history, stream.num_problems)
        self._intake = Intake(stream, self._history)
        self._chains: dict[int, Chain] = {}
        self._waiting: deque[int] = deque()  # chains that wait for their next round, longest wait first

    # --- the rule ---

    def _size(self, problem: Problem) -> int:
        """Rollouts of a fresh problem's first round, at least 1."""
        raise NotImplementedError

    def _passes_by(self, problem: Problem) -> bool:
        """Whether the stream's offer of that problem is declined this time."""
        return False

    def _fresh(self, budget: int) -> list[Launch]:
        """First rounds until `budget` is used up; asked only for a budget above 0."""
        return self._intake.open_chains(budget, self._size, self._passes_by)

    def _decide(self, chain: Chain, outcome: Outcome) -> Decision | int:
        """What becomes of a chain whose round, already added to it, came back; a number asks for that many more."""
        raise NotImplementedError

    def _gauges(self) -> dict[str, float]:
        """What the rule adds to `stats`."""
        return {}

    def _rule_state(self) -> Any:
        """What the rule itself remembers; like `state` it stays as it is."""
        return None

    def _restore_rule(self, state: Any) -> None:
        """Take back what `_rule_state` gave, encoded and decoded or not."""

    # --- the sampler ---

    def propose(self, budget: int) -> list[Launch]:
        launches: list[Launch] = []
        while budget > 0 and self._waiting:
            chain = self._chains[self._waiting.popleft()]
            launches.append(self._intake.reopen(chain.chain_id, chain.round, chain.problem, chain.waiting))
            budget -= chain.waiting
            chain.waiting = 0
        if budget > 0:
            for launch in self._fresh(budget):
                self._chains[launch.chain_id] = Chain(launch.chain_id, launch.problem)
                launches.append(launch)
        return launches

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Raises ValueError if that round is not in flight."""
        chain = self._open_chain(outcome.chain_id)
        if chain.waiting or chain.round != outcome.round:
            raise ValueError(f"chain {outcome.chain_id} has no round {outcome.round} in flight")
        if not outcome.rewards:
            self._close(chain)
            return [Decision(chain.chain_id, "drop", "unverifiable")]
        chain.rewards += outcome.rewards
        chain.correct += outcome.correct
        self._history.observe(chain.problem.problem_id, outcome, max(outcome.rewards))
        ruling = self._decide(chain, outcome)
        if isinstance(ruling, int):
            chain.round += 1
            chain.waiting = ruling
            self._waiting.append(chain.chain_id)
            return [Decision(chain.chain_id, "retry", "retry")]
        self._close(chain)
        return [ruling]

    def abandon(self, chain_id: int) -> None:
        """Raises ValueError if that chain is not open."""
        chain = self._open_chain(chain_id)
        if chain.waiting:
            self._waiting.remove(chain_id)
        self._close(chain)

    def stats(self) -> dict[str, float]:
        open_chains, waiting = float(len(self._chains)), float(len(self._waiting))
        return {"open_chains": open_chains, "rounds_waiting": waiting, **self._history.stats(), **self._gauges()}

    def state(self) -> dict[str, object]:
        chains, waiting = [copy(chain) for chain in self._chains.values()], list(self._waiting)
        saved = RoundsState(chains, waiting, self._intake.state(), self._history.state(), self._rule_state())
        return msgspec.structs.asdict(saved)

    def restore(self, state: dict[str, object]) -> None:
        saved = msgspec.convert(state, RoundsState)
        self._chains = {chain.chain_id: copy(chain) for chain in saved.chains}
        self._waiting = deque(saved.waiting)
        self._intake.restore(saved.intake, (c.problem.problem_id for c in saved.chains))
        self._history.restore(saved.history)
        self._restore_rule(saved.rule)

    def _open_chain(self, chain_id: int) -> Chain:
        chain = self._chains.get(chain_id)
        if chain is None:
            raise ValueError(f"chain {chain_id} is not open; an outcome or abandon may end it only once")
        return chain

    def _close(self, chain: Chain) -> None:
        del self._chains[chain.chain_id]
        self._intake.close(chain.problem.problem_id)


def train_if_mixed(chain: Chain, outcome: Outcome) -> Decision:
    """All of a chain whose rewards differ is trained; without variance it is dropped, for what its last round shows."""
    if all_equal(chain.rewards):
        return Decision(chain.chain_id, "drop", no_variance_reason(outcome))
    return Decision(chain.chain_id, "train", "mixed", tuple(range(len(chain.rewards))))
