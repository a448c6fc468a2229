"""Open chains and the attempts in flight for them: who is owed what, kept in memory and saved with a checkpoint.

The book turns launches into attempts, attempts into finished rounds, and a decision into a group. It talks to no
socket and knows no policy.
"""

from collections.abc import Sequence

import msgspec

from pipeline.config import SamplingConfig
from pipeline.interruption import draw_interruption
from pipeline.messages import Group, Prefix, Purpose, Rollout, SamplingParams, Verdict, Work
from samplers.base import Launch, Outcome, Problem

# After this many unusable verdicts or engine failures for the same place in a round the place stays empty, so that one
# answer that always breaks its verifier cannot be sampled for ever.
MAX_TRIES = 5


class Result(msgspec.Struct, frozen=True, array_like=True, gc=False):
    rollout: Rollout
    verdict: Verdict


class OpenRound(msgspec.Struct, gc=False):
    """A round in flight. `results[i]` is filled when place i is judged; `num_missing` counts the places still owed.

    `ticket` is its launch's, `version` the policy's then; `num_carried` tokens of its results are from earlier rounds.
    """

    round: int
    results: list[Result | None]
    num_missing: int
    ticket: int = 0
    version: int = 0
    num_carried: int = 0


class OpenChain(msgspec.Struct, gc=False):
    """A chain that may still get rounds: everything judged so far, in launch order, and the round in flight if any.

    `set_aside` are rollouts that their length cut off and that the next round continues; they are not among the judged.
    """

    chain_id: int
    problem: Problem
    judged: list[Result]
    round_sizes: list[int]
    current: OpenRound | None
    set_aside: list[Rollout] = []


class Place(msgspec.Struct, gc=False):
    """Where an attempt's result belongs. `rollout` is set while it waits for its verdict."""

    work: Work
    index: int
    tries: int
    rollout: Rollout | None = None


class SavedPlace(msgspec.Struct, frozen=True, array_like=True):
    """A training attempt in flight: after a restart the same attempt is run again, under the same id."""

    attempt_id: int
    chain_id: int
    index: int
    tries: int
    prefix: Prefix | None = None


class BookState(msgspec.Struct):
    chains: list[OpenChain]
    places: list[SavedPlace]


