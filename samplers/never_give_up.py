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
from samplers.retention import kept_at_any_age, kept_attempts
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
    A retry first goes on with the rollouts of the last round that their length cut off, each by another
    sampling.max_new_tokens until it has `seq_multiplier` times as many (1 = never), and draws the rest anew. Until it
    ends such a rollout is neither among the failures nor in the baseline, and it counts once against `max_attempts`.
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
    seq_multiplier: Annotated[int, msgspec.Meta(ge=1)] = 1
    history: NeverGiveUpHistoryConfig = msgspec.field(default_factory=NeverGiveUpHistoryConfig)

    def __post_init__(self):
        if not math.isfinite(self.max_reward):
            raise ValueError("max_reward must be finite: it is the reward of a solved problem")
        endless = self.retry == "doubling" or self.p_ngu == 1.0
        if self.max_attempts == 0 and endless:
            raise ValueError("max_attempts must be above 0, or an unsolvable problem would be sampled for ever")
        if 0 < self.max_attempts < self.round_size:
            raise ValueError("max_attempts must be at least round_size")
        if self.round_size == 1 and self.max_retry_frac == 0.0:
            # One rollout alone has no variance to learn from, and no retry would run while fresh problems last.
            raise ValueError("round_size 1 needs max_retry_frac above 0, or nothing would ever be trained")


class Past(msgspec.Struct, frozen=True, gc=False):
    """What a chain that waits or was launched again has behind it.

    `rewards` of all judged attempts in launch order, [N]; `round_sizes`, which sum to N, and `oldest_versions` have one
    entry a round; `best` and `worst` are those of `rewards`, -inf and inf if all that was judged goes on.
    """

    num_launched: int
    rewards: tuple[float, ...]
    round_sizes: tuple[int, ...]
    oldest_versions: tuple[int, ...]
    best: float
    worst: float

    def plus(self, num_launched: int, outcome: Outcome, best: float, worst: float) -> "Past":
        return Past(
            self.num_launched + num_launched,
            self.rewards + outcome.rewards,
            (*self.round_sizes, len(outcome.rewards)),
            (*self.oldest_versions, outcome.oldest_version),
            self.best if self.best > best else best,
            self.worst if self.worst < worst else worst,
        )

    def without(self, indices: tuple[int, ...]) -> "Past":
        """As if these attempts of the last round had not been judged; a round that is empty then is none."""
        gone = set(indices)
        rewards = tuple(r for i, r in enumerate(self.rewards) if i not in gone)
        left = self.round_sizes[-1] - len(gone)
        sizes, versions = self.round_sizes[:-1], self.oldest_versions[:-1]
        if left:
            sizes, versions = (*sizes, left), (*versions, self.oldest_versions[-1])
        best, worst = max(rewards, default=-math.inf), min(rewards, default=math.inf)
        return Past(self.num_launched, rewards, sizes, versions, best, worst)


class Retry(msgspec.Struct, frozen=True, gc=False):
    """Another round of `num_rollouts` that waits to be launched; the first `num_resumed` go on with earlier ones."""

    chain_id: int
    round: int
    problem: Problem
    num_rollouts: int
    num_resumed: int = 0


class NeverGiveUpState(msgspec.Struct, forbid_unknown_fields=True):
    in_flight: list[Launch]
    retries: list[Retry]
    pasts: dict[int, Past]
    intake: IntakeState
    history: HistoryState


