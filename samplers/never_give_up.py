"""Never Give Up: keep sampling a problem until one rollout is right (arXiv 2609.13443).

A fresh problem gets `round_size` rollouts. If they teach something the chain is trained; if all are right it is
dropped; otherwise the problem waits for another round and its rollouts are kept, so that the group which is finally
trained holds the failures too. Acceptance, buffering and ageing follow the `ngu` branch of allenai/open-instruct;
doubling rounds, the attempt cap, the bounds on retries and the cap on failures are this project's.
"""

import math
from collections import deque
from typing import Annotated, Literal

import msgspec

from samplers.base import Decision, Launch, Outcome, Problem, ProblemStream
from samplers.coin import uniform
from samplers.history import History, HistoryConfig, HistoryState
from samplers.intake import Intake, IntakeState
from samplers.retention import kept_attempts
from samplers.rewards import exceeds, no_variance_reason

Count = Annotated[int, msgspec.Meta(ge=0)]
Frac = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class NeverGiveUpHistoryConfig(HistoryConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    __doc__ = HistoryConfig.__doc__

    cool_down: Count = 1  # on by default: retries spend on hard problems what solved ones should not use up


class NeverGiveUpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="never_give_up"):
    """Keep going until one is right.

    A problem starts with `round_size` rollouts; a chain ends at `max_attempts` (0 = no limit). `retry`: "doubling"
    always retries and doubles the chain's total (4, 4, 8, 16, 32 up to 64); "probability" retries with `round_size`
    more, each time with probability `p_ngu` (published: 0.75 to 0.95, with max_attempts = 0).
    `accept` says when a chain whose rewards differ is trained. "better": a later round must beat the chain's best;
    "different": any difference will do; "solved": a rollout reaches `max_reward`; "history": it reaches `max_reward`
    or beats the best ever seen on the problem.
    Of an accepted chain all successes are trained and the last `keep_failures` failures (0 = all), leaving out rounds
    older than `keep_versions` policy versions (-1 = none; published: 4).
    Retries take up to `max_retry_frac` of the rollouts in flight, and the rest when there is no fresh problem. While
    `max_waiting` chains wait for a retry no further problem is retried: a policy that fails at almost everything asks
    for more retries than the share can serve, and the line, with all the rollouts it holds, would grow without end.
    """

    round_size: Annotated[int, msgspec.Meta(ge=1)] = 4
    retry: Literal["doubling", "probability"] = "doubling"
    p_ngu: Frac = 0.875
    max_attempts: Count = 64
    accept: Literal["better", "different", "solved", "history"] = "better"
    max_reward: float = 1.0
    keep_failures: Count = 8
    keep_versions: Annotated[int, msgspec.Meta(ge=-1)] = -1
    max_retry_frac: Frac = 0.75
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] = 512
    history: NeverGiveUpHistoryConfig = msgspec.field(default_factory=NeverGiveUpHistoryConfig)

    def __post_init__(self):
        if not math.isfinite(self.max_reward):
            raise ValueError("max_reward must be finite: it is the reward of a solved problem")
        endless = self.retry == "doubling" or self.p_ngu == 1.0
        if self.max_attempts == 0 and endless:
            raise ValueError("max_attempts must be above 0, or an unsolvable problem would be sampled for ever")
        if 0 < self.max_attempts < self.round_size:
            raise ValueError("max_attempts must be at least round_size")


class Chain(msgspec.Struct, gc=False):
    """An open chain, now at round `round`: `in_flight` rollouts of it are out, or `waiting` ones are to be launched.

    The other of the two is 0. `rewards` are those of all judged attempts in launch order.
    """

    chain_id: int
    problem: Problem
    in_flight: int
    waiting: int = 0
    round: int = 0
    num_launched: int = 0
    rewards: list[float] = []
    round_sizes: list[int] = []
    oldest_versions: list[int] = []
    best: float | None = None
    worst: float | None = None

    def add(self, outcome: Outcome) -> None:
        self.rewards.extend(outcome.rewards)
        self.round_sizes.append(len(outcome.rewards))
        self.oldest_versions.append(outcome.oldest_version)
        best, worst = max(outcome.rewards), min(outcome.rewards)
        self.best = best if self.best is None else max(best, self.best)
        self.worst = worst if self.worst is None else min(worst, self.worst)

    @property
    def has_variance(self) -> bool:
        return self.best is not None and self.worst is not None and exceeds(self.best, self.worst)


