import numpy as np
import pytest
from sampler_world import CyclingStream, outcome

from samplers.fixed import FixedConfig, FixedSampler
from samplers.history import HistoryConfig


def make(num_problems: int | None = 10, cool_down: int = 0) -> FixedSampler:
    config = FixedConfig(history=HistoryConfig(cool_down=cool_down))
    return FixedSampler(config, CyclingStream(num_problems), seed=0)


def test_the_budget_is_used_up_and_the_last_launch_may_exceed_it():
    sampler = make()
    launches = sampler.propose(17)
    assert [x.num_rollouts for x in launches] == [8, 8, 8]
    assert [x.ticket for x in launches] == [0, 1, 2]
    assert [x.problem.problem_id for x in launches] == ["0", "1", "2"]
    assert sampler.propose(0) == sampler.propose(-5) == []


@pytest.mark.parametrize(
    ("rewards", "action", "reason"),
    [
        ([1.0] + [0.0] * 7, "train", "mixed"),
        ([0.0] + [0.95] * 7, "train", "mixed"),
        ([0.95] * 7 + [1.0], "train", "mixed"),
        ([1.0] * 8, "drop", "solved"),
        ([0.0] * 8, "drop", "all_wrong"),
        ([-1.0] * 8, "drop", "all_wrong"),
        ([0.5] * 8, "drop", "zero_variance"),
        ([float(np.float32(0.1)), 0.1] * 4, "drop", "zero_variance"),
        ([0.1 + 0.2, 0.3] * 4, "drop", "zero_variance"),
        ([1e6 + 0.5, 1e6] * 4, "drop", "solved"),
        ([], "drop", "unverifiable"),
    ],
)
def test_groups_without_variance_are_dropped(rewards: list[float], action: str, reason: str):
    sampler = make()
    (launch,) = sampler.propose(8)
    (decision,) = sampler.observe(outcome(launch, rewards))
    assert (decision.chain_id, decision.action, decision.reason) == (launch.chain_id, action, reason)
    assert decision.keep == (tuple(range(8)) if action == "train" else ())


def test_a_partly_judged_round_keeps_what_was_judged():
    sampler = make()
    (launch,) = sampler.propose(8)
    (decision,) = sampler.observe(outcome(launch, [0.0, 1.0, 0.0]))
    assert decision.keep == (0, 1, 2)


def test_a_problem_is_not_launched_while_it_is_pending():
    stream = CyclingStream(3)
    sampler = FixedSampler(FixedConfig(), stream, seed=0)
    launches = sampler.propose(1000)
    assert len(launches) == 3
    drawn = stream.num_drawn
    assert sampler.propose(1000) == []
    assert stream.num_drawn == drawn, "everything is pending: nothing to look for"
    sampler.observe(outcome(launches[1], [1.0, 0.0]))
    assert [x.problem.problem_id for x in sampler.propose(1000)] == ["1"]


def test_a_solved_problem_passes_by_once_and_then_twice():
    sampler = make(num_problems=2, cool_down=1)
    visits = []
    for _ in range(12):
        for launch in sampler.propose(1):
            visits.append(launch.problem.problem_id)
            solved = launch.problem.problem_id == "0"
            sampler.observe(outcome(launch, [1.0] * 8 if solved else [1.0, 0.0]))
    # Problem 0 is visited at passes 0, 2 and 5 of the stream, problem 1 at every one.
    assert visits[:10] == ["0", "1", "1", "0", "1", "1", "1", "0", "1", "1"]


def test_when_everything_cools_down_and_nothing_is_open_the_nearest_is_launched():
    stream = CyclingStream(4)
    sampler = FixedSampler(FixedConfig(history=HistoryConfig(cool_down=8)), stream, seed=0)
    for launch in sampler.propose(1000):
        sampler.observe(outcome(launch, [1.0] * 8))
    drawn = stream.num_drawn
    assert [x.problem.problem_id for x in sampler.propose(1000)] == ["0"]
    assert stream.num_drawn - drawn == 4, "one pass, no more"
    drawn = stream.num_drawn
    assert sampler.propose(1000) == [], "cooling problems wait while a chain is open"
    assert stream.num_drawn - drawn <= 4


def test_when_every_problem_is_retired_the_search_ends_at_once():
    stream = CyclingStream(5)
    config = FixedConfig(history=HistoryConfig(retire_at=0.9, retire_min_attempts=8))
    sampler = FixedSampler(config, stream, seed=0)
    for launch in sampler.propose(1000):
        sampler.observe(outcome(launch, [1.0] * 8))
    drawn = stream.num_drawn
    assert sampler.propose(1000) == []
    assert stream.num_drawn == drawn
    assert sampler.stats()["num_retired"] == 5


def test_an_endless_stream_that_repeats_a_pending_problem_is_not_searched_for_ever():
    class Stuck(CyclingStream):
        def next_problem(self):
            self.num_drawn = 0
            return super().next_problem()

    sampler = FixedSampler(FixedConfig(), Stuck(None), seed=0)
    assert len(sampler.propose(1000)) == 1


def test_a_chain_ends_only_once():
    sampler = make()
    first, second = sampler.propose(16)
    sampler.observe(outcome(first, [1.0, 0.0]))
    with pytest.raises(ValueError, match="chain 0 is not open"):
        sampler.observe(outcome(first, [1.0, 0.0]))
    sampler.abandon(second.chain_id)
    with pytest.raises(ValueError, match="chain 1 is not open"):
        sampler.abandon(second.chain_id)
