"""What every sampler promises, whatever its policy (samplers/base.py)."""

import random
from collections import Counter
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers.base import Decision, Launch, Outcome, Problem, Sampler
from samplers.fixed import FixedConfig
from samplers.greso import GresoConfig
from samplers.gvm import GvmConfig
from samplers.history import HistoryConfig
from samplers.isocompute import IsoComputeConfig
from samplers.knapsack import KnapsackConfig
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpHistoryConfig
from samplers.registry import SamplerConfig, make_sampler
from samplers.reinforce_ada import ReinforceAdaConfig
from samplers.two_phase import PilotCommitConfig, PilotCommitHistoryConfig, SpeedConfig

REMEMBERING = HistoryConfig(cool_down=2, retire_at=0.8, retire_min_attempts=6)

CONFIGS: dict[str, SamplerConfig] = {
    "fixed": FixedConfig(num_rollouts=3),
    "fixed, remembering": FixedConfig(3, REMEMBERING),
    "never give up": NeverGiveUpConfig(round_size=2, max_attempts=16, max_waiting=2),
    "never give up, coin": NeverGiveUpConfig(round_size=3, retry="probability", p_ngu=0.6, max_attempts=0),
    "never give up, graded": NeverGiveUpConfig(
        2, accept="history", max_attempts=10, keep_failures=3, keep_versions=1, max_retry_frac=0.3
    ),
    "never give up, all pass": NeverGiveUpConfig(
        2,
        accept="solved",
        max_attempts=8,
        history=NeverGiveUpHistoryConfig(cool_down=1, retire_at=0.7, retire_min_attempts=4),
    ),
    "never give up, different": NeverGiveUpConfig(1, accept="different", max_attempts=4, max_retry_frac=1.0),
    "fixed, unfiltered": FixedConfig(2, drop_zero_variance=False),
    "reinforce ada, est": ReinforceAdaConfig(rule="est", scale=1.5, min_rollouts=2, max_rollouts=6),
    "reinforce ada, pos": ReinforceAdaConfig(rule="seq_pos", round_size=2, max_rounds=3, keep=0, history=REMEMBERING),
    "reinforce ada, balance": ReinforceAdaConfig(rule="seq_balance", round_size=1, max_rounds=5, keep=3),
    "gvm": GvmConfig(num_rollouts=4, min_rollouts=2, max_rollouts=7, window=5),
    "gvm, remembering": GvmConfig(num_rollouts=4, window=3, history=REMEMBERING),
    "knapsack": KnapsackConfig(num_rollouts=3, max_rollouts=9, window=4),
    "greso": GresoConfig(num_rollouts=3, step=0.2, adjust_every=4),
    "greso, remembering": GresoConfig(num_rollouts=2, p_start=0.1, min_explore=0.05, history=REMEMBERING),
    "pilot commit": PilotCommitConfig(pilot=3, commit=2, history=PilotCommitHistoryConfig(retire_min_attempts=6)),
    "speed": SpeedConfig(screen=2, more=3),
    "speed, narrow": SpeedConfig(screen=4, more=1, low=0.3, high=0.6, history=REMEMBERING),
    "isocompute": IsoComputeConfig(a=1, b=3, k=4, log10_c0=1.5),
}
every_sampler = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

REWARDS = ((0.0,), (1.0,), (0.0, 1.0), (0.0, 0.0, 0.5), (0.5,), (0.1 + 0.2, 0.3), ())

# Each step of a script: what to do, and a number that picks the budget, the chain and the rewards.
Script = list[tuple[str, int]]
scripts = st.lists(
    st.tuples(st.sampled_from(["propose", "observe", "observe", "observe", "abandon", "crash"]), st.integers(0, 10**6)),
    max_size=60,
)