class NeverGiveUpSampler:
    def __init__(self, config: NeverGiveUpConfig, stream: ProblemStream, seed: int):
        self._config = config
        self._seed = seed
        self._history = History(config.history, stream.num_problems)
        self._intake = Intake(stream, self._history)
        # An open chain is either in flight, as the launch of its present round, or waits for its next one. Most chains
        # end with their first round and have no past, so for them nothing else is ever made.
        self._in_flight: dict[int, Launch] = {}
        self._retries: deque[Retry] = deque()  # longest wait first
        self._pasts: dict[int, Past] = {}
        self._num_in_flight = 0
        self._num_retried = 0  # of those in flight

    def propose(self, budget: int) -> list[Launch]:
        """Retries, longest wait first, up to their share; then fresh problems; then, if those ran out, retries again.

        The share is `max_retry_frac` of what will be in flight: in flight now plus `budget`. A retry that does not fit
        waits, and no other passes it; one larger than the whole share goes when no retry is in flight. So fresh
        problems find room whatever waits, and every retry gets its turn.
        """
        share = self._config.max_retry_frac * (self._num_in_flight + budget)
        launches: list[Launch] = []
        while budget > 0 and self._retries and self._fits(self._retries[0].num_rollouts, share):
            budget -= self._launch_retry(launches)
        if budget > 0:
            round_size = self._config.round_size
            fresh = self._intake.open_chains(budget, lambda _: round_size)
            for launch in fresh:
                self._in_flight[launch.chain_id] = launch
            self._num_in_flight += round_size * len(fresh)
            budget -= round_size * len(fresh)
            launches += fresh
        while budget > 0 and self._retries:
            budget -= self._launch_retry(launches)
        return launches

    def observe(self, outcome: Outcome) -> list[Decision]:
        """Raises ValueError if that round is not in flight."""
        chain_id = outcome.chain_id
        launch = self._in_flight.get(chain_id)
        if launch is None or launch.round != outcome.round:
            raise ValueError(f"chain {chain_id} has no round {outcome.round} in flight")
        past = self._landed(launch)
        problem_id, rewards = launch.problem.problem_id, outcome.rewards
        if not rewards:
            self._intake.close(problem_id)
            return [Decision(chain_id, "drop", "unverifiable")]
        ordered = sorted(rewards)  # quicker than a minimum and a maximum
        worst, best = ordered[0], ordered[-1]
        bar = past.best if past is not None and past.rewards else None
        if self._config.accept == "history":
            bar = self._best_ever(problem_id, bar)
        self._history.observe(problem_id, outcome, best)
        num_judged, num_new = len(rewards), launch.num_rollouts - launch.num_resumed
        if past is None:
            chain = Past(num_new, rewards, (num_judged,), (outcome.oldest_version,), best, worst)
        else:
            chain = past.plus(num_new, outcome, best, worst)
        resume = self._resumable(chain, outcome) if self._config.seq_multiplier > 1 else ()
        ruling = self._decide(chain, outcome, best, bar, len(resume))
        if isinstance(ruling, Decision):
            self._intake.close(problem_id)
            return [ruling]
        if resume:
            self._history.withdraw(problem_id, len(resume))
            chain = chain.without(resume)
        self._pasts[chain_id] = chain
        self._retries.append(Retry(chain_id, outcome.round + 1, launch.problem, ruling, len(resume)))
        return [Decision(chain_id, "retry", "retry", resume=resume)]

    def abandon(self, chain_id: int) -> None:
        """Raises ValueError if that chain is not open."""
        launch = self._in_flight.get(chain_id)
        if launch is not None:
            self._landed(launch)
            self._intake.close(launch.problem.problem_id)
            return
        for retry in self._retries:
            if retry.chain_id == chain_id:
                break
        else:
            raise ValueError(f"chain {chain_id} is not open; it may be abandoned only once")
        self._retries.remove(retry)
        del self._pasts[chain_id]
        self._intake.close(retry.problem.problem_id)

    def stats(self) -> dict[str, float]:
        return {
            "open_chains": float(len(self._in_flight) + len(self._retries)),
            "retries_waiting": float(len(self._retries)),
            "retry_frac_in_flight": self._num_retried / self._num_in_flight if self._num_in_flight else 0.0,
            **self._history.stats(),
        }

    def state(self) -> dict[str, object]:
        in_flight, retries = list(self._in_flight.values()), list(self._retries)
        saved = NeverGiveUpState(in_flight, retries, dict(self._pasts), self._intake.state(), self._history.state())
        return msgspec.structs.asdict(saved)

    def restore(self, state: dict[str, object]) -> None:
        saved = msgspec.convert(state, NeverGiveUpState)
        self._in_flight = {launch.chain_id: launch for launch in saved.in_flight}
        self._retries = deque(saved.retries)
        self._pasts = dict(saved.pasts)
        self._num_in_flight = sum(x.num_rollouts for x in saved.in_flight)
        self._num_retried = sum(x.num_rollouts for x in saved.in_flight if x.round)
        self._intake.restore(saved.intake, (x.problem.problem_id for x in (*saved.in_flight, *saved.retries)))
        self._history.restore(saved.history)

    # --- deciding ---

    def _best_ever(self, problem_id: str, bar: float | None) -> float | None:
        """The best reward of all visits; a stream without end remembers none but this one's `bar`."""
        record = self._history.records.get(problem_id)
        return bar if record is None else record.best_reward

    def _resumable(self, chain: Past, outcome: Outcome) -> tuple[int, ...]:
        """Which rollouts of the chain's last round were cut off, are not right so far and may become longer."""
        first = len(chain.rewards) - len(outcome.rewards)
        rollouts = enumerate(zip(outcome.truncated, outcome.correct, outcome.lengths, strict=False), start=first)
        limit = self._config.seq_multiplier
        return tuple(i for i, (cut, right, length) in rollouts if cut and not right and length + 1 <= limit)

    def _decide(
        self, chain: Past, outcome: Outcome, best: float, bar: float | None, num_resumable: int
    ) -> Decision | int:
        """What becomes of `chain`, whose last round is `outcome`; a number asks for that many more, resumed ones too.

        `best` is the highest reward of that round and `bar` what it has to beat, None if it is the first to count.
        """
        has_variance = exceeds(chain.best, chain.worst)
        if has_variance and self._accepts(best, bar):
            reason = "improved" if outcome.round else "mixed"
            return Decision(outcome.chain_id, "train", reason, self._kept(chain, outcome.learner_version))
        if self._reaches_max(chain.best):
            return Decision(outcome.chain_id, "drop", "solved")
        size = self._next_round_size(chain, outcome, num_resumable)
        if size:
            return size
        first_without_variance = outcome.round == 0 and not has_variance
        return Decision(outcome.chain_id, "drop", no_variance_reason(outcome) if first_without_variance else "gave_up")

    def _kept(self, chain: Past, learner_version: int) -> tuple[int, ...]:
        config = self._config
        if config.keep_versions < 0:
            return kept_at_any_age(chain.rewards, config.keep_failures)
        ages = [learner_version - version for version in chain.oldest_versions]
        return kept_attempts(chain.rewards, chain.round_sizes, ages, config.keep_failures, config.keep_versions)

    def _accepts(self, best_of_round: float, bar: float | None) -> bool:
        """Whether a chain whose rewards differ is trained now.

        While no round was accepted, "different" has seen equal rewards only, so any difference in the chain is one of
        this round: the published rule (std != 0 or max != best) needs no test of its own.
        """
        match self._config.accept:
            case "better":
                return bar is None or exceeds(best_of_round, bar)
            case "different":
                return True
            case "solved":
                return self._reaches_max(best_of_round)
            case "history":
                return bar is None or exceeds(best_of_round, bar) or self._reaches_max(best_of_round)

    def _reaches_max(self, reward: float) -> bool:
        return not exceeds(self._config.max_reward, reward)

    def _next_round_size(self, chain: Past, outcome: Outcome, num_resumable: int) -> int:
        """Rollouts of the next round; 0 gives up. A full line turns away new chains only: who was let in is served."""
        config = self._config
        if outcome.round == 0 and len(self._retries) >= config.max_waiting:
            return 0
        if config.retry == "doubling":
            size = chain.num_launched
        elif uniform(self._seed, outcome.chain_id, outcome.round) < config.p_ngu:
            size = config.round_size
        else:
            return 0
        num_new = max(size - num_resumable, 0)
        if config.max_attempts:
            num_new = min(num_new, config.max_attempts - chain.num_launched)
        return num_resumable + num_new

    # --- what is out ---

    def _fits(self, num_rollouts: int, share: float) -> bool:
        return self._num_retried + num_rollouts <= share or (share > 0 and not self._num_retried)

    def _launch_retry(self, launches: list[Launch]) -> int:
        """Launch the retry that has waited longest; its number of rollouts."""
        retry = self._retries.popleft()
        launch = self._intake.reopen(retry.chain_id, retry.round, retry.problem, retry.num_rollouts, retry.num_resumed)
        self._in_flight[retry.chain_id] = launch
        self._num_in_flight += retry.num_rollouts
        self._num_retried += retry.num_rollouts
        launches.append(launch)
        return retry.num_rollouts

    def _landed(self, launch: Launch) -> Past | None:
        """Take a round out of flight; what its chain has behind it, None for a first round."""
        del self._in_flight[launch.chain_id]
        self._num_in_flight -= launch.num_rollouts
        if launch.round == 0:
            return None
        self._num_retried -= launch.num_rollouts
        return self._pasts.pop(launch.chain_id)
