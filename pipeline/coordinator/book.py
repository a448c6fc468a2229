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
    judged: tuple[Result, ...] = ()
    round_sizes: tuple[int, ...] = ()
    current: OpenRound | None = None
    set_aside: tuple[Result, ...] = ()


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where an attempt's result belongs."""

    work: Work
    index: int
    tries: int


class BookState(msgspec.Struct):
    """`places` are those of training attempts in flight: after a restart they are run again, under the same ids."""

    chains: list[OpenChain]
    places: list[Place]


class Book:
    def __init__(self, sampling: SamplingConfig, seed: int, next_attempt_id: int):
        self._sampling = sampling
        self._seed = seed
        self._whole = SamplingParams(sampling.temperature, sampling.max_new_tokens)
        self.next_attempt_id = next_attempt_id
        self.chains: dict[int, OpenChain] = {}
        self.places: dict[int, Place] = {}
        self.unjudged: dict[int, Rollout] = {}  # of the places that wait for a verdict
        self.num_in_flight = 0  # training attempts in rounds that have not finished, judged places included
        self.num_ended_tokens = 0  # of the judged places among them

    # --- launching ---

    def open_round(self, launch: Launch, policy_version: int) -> list[Work]:
        chain = self.chains.get(launch.chain_id)
        if chain is None:
            chain = self.chains[launch.chain_id] = OpenChain(launch.chain_id, launch.problem)
        assert chain.current is None, f"chain {launch.chain_id} already has a round in flight"
        num = launch.num_rollouts
        chain.current = OpenRound(launch.round, [None] * num, num, launch.ticket, policy_version)
        self.num_in_flight += num
        assert launch.num_resumed == len(chain.set_aside), f"chain {launch.chain_id} resumes what was not set aside"
        if not chain.set_aside and not self._sampling.interruption.max_tokens:  # most rounds
            return self._open_whole(launch)
        prefixes: list[Prefix | None] = [result.rollout.as_prefix() for result in chain.set_aside]
        prefixes += [None] * (num - launch.num_resumed)
        chain.set_aside = ()
        return [
            self.new_attempt(launch.problem, launch.chain_id, launch.round, i, "train", 1, prefix)
            for i, prefix in enumerate(prefixes)
        ]

    def _open_whole(self, launch: Launch) -> list[Work]:
        """The attempts of a round that continues nothing: what `new_attempt` makes, without a call for each."""
        chain_id, round, problem = launch.chain_id, launch.round, launch.problem
        first_id, whole, places, opened = self.next_attempt_id, self._whole, self.places, []
        for index in range(launch.num_rollouts):
            work = Work(first_id + index, chain_id, round, problem, whole)
            places[first_id + index] = Place(work, index, 1)
            opened.append(work)
        self.next_attempt_id = first_id + launch.num_rollouts
        return opened

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

    def take(self, attempt_id: int) -> Place:
        """The attempt ends: its place, which is no longer here."""
        self.unjudged.pop(attempt_id, None)
        return self.places.pop(attempt_id)

    def replace(self, attempt_id: int) -> Work:
        """Give the attempt's place to a new attempt."""
        place = self.take(attempt_id)
        assert place.tries < MAX_TRIES
        w = place.work
        return self.new_attempt(w.problem, w.chain_id, w.round, place.index, w.purpose, place.tries + 1, w.prefix)

    def settle(self, results: Sequence[Result]) -> list[OpenChain]:
        """Fill the places of training attempts; the chains whose rounds that has finished, in this order."""
        places, chains, num_tokens, finished = self.places, self.chains, 0, []
        for result in results:
            rollout = result.rollout
            place = places.pop(rollout.attempt_id)
            work = place.work
            chain = chains[work.chain_id]
            current = chain.current
            assert current is not None and current.round == work.round
            current.results[place.index] = result
            num_tokens += len(rollout.completion_ids) // 4
            if work.prefix is not None:
                current.num_carried += work.prefix.num_tokens
            current.num_missing -= 1
            if not current.num_missing:
                finished.append(chain)
        self.num_ended_tokens += num_tokens
        return finished

    def leave_empty(self, place: Place) -> OpenChain | None:
        """A place gets no result; the chain, if that finished its round."""
        chain = self.chains[place.work.chain_id]
        assert chain.current is not None and chain.current.round == place.work.round
        chain.current.num_missing -= 1
        return None if chain.current.num_missing else chain

    def finish_round(self, chain: OpenChain, learner_version: int) -> Outcome | None:
        """Close the round in flight; None if not one of its rollouts could be judged."""
        current = chain.current
        assert current is not None and current.num_missing == 0
        results = tuple([r for r in current.results if r is not None])
        self.num_in_flight -= len(current.results)
        chain.current = None
        if not results:
            return None
        chain.judged += results
        chain.round_sizes += (len(results),)
        longest = self._sampling.max_new_tokens
        # One loop, for a round is a handful of rollouts: each comprehension costs more than what it would gather.
        rewards, correct, truncated, lengths, versions, num_tokens = [], [], [], [], [], 0
        for result in results:
            rollout, verdict = result.rollout, result.verdict
            num = num_sampled = len(rollout.completion_ids) // 4
            num_tokens += num
            if rollout.forced_spans:
                num_sampled = rollout.num_sampled
            rewards.append(verdict.reward)
            correct.append(verdict.outcome == "correct")
            truncated.append(rollout.finish_reason == "length")
            lengths.append(num_sampled / longest)
            spans = rollout.version_spans
            if spans:
                versions.append(spans[0].policy_version if len(spans) == 1 else rollout.oldest_version)
        self.num_ended_tokens -= num_tokens
        return Outcome(
            chain.chain_id,
            current.round,
            tuple(rewards),
            tuple(correct),
            tuple(truncated),
            num_tokens - current.num_carried,
            min(versions, default=learner_version),
            learner_version,
            tuple(lengths),
        )

    def set_aside(self, chain_id: int, indices: Sequence[int]) -> None:
        """Take judged rollouts of the last round out of the chain, for its next round to continue."""
        chain = self.chains[chain_id]
        gone = set(indices)
        assert min(gone) >= len(chain.judged) - chain.round_sizes[-1], "only the last round can be resumed"
        chain.set_aside = tuple(chain.judged[i] for i in indices)
        chain.judged = tuple(r for i, r in enumerate(chain.judged) if i not in gone)
        *earlier, last = chain.round_sizes
        chain.round_sizes = (*earlier, last - len(gone)) if last > len(gone) else tuple(earlier)

    def resumed_by(self, launch: Launch) -> tuple[Result, ...]:
        """What ends because attempts of `launch` continue it."""
        chain = self.chains.get(launch.chain_id)
        return chain.set_aside if chain is not None else ()

    # --- closing ---

    def close_chain(self, chain_id: int) -> OpenChain:
        return self.chains.pop(chain_id)

    @property
    def open_rounds(self) -> list[OpenRound]:
        return [c.current for c in self.chains.values() if c.current is not None]

    # --- checkpoints ---

    def state(self) -> BookState:
        """What later changes of the book leave as it is; results are shared, not copied."""
        chains = []
        for c in self.chains.values():
            if (r := c.current) is not None:
                r = OpenRound(r.round, r.results.copy(), r.num_missing, r.ticket, r.version, r.num_carried)
            chains.append(OpenChain(c.chain_id, c.problem, c.judged, c.round_sizes, r, c.set_aside))
        return BookState(chains, [place for place in self.places.values() if place.work.purpose == "train"])

    def restore(self, state: BookState) -> None:
        """Take over the chains and the attempts in flight for them; what waited for a verdict runs again."""
        self.chains = {c.chain_id: c for c in state.chains}
        self.num_in_flight = sum(len(r.results) for r in self.open_rounds)
        judged = [result for r in self.open_rounds for result in r.results if result is not None]
        self.num_ended_tokens = sum(result.rollout.num_tokens for result in judged)
        self.places = {place.work.attempt_id: place for place in state.places}

    def results(self) -> list[Result]:
        """What open chains hold of judged attempts, or have set aside."""
        held = [r for c in self.chains.values() for r in (*c.judged, *c.set_aside)]
        return held + [r for c in self.chains.values() if c.current for r in c.current.results if r is not None]


def make_group(chain: OpenChain, keep: tuple[int, ...]) -> Group:
    rollouts, verdicts, rewards = [], [], []
    for result in chain.judged:
        rollouts.append(result.rollout)
        verdicts.append(result.verdict)
        rewards.append(result.verdict.reward)
    if len(keep) < len(rewards):
        rollouts, verdicts = [rollouts[i] for i in keep], [verdicts[i] for i in keep]
    return Group(
        chain.chain_id, chain.problem, tuple(rollouts), tuple(verdicts), keep, tuple(rewards), chain.round_sizes
    )


def judged_of(groups: Sequence[Group]) -> tuple[list[Rollout], list[Verdict]]:
    return [r for group in groups for r in group.rollouts], [v for group in groups for v in group.verdicts]


def results_of(groups: Sequence[Group]) -> list[Result]:
    return [Result(r, v) for r, v in zip(*judged_of(groups), strict=True)]