class NeverGiveUpState(msgspec.Struct, forbid_unknown_fields=True):
    chains: list[Chain]
    retries: list[int]
    intake: IntakeState
    history: HistoryState


class NeverGiveUpSampler:
    def __init__(self, config: NeverGiveUpConfig, stream: ProblemStream, seed: int):
        self._config = config
        self._seed = seed
        self._history = History(config.history, stream.num_problems)
        self._intake = Intake(stream, self._history)
        self._chains: dict[int, Chain] = {}
        self._retries: deque[int] = deque()  # chains that wait for their next round, longest wait first
        self._in_flight = 0
        self._retries_in_flight = 0

    def propose(self, budget: int) -> list[Launch]:
        """Retries, longest wait first, up to their share; then fresh problems; then, if those ran out, retries again.

        The share is `max_retry_frac` of what will be in flight: in flight now plus `budget`. A retry that does not fit
        waits, and no other passes it; one larger than the whole share goes when no retry is in flight. So fresh
        problems find room whatever waits, and every retry gets its turn.
        """
        share = self._config.max_retry_frac * (self._in_flight + budget)
        launches: list[Launch] = []
        while budget > 0 and self._retries and self._fits(self._chains[self._retries[0]].waiting, share):
            budget -= self._launch_retry(launches)
        if budget > 0:
            for launch in self._intake.open_chains(budget, lambda _: self._config.round_size):
                self._launched(Chain(launch.chain_id, launch.problem, launch.num_rollouts))
                launches.append(launch)
                budget -= launch.num_rollouts
        while budget > 0 and self._retries:
            budget -= self._launch_retry(launches)
        return launches

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Raises ValueError if that round is not in flight."""
        chain = self._chains.get(outcome.chain_id)
        if chain is None or not chain.in_flight or chain.round != outcome.round:
            raise ValueError(f"chain {outcome.chain_id} has no round {outcome.round} in flight")
        self._landed(chain)
        if not outcome.rewards:
            self._close(chain)
            return [Decision(chain.chain_id, "drop", "unverifiable")]
        bar = self._bar(chain)
        chain.add(outcome)
        self._history.observe(chain.problem.problem_id, outcome)
        decision = self._decide(chain, outcome, bar)
        if decision.action == "retry":
            chain.round += 1
            self._retries.append(chain.chain_id)
        else:
            self._close(chain)
        return [decision]

    def abandon(self, chain_id: int) -> None:
        """Raises ValueError if that chain is not open."""
        chain = self._chains.get(chain_id)
        if chain is None:
            raise ValueError(f"chain {chain_id} is not open; it may be abandoned only once")
        if chain.waiting:
            self._retries.remove(chain_id)
        else:
            self._landed(chain)
        self._close(chain)

    def stats(self) -> dict[str, float]:
        return {
            "open_chains": float(len(self._chains)),
            "retries_waiting": float(len(self._retries)),
            "retry_frac_in_flight": self._retries_in_flight / self._in_flight if self._in_flight else 0.0,
            **self._history.stats(),
        }

    def state(self) -> dict[str, object]:
        chains, retries = list(self._chains.values()), list(self._retries)
        return msgspec.to_builtins(NeverGiveUpState(chains, retries, self._intake.state(), self._history.state()))

    def restore(self, state: dict[str, object]) -> None:
        saved = msgspec.convert(state, NeverGiveUpState)
        self._chains = {chain.chain_id: chain for chain in saved.chains}
        self._retries = deque(saved.retries)
        self._in_flight = sum(c.in_flight for c in saved.chains)
        self._retries_in_flight = sum(c.in_flight for c in saved.chains if c.round)
        self._intake.restore(saved.intake, (c.problem.problem_id for c in saved.chains))
        self._history.restore(saved.history)

    # --- deciding ---

    def _bar(self, chain: Chain) -> float | None:
        """What the round that just landed has to beat, before it is recorded; None if it is the first to count."""
        if self._config.accept == "history" and (record := self._history.get(chain.problem.problem_id)) is not None:
            return record.best_reward
        return chain.best

    def _decide(self, chain: Chain, outcome: Outcome, bar: float | None) -> Decision:
        if chain.has_variance and self._accepts(max(outcome.rewards), bar):
            ages = [outcome.learner_version - version for version in chain.oldest_versions]
            config = self._config
            keep = kept_attempts(chain.rewards, chain.round_sizes, ages, config.keep_failures, config.keep_versions)
            return Decision(chain.chain_id, "train", "improved" if chain.round else "mixed", keep)
        if chain.best is not None and self._reaches_max(chain.best):
            return Decision(chain.chain_id, "drop", "solved")
        chain.waiting = self._next_round_size(chain)
        if chain.waiting:
            return Decision(chain.chain_id, "retry", "retry")
        first_without_variance = chain.round == 0 and not chain.has_variance
        return Decision(chain.chain_id, "drop", no_variance_reason(outcome) if first_without_variance else "gave_up")

    def _accepts(self, best_of_round: float, bar: float | None) -> bool:
        """Whether a chain whose rewards differ is trained now.

        While no round was accepted, "different" has seen equal rewards only, so any difference in the chain is one of
        this round: the published rule (std != 0 or max != best) needs no test of its own.
        """
        beats_bar = bar is None or exceeds(best_of_round, bar)
        match self._config.accept:
            case "better":
                return beats_bar
            case "different":
                return True
            case "solved":
                return self._reaches_max(best_of_round)
            case "history":
                return beats_bar or self._reaches_max(best_of_round)

    def _reaches_max(self, reward: float) -> bool:
        return not exceeds(self._config.max_reward, reward)

    def _next_round_size(self, chain: Chain) -> int:
        """Rollouts of the next round; 0 gives up. A full line turns away new chains only: who was let in is served."""
        config = self._config
        if chain.round == 0 and len(self._retries) >= config.max_waiting:
            return 0
        if config.retry == "doubling":
            size = chain.num_launched
        else:
            size = config.round_size if uniform(self._seed, chain.chain_id, chain.round) < config.p_ngu else 0
        return min(size, config.max_attempts - chain.num_launched) if config.max_attempts else size

    # --- what is out ---

    def _fits(self, num_rollouts: int, share: float) -> bool:
        return self._retries_in_flight + num_rollouts <= share or (share > 0 and not self._retries_in_flight)

    def _launch_retry(self, launches: list[Launch]) -> int:
        """Launch the retry that has waited longest; its number of rollouts."""
        chain = self._chains[self._retries.popleft()]
        chain.in_flight, chain.waiting = chain.waiting, 0
        self._launched(chain)
        launches.append(self._intake.reopen(chain.chain_id, chain.round, chain.problem, chain.in_flight))
        return chain.in_flight

    def _launched(self, chain: Chain) -> None:
        self._chains[chain.chain_id] = chain
        chain.num_launched += chain.in_flight
        self._in_flight += chain.in_flight
        if chain.round:
            self._retries_in_flight += chain.in_flight

    def _landed(self, chain: Chain) -> None:
        self._in_flight -= chain.in_flight
        if chain.round:
            self._retries_in_flight -= chain.in_flight
        chain.in_flight = 0

    def _close(self, chain: Chain) -> None:
        del self._chains[chain.chain_id]
        self._intake.close(chain.problem.problem_id)
