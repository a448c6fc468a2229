"""The pipeline around one sampler, on a virtual clock: engine slots, verdicts, batches, staleness and a learner.

The sampler, the admission rule, the batcher and the advantages are those of a real run. What is simulated is the
policy (`bench.lab.policy`), the length of a completion, and time: a slot produces tokens at a constant rate, verdicts
are instant, and weights are swapped in flight, so a rollout belongs to the version it was started under.
"""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from bench.lab.chain import Chain
from bench.lab.config import LabConfig
from bench.lab.policy import Policy, gradient, rollout_weights
from bench.lab.population import Population
from bench.lab.tally import Report, Tally
from learner.advantages import Chain as RewardChain
from learner.advantages import batch_advantages
from pipeline.coordinator.batcher import Batcher
from pipeline.learner_config import CispoConfig
from pipeline.messages import Group, Rollout, VersionSpan
from pipeline.staleness import admit, room
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Launch, Outcome, Problem
from samplers.registry import make_sampler

CHANCE_BLOCK = 1 << 14


class Stream:
    """Shuffled passes over the population, as a task gives them; the lab finds a problem again by its index."""

    def __init__(self, problems: list[Problem], seed: int):
        self.num_problems: int | None = len(problems)
        self._problems = problems
        self._passes = ShuffledPasses(len(problems), seed)

    def next_problem(self) -> Problem:
        return self._problems[self._passes.next_index()]


class Chance:
    """Numbers drawn a block at a time: one by one they would cost more than the rest of the simulation."""

    def __init__(self, seed: int):
        rng = np.random.default_rng([seed, 2])
        self.uniform = self._drawer(rng.random)
        self.normal = self._drawer(rng.standard_normal)

    @staticmethod
    def _drawer(draw: Callable[[int], np.ndarray]) -> Callable[[], float]:
        def forever():
            while True:
                yield from draw(CHANCE_BLOCK).tolist()

        return forever().__next__


@dataclass(slots=True)
class Round:
    """A round in flight; rollout i of it fills place i: (rung, its probability then, version, tokens, cut short)."""

    launch: Launch
    chain: Chain
    places: list[tuple[int, float, int, int, bool] | None]
    num_missing: int