class Book:
    def __init__(self, sampling: SamplingConfig, seed: int, next_attempt_id: int):
        self._sampling = sampling
        self._seed = seed
        self._whole = SamplingParams(sampling.temperature, sampling.max_new_tokens)
        self.next_attempt_id = next_attempt_id
        self.chains: dict[int, OpenChain] = {}
        self.places: dict[int, Place] = {}
        self.num_in_flight = 0  # training attempts in rounds that have not finished, judged places included
        self.num_ended_tokens = 0  # of the judged places among them

    # --- launching ---

    def open_round(self, launch: Launch, policy_version: int) -> list[Work]:
        chain = self.chains.get(launch.chain_id)
        if chain is None:
            chain = OpenChain(launch.chain_id, launch.problem, [], [], None)
            self.chains[launch.chain_id] = chain
        assert chain.current is None, f"chain {launch.chain_id} already has a round in flight"
        places: list[Result | None] = [None] * launch.num_rollouts
        chain.current = OpenRound(launch.round, places, launch.num_rollouts, launch.ticket, policy_version)
        self.num_in_flight += launch.num_rollouts
        assert launch.num_resumed == len(chain.set_aside), f"chain {launch.chain_id} resumes what was not set aside"
        prefixes: list[Prefix | None] = [rollout.as_prefix() for rollout in chain.set_aside]
        prefixes += [None] * (launch.num_rollouts - launch.num_resumed)
        chain.set_aside = []
        return [
            self.new_attempt(launch.problem, launch.chain_id, launch.round, i, "train", 1, prefix)
            for i, prefix in enumerate(prefixes)
        ]

    def new_attempt(
        self,
        problem: Problem,
        chain_id: int,
        round: int,
        index: int,
        purpose: Purpose,
        tries: int,
        prefix: Prefix | None = None,
    ) -> Work:
        work = self._work(self.next_attempt_id, chain_id, round, problem, purpose, prefix)
        self.next_attempt_id += 1
        self.places[work.attempt_id] = Place(work, index, tries)
        return work

    def _work(
        self, attempt_id: int, chain_id: int, round: int, problem: Problem, purpose: Purpose, prefix: Prefix | None
    ) -> Work:
        config, sampling, interruption = self._sampling, self._whole, None
        if prefix is not None:
            sampling = SamplingParams(config.temperature, prefix.num_sampled + config.max_new_tokens)
        if config.interruption.max_tokens:
            interruption = draw_interruption(config.interruption, self._seed, attempt_id)
        return Work(attempt_id, chain_id, round, problem, sampling, purpose, prefix, interruption)

    # --- results ---

    def replace(self, attempt_id: int) -> Work:
        """Give the attempt's place to a new attempt."""
        place = self.places.pop(attempt_id)
        assert place.tries < MAX_TRIES
        w = place.work
        return self.new_attempt(w.problem, w.chain_id, w.round, place.index, w.purpose, place.tries + 1, w.prefix)

    def settle(self, place: Place, result: Result | None) -> OpenChain | None:
        """Fill a place (None leaves it empty for good); the chain, if that finished its round."""
        chain = self.chains[place.work.chain_id]
        current = chain.current
        assert current is not None and current.round == place.work.round
        current.results[place.index] = result
        self.num_ended_tokens += result.rollout.num_tokens if result is not None else 0
        current.num_missing -= 1
        if result is not None and place.work.prefix is not None:
            current.num_carried += place.work.prefix.num_tokens
        return chain if current.num_missing == 0 else None

    def finish_round(self, chain: OpenChain, learner_version: int) -> Outcome | None:
        """Close the round in flight; None if not one of its rollouts could be judged."""
        current = chain.current
        assert current is not None and current.num_missing == 0
        results = [r for r in current.results if r is not None]
        rollouts = [r.rollout for r in results]
        verdicts = [r.verdict for r in results]
        num_tokens = sum([rollout.num_tokens for rollout in rollouts])
        self.num_in_flight -= len(current.results)
        self.num_ended_tokens -= num_tokens
        chain.current = None
        if not results:
            return None
        chain.judged.extend(results)
        chain.round_sizes.append(len(results))
        versions = [v for rollout in rollouts if (v := rollout.oldest_version) is not None]
        longest = self._sampling.max_new_tokens
        return Outcome(
            chain_id=chain.chain_id,
            round=current.round,
            rewards=tuple([verdict.reward for verdict in verdicts]),
            correct=tuple([verdict.outcome == "correct" for verdict in verdicts]),
            truncated=tuple([rollout.finish_reason == "length" for rollout in rollouts]),
            num_tokens=num_tokens - current.num_carried,
            oldest_version=min(versions, default=learner_version),
            learner_version=learner_version,
            lengths=tuple([rollout.num_sampled / longest for rollout in rollouts]),
        )

    def set_aside(self, chain_id: int, indices: Sequence[int]) -> None:
        """Take judged rollouts of the last round out of the chain, for its next round to continue."""
        chain = self.chains[chain_id]
        gone = set(indices)
        assert min(gone) >= len(chain.judged) - chain.round_sizes[-1], "only the last round can be resumed"
        chain.set_aside = [chain.judged[i].rollout for i in indices]
        chain.judged = [r for i, r in enumerate(chain.judged) if i not in gone]
        chain.round_sizes[-1] -= len(gone)
        if not chain.round_sizes[-1]:
            chain.round_sizes.pop()

    def resumed_by(self, launch: Launch) -> list[int]:
        """The attempts that end because those of `launch` continue them."""
        chain = self.chains.get(launch.chain_id)
        return [r.attempt_id for r in chain.set_aside] if chain is not None else []

    # --- closing ---

    def close_chain(self, chain_id: int) -> OpenChain:
        return self.chains.pop(chain_id)

    @property
    def open_rounds(self) -> list[OpenRound]:
        return [c.current for c in self.chains.values() if c.current is not None]

    # --- checkpoints ---

    def state(self) -> BookState:
        places = [
            SavedPlace(attempt_id, place.work.chain_id, place.index, place.tries, place.work.prefix)
            for attempt_id, place in self.places.items()
            if place.work.purpose == "train"
        ]
        return BookState(list(self.chains.values()), places)

    def restore(self, state: BookState) -> None:
        """Take the saved chains and the attempts in flight for them over; what waited for a verdict runs again."""
        self.chains = {c.chain_id: c for c in state.chains}
        self.num_in_flight = sum(len(r.results) for r in self.open_rounds)
        judged = [result for r in self.open_rounds for result in r.results if result is not None]
        self.num_ended_tokens = sum(result.rollout.num_tokens for result in judged)
        for saved in state.places:
            chain = self.chains[saved.chain_id]
            assert chain.current is not None
            work = self._work(
                saved.attempt_id, chain.chain_id, chain.current.round, chain.problem, "train", saved.prefix
            )
            self.places[saved.attempt_id] = Place(work, saved.index, saved.tries)

    def judged_attempts(self) -> list[int]:
        """Ids of the attempts that open chains hold results of, or set aside."""
        held = [r for c in self.chains.values() for r in c.judged]
        held += [r for c in self.chains.values() if c.current for r in c.current.results if r is not None]
        set_aside = [r.attempt_id for c in self.chains.values() for r in c.set_aside]
        return [r.rollout.attempt_id for r in held] + set_aside


def make_group(chain: OpenChain, keep: tuple[int, ...]) -> Group:
    kept = [chain.judged[i] for i in keep]
    return Group(
        chain_id=chain.chain_id,
        problem=chain.problem,
        rollouts=tuple([r.rollout for r in kept]),
        verdicts=tuple([r.verdict for r in kept]),
        draw_indices=keep,
        chain_rewards=tuple([r.verdict.reward for r in chain.judged]),
        round_sizes=tuple(chain.round_sizes),
    )