class ShuffledStream:
    """A new order every pass, rebuilt from a cursor; it counts what is drawn."""

    def __init__(self, num_problems: int | None, cursor: int = 0):
        self.num_problems = num_problems
        self.cursor = cursor

    def next_problem(self) -> Problem:
        if self.num_problems is None:
            index = self.cursor
        else:
            order = list(range(self.num_problems))
            random.Random(self.cursor // self.num_problems).shuffle(order)
            index = order[self.cursor % self.num_problems]
        self.cursor += 1
        return Problem(f"p{index}", "test", f"prompt {index}", "answer")


class World:
    """The pipeline around one sampler: it holds what is in flight and checks every answer as it comes."""

    def __init__(self, config: SamplerConfig, num_problems: int | None, seed: int = 0):
        self.config, self.seed = config, seed
        self.stream = ShuffledStream(num_problems)
        self.sampler: Sampler = make_sampler(config, self.stream, seed)
        self.in_flight: dict[int, Launch] = {}
        self.open: dict[int, Problem] = {}
        self.judged: dict[int, int] = {}
        self.ended: set[int] = set()
        self.trace: list[Launch | Decision] = []
        self.version = 0

    def play(self, script: Script, crashes: bool = True) -> None:
        for action, number in script:
            if action == "propose":
                self.propose(number % 23 - 2)
            elif action == "crash" and crashes:
                self.crash()
            elif action == "observe" and self.in_flight:
                launch = list(self.in_flight.values())[number % len(self.in_flight)]
                pattern = REWARDS[number % len(REWARDS)]
                self.observe(launch, (pattern * launch.num_rollouts)[: launch.num_rollouts])
            elif action == "abandon" and self.open:
                self.abandon(list(self.open)[number % len(self.open)])

    def propose(self, budget: int) -> list[Launch]:
        drawn = self.stream.cursor
        launches = self.sampler.propose(budget)
        num_fresh = sum(x.round == 0 for x in launches)
        skipped = self.stream.cursor - drawn - num_fresh
        drawn_ahead = getattr(self.config, "window", 0)  # problems that a planning sampler holds for later launches
        assert skipped <= (self.stream.num_problems or 0) + drawn_ahead, "the search for a fresh problem must end"
        assert sum(x.num_rollouts for x in launches[:-1]) < max(budget, 1), "launched more after the budget was used up"
        for launch in launches:
            self._launched(launch)
        return launches

    def _launched(self, launch: Launch) -> None:
        last_ticket = max((x.ticket for x in self.trace if isinstance(x, Launch)), default=-1)
        assert launch.ticket == last_ticket + 1
        assert launch.num_rollouts > 0
        assert launch.chain_id not in self.in_flight and launch.chain_id not in self.ended
        if launch.round == 0:
            assert launch.problem not in self.open.values(), "a problem with an open chain was launched again"
            self.open[launch.chain_id] = launch.problem
            self.judged[launch.chain_id] = 0
        else:
            assert self.open[launch.chain_id] == launch.problem
            rounds = [x.round for x in self.trace if isinstance(x, Launch) and x.chain_id == launch.chain_id]
            assert launch.round == rounds[-1] + 1
        self.in_flight[launch.chain_id] = launch
        self.trace.append(launch)

    def observe(self, launch: Launch, rewards: tuple[float, ...]) -> None:
        del self.in_flight[launch.chain_id]
        self.judged[launch.chain_id] += len(rewards)
        self.version += 1
        correct = tuple(r >= 1 for r in rewards)
        truncated = (False,) * len(rewards)
        oldest = self.version - launch.ticket % 4
        decisions = self.sampler.observe(
            Outcome(launch.chain_id, launch.round, rewards, correct, truncated, 9, oldest, self.version)
        )
        assert launch.chain_id in {d.chain_id for d in decisions}
        for decision in decisions:
            self._decided(decision)

    def _decided(self, decision: Decision) -> None:
        self.trace.append(decision)
        keep = decision.keep
        if decision.action == "train":
            assert list(keep) == sorted(set(keep)) and len(keep) >= 2
            assert min(keep) >= 0 and max(keep) < self.judged[decision.chain_id]
        else:
            assert keep == ()
        if decision.action != "retry":
            self._ended(decision.chain_id)

    def abandon(self, chain_id: int) -> None:
        self.in_flight.pop(chain_id, None)
        self.sampler.abandon(chain_id)
        self._ended(chain_id)

    def _ended(self, chain_id: int) -> None:
        del self.open[chain_id]
        assert chain_id not in self.ended
        self.ended.add(chain_id)

    def crash(self) -> None:
        """Save through msgpack, and go on with a new process's sampler."""
        saved, stats = msgspec.msgpack.encode(self.sampler.state()), self.sampler.stats()
        self.stream = ShuffledStream(self.stream.num_problems, self.stream.cursor)
        self.sampler = make_sampler(self.config, self.stream, self.seed)
        self.sampler.restore(msgspec.msgpack.decode(saved))
        assert msgspec.msgpack.encode(self.sampler.state()) == saved
        assert self.sampler.stats() == stats

    def drain(self) -> None:
        """Solve everything until no chain is open."""
        for _ in range(1000):
            for launch in list(self.in_flight.values()):
                self.observe(launch, (1.0, *[0.0] * (launch.num_rollouts - 1)))
            if not self.open:
                return
            self.propose(1)
        raise AssertionError(f"{len(self.open)} chains never ended")


def test_every_kind_in_the_registry_is_covered():
    assert {type(c) for c in CONFIGS.values()} == set(get_args(SamplerConfig))


@every_sampler
@given(script=scripts, num_problems=st.sampled_from([1, 2, 7, None]))
@settings(max_examples=40)
def test_every_chain_ends_exactly_once(config: SamplerConfig, script: Script, num_problems: int | None):
    world = World(config, num_problems)
    world.play(script)
    world.drain()
    assert world.ended == {x.chain_id for x in world.trace if isinstance(x, Launch)}


@every_sampler
@given(script=scripts, num_problems=st.sampled_from([2, 7, None]))
@settings(max_examples=40)
def test_a_restored_sampler_goes_on_as_if_nothing_happened(
    config: SamplerConfig, script: Script, num_problems: int | None
):
    crashing, steady = World(config, num_problems), World(config, num_problems)
    crashing.play(script, crashes=True)
    steady.play(script, crashes=False)
    assert crashing.trace == steady.trace


@every_sampler
def test_a_saved_state_does_not_change_when_the_sampler_goes_on(config: SamplerConfig):
    world = World(config, num_problems=6)
    script = [("propose", 20), ("observe", 0), ("observe", 7), ("observe", 2)]
    world.play(script)
    state = world.sampler.state()
    encoded = msgspec.msgpack.encode(state)
    world.play(script * 3)
    assert msgspec.msgpack.encode(state) == encoded
    assert msgspec.msgpack.encode(world.sampler.state()) != encoded


@every_sampler
def test_no_room_gives_no_launch(config: SamplerConfig):
    world = World(config, num_problems=6)
    world.play([("propose", 22), ("observe", 0), ("observe", 0)])
    assert world.propose(0) == world.propose(-3) == []


@every_sampler
def test_nothing_open_means_something_is_launched_unless_all_is_retired(config: SamplerConfig):
    """However much is solved and cools down, a run does not stand still."""
    world = World(config, num_problems=5)
    for _ in range(100):
        launches = world.propose(4)
        if not launches:
            assert world.sampler.stats()["num_retired"] >= 4
            break
        while world.in_flight:
            launch = next(iter(world.in_flight.values()))
            world.observe(launch, (1.0,) * launch.num_rollouts)


@every_sampler
def test_every_sampler_lets_a_solved_problem_cool_down_when_told_to(config: SamplerConfig):
    """Whatever the rule, the switch alone makes visits to a problem that is always solved rarer."""
    off, on = (_visits(config, cool_down) for cool_down in (0, 3))
    assert 0 < on["p0"] < off["p0"]


def _visits(config: SamplerConfig, cool_down: int) -> Counter[str]:
    """How often each of six problems is met in 120 visits, of which those to p0 are all right and no other ever is."""
    history = msgspec.structs.replace(config.history, cool_down=cool_down, retire_at=None)
    world = World(msgspec.structs.replace(config, history=history), num_problems=6)
    visits: Counter[str] = Counter()
    while visits.total() < 120:
        for launch in world.propose(1):
            visits[launch.problem.problem_id] += launch.round == 0
            world.observe(launch, (float(launch.problem.problem_id == "p0"),) * launch.num_rollouts)
    return visits


@every_sampler
def test_stats_are_finite_gauges(config: SamplerConfig):
    world = World(config, num_problems=6)
    for script in ([], [("propose", 22)], [("observe", 0), ("observe", 1), ("observe", 9)]):
        world.play(script)
        for name, value in world.sampler.stats().items():
            assert isinstance(name, str) and isinstance(value, float) and abs(value) < 1e9


@given(script=scripts, num_problems=st.sampled_from([1, 3, 7, None]), cool_down=st.integers(0, 3))
@settings(max_examples=100)
def test_never_give_up_without_retries_is_fixed(script: Script, num_problems: int | None, cool_down: int):
    history = {"cool_down": cool_down, "retire_at": 0.9, "retire_min_attempts": 8}
    fixed = World(FixedConfig(4, HistoryConfig(**history)), num_problems)
    once = NeverGiveUpConfig(
        round_size=4,
        retry="probability",
        p_ngu=0.0,
        max_attempts=0,
        keep_failures=0,
        history=NeverGiveUpHistoryConfig(**history),
    )
    never_give_up = World(once, num_problems)
    fixed.play(script)
    never_give_up.play(script)
    assert never_give_up.trace == fixed.trace, "even the reasons agree where 1 is the reward of a right answer"