class World:
    def __init__(self, config: LabConfig, population: Population):
        self._config, self._population = config, population
        self._stream = Stream(population.problems, config.seed)
        self._sampler = make_sampler(config.sampler, self._stream, config.seed)
        self._chance = Chance(config.seed)
        self.policy = Policy(population, config.lab.learning)
        self._index = {p.problem_id: i for i, p in enumerate(population.problems)}
        self._known_rates: dict[int, tuple[list[float], list[float]]] = {}  # of this version of the policy
        self._median_tokens = population.median_tokens.tolist()
        self._rewards = population.rewards.tolist()
        self._top = len(self._rewards) - 1
        loss = config.learner.loss
        self._ratio_cap = loss.eps_max if isinstance(loss, CispoConfig) else config.learner.corrections.cap
        self._batcher = Batcher(config.learner.batch_by, config.learner.batch_size)
        self._tally = Tally(config, population)
        self._chains: dict[int, Chain] = {}
        self._closed: dict[int, Chain] = {}  # trained chains whose step has not ended
        self._queue: deque[tuple[Round, int]] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_slots = config.engines.count * config.engines.slots
        self._num_busy = 0
        self._attempts_in_flight = 0
        self._rounds_in_flight = 0
        self._num_judged = 0  # since the last batch
        self._learner_busy = False
        self._version = 0
        self._now = 0.0

    def run(self) -> Report:
        """Simulate until the budget is spent and nothing more can be trained."""
        self._tally.evaluate(self.policy, 0, 0.0)
        self._launch()
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            if self._config.max_steps and self._version >= self._config.max_steps:
                break
            self._train()
            self._launch()
        self._tally.evaluate(self.policy, self._version, self._now)
        return self._tally.report(self._now)

    # --- launching ---

    def _launch(self) -> None:
        learner, by_groups = self._config.learner, self._config.learner.batch_by == "groups"
        in_flight = self._rounds_in_flight if by_groups else self._attempts_in_flight
        free = room(self._config.staleness.max_lag, learner.batch_size, self._batcher.num_waiting, in_flight)
        queue_room = self._num_slots + self._num_slots // 2 - self._num_busy - len(self._queue)
        limit = self._config.max_rollouts
        while free > 0 and queue_room > 0 and (not limit or self._tally.launched < limit):
            launches = self._sampler.propose(1)
            if not launches:
                return
            for launch in launches:
                self._open(launch)
                free -= 1 if by_groups else launch.num_rollouts
                queue_room -= launch.num_rollouts

    def _open(self, launch: Launch) -> None:
        chain = self._chains.get(launch.chain_id)
        if chain is None:
            index = self._index[launch.problem.problem_id]
            chain = self._chains[launch.chain_id] = Chain(index, self._rates(index)[0][-1])
        opened = Round(launch, chain, [None] * launch.num_rollouts, launch.num_rollouts)
        self._tally.launch(chain.index, launch)
        self._attempts_in_flight += launch.num_rollouts
        self._rounds_in_flight += 1
        self._queue.extend((opened, place) for place in range(launch.num_rollouts))
        self._fill_slots()

    def _rates(self, index: int) -> tuple[list[float], list[float]]:
        """The present rates of a problem's rungs and their running sums."""
        known = self._known_rates.get(index)
        if known is None:
            rates = self.policy.rates(index).tolist()
            known = self._known_rates[index] = rates, list(accumulate(rates))
        return known

    def _fill_slots(self) -> None:
        while self._queue and self._num_busy < self._num_slots:
            opened, place = self._queue.popleft()
            self._num_busy += 1
            self._start(opened, place)

    def _start(self, opened: Round, place: int) -> None:
        """Draw what the rollout will be: how far it gets, and how long that takes."""
        index = opened.chain.index
        rates, cumulative = self._rates(index)
        rung = min(bisect_right(cumulative, self._chance.uniform()), self._top)
        lengths, cap = self._config.lab.lengths, self._config.sampling.max_new_tokens
        wanted = self._median_tokens[index] * math.exp(lengths.spread * self._chance.normal())
        # Pass rates are of what the run sees, so cutting a long completion short cannot make a right one wrong.
        tokens, cut = max(1, min(round(wanted), cap)), wanted > cap and rung < self._top
        opened.places[place] = rung, rates[rung], self._version, tokens, cut
        self._after(tokens / self._config.lab.timing.slot_tokens_per_s, partial(self._finish, opened))

    # --- what comes back ---

    def _finish(self, opened: Round) -> None:
        self._num_busy -= 1
        self._fill_slots()
        opened.num_missing -= 1
        if opened.num_missing == 0:
            self._finish_round(opened)

    def _finish_round(self, opened: Round) -> None:
        launch, chain = opened.launch, opened.chain
        rungs, behaviour, versions, tokens, cut = zip(*(p for p in opened.places if p is not None), strict=True)
        self._attempts_in_flight -= launch.num_rollouts
        self._rounds_in_flight -= 1
        self._num_judged += launch.num_rollouts
        chain.rungs.extend(rungs)
        chain.behaviour.extend(behaviour)
        chain.versions.extend(versions)
        chain.tokens.extend(tokens)
        chain.round_sizes.append(len(rungs))
        correct = tuple(rung == self._top for rung in rungs)
        self._tally.finish_round(chain.index, sum(tokens), any(correct), self._now)
        rewards = tuple(self._rewards[rung] for rung in rungs)
        outcome = Outcome(
            launch.chain_id, launch.round, rewards, correct, cut, sum(tokens), min(versions), self._version
        )
        group: Group | None = None
        for decision in self._sampler.observe(outcome):
            self._tally.decide(decision)
            if decision.action == "train":
                group = self._close(decision.chain_id, launch.problem, decision.keep)
            elif decision.action == "drop":
                self._tally.drop(self._chains.pop(decision.chain_id), self._top)
        self._batcher.add_round(len(rungs), group)

    def _close(self, chain_id: int, problem: Problem, keep: tuple[int, ...]) -> Group:
        """The group as the batcher and the staleness rule know it; its tokens are not simulated."""
        chain = self._closed[chain_id] = self._chains.pop(chain_id)
        chain.keep = keep
        rewards = tuple(self._rewards[rung] for rung in chain.rungs)
        rollouts = tuple(_rollout(chain_id, chain.versions[i]) for i in keep)
        return Group(chain_id, problem, rollouts, (), keep, rewards, tuple(chain.round_sizes))

    # --- the learner ---

    def _train(self) -> None:
        while not self._learner_busy and self._batcher.ready:
            groups = [g for g in self._batcher.take() if self._admit(g)]
            if groups:
                self._learner_busy = True
                timing = self._config.lab.timing
                tokens = sum(self._closed[g.chain_id].tokens[i] for g in groups for i in g.draw_indices)
                self._after(
                    timing.step_s + tokens / timing.learner_tokens_per_s,
                    partial(self._finish_step, groups, self._num_judged),
                )
                self._num_judged = 0
            else:
                self._batcher.consumed()

    def _admit(self, group: Group) -> bool:
        rule = self._config.staleness
        if admit(group, self._version, rule.max_lag, rule.policy):
            return True
        self._tally.stale(self._closed.pop(group.chain_id))
        return False

    def _finish_step(self, groups: list[Group], num_attempts: int) -> None:
        loss = self._config.learner.loss
        chains = [self._closed.pop(g.chain_id) for g in groups]
        advantages = batch_advantages([_rewards(g) for g in groups], self._config.learner.advantage)
        sizes = [len(chain.keep) for chain in chains]
        group = np.repeat(np.arange(len(chains)), sizes)
        tokens = np.array([chain.tokens[i] for chain in chains for i in chain.keep])
        weights = rollout_weights(tokens, group, len(chains), loss.aggregation)
        for chain, a, u in zip(chains, advantages, np.split(weights, np.cumsum(sizes)[:-1]), strict=True):
            self._tally.train(chain, a * u, self._version, self._top)
        problems = np.array([chain.index for chain in chains])
        rates = self.policy.rates(problems)
        rungs = np.array([chain.rungs[i] for chain in chains for i in chain.keep])
        behaviour = np.array([chain.behaviour[i] for chain in chains for i in chain.keep])
        ratios = np.minimum(rates[group, rungs] / behaviour, self._ratio_cap)
        total = num_attempts if loss.aggregation == "launched" else tokens.sum()
        weights *= ratios * np.concatenate(advantages) / total
        self.policy.step(gradient(rates, group, rungs, weights), problems)
        self._known_rates.clear()
        self._version += 1
        self._learner_busy = False
        self._batcher.consumed()
        self._tally.evaluate(self.policy, self._version, self._now)

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + delay_s, self._num_events, happen))


def _rewards(group: Group) -> RewardChain:
    return RewardChain(np.array(group.chain_rewards), np.array(group.draw_indices), group.round_sizes)


def _rollout(chain_id: int, version: int) -> Rollout:
    return Rollout(0, chain_id, 0, b"", b"", b"", (VersionSpan(0, version),), "stop", "", "lab", 0, 0)
