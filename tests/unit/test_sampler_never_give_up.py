import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from sampler_world import CyclingStream, outcome

from samplers.base import Decision, Launch
from samplers.history import HistoryConfig
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpSampler, uniform
from samplers.retention import kept_attempts


def make(num_problems: int | None = 100, seed: int = 0, **config: object) -> NeverGiveUpSampler:
    return NeverGiveUpSampler(msgspec.convert(config, NeverGiveUpConfig), CyclingStream(num_problems), seed)


def run_chain(sampler: NeverGiveUpSampler, rounds: Sequence[Sequence[float]]) -> tuple[list[Launch], Decision]:
    """Play one chain through `rounds`, launching nothing else; the launches of its rounds and its last decision."""
    (launch,) = sampler.propose(1)
    launches = [launch]
    (decision,) = sampler.observe(outcome(launch, rounds[0]))
    for rewards in rounds[1:]:
        assert decision.action == "retry"
        (launch,) = sampler.propose(1)
        launches.append(launch)
        (decision,) = sampler.observe(outcome(launch, rewards))
    assert len({x.chain_id for x in launches}) == 1
    return launches, decision


# --- rounds ---


def test_doubling_rounds_until_the_cap():
    launches, decision = run_chain(make(), [[0] * n for n in (4, 4, 8, 16, 32)])
    assert [x.num_rollouts for x in launches] == [4, 4, 8, 16, 32]
    assert [x.round for x in launches] == [0, 1, 2, 3, 4]
    assert (decision.action, decision.reason, decision.keep) == ("drop", "gave_up", ())


def test_the_last_round_is_cut_to_the_cap():
    launches, decision = run_chain(make(max_attempts=10), [[0] * n for n in (4, 4, 2)])
    assert [x.num_rollouts for x in launches] == [4, 4, 2]
    assert decision.reason == "gave_up"


def test_probability_rounds_keep_their_size_and_honour_the_cap():
    launches, decision = run_chain(make(retry="probability", p_ngu=1.0, max_attempts=10), [[0] * n for n in (4, 4, 2)])
    assert [x.num_rollouts for x in launches] == [4, 4, 2]
    assert decision.reason == "gave_up"


def test_a_problem_that_fails_partly_judged_rounds_still_reaches_the_cap():
    launches, _ = run_chain(make(max_attempts=16), [[0], [0, 0], [0] * 8])
    assert [x.num_rollouts for x in launches] == [4, 4, 8], "the cap counts launched rollouts"


@pytest.mark.parametrize(
    ("rewards", "action", "reason"),
    [
        ([0, 0, 1, 0], "train", "mixed"),
        ([0, 0.95, 0.95, 0.95], "train", "mixed"),
        ([1, 1, 1, 1], "drop", "solved"),
        ([0, 0, 0, 0], "retry", "retry"),
        ([0.5, 0.5, 0.5, 0.5], "retry", "retry"),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], "retry", "retry"),
        ([0.9999999, 1, 1, 1], "drop", "solved"),
        ([], "drop", "unverifiable"),
    ],
)
def test_first_round(rewards: list[float], action: str, reason: str):
    _, decision = run_chain(make(), [rewards])
    assert (decision.action, decision.reason) == (action, reason)
    assert decision.keep == (tuple(range(4)) if action == "train" else ())


def test_without_a_retry_the_first_round_says_why_it_teaches_nothing():
    once = {"retry": "probability", "p_ngu": 0.0}
    assert run_chain(make(**once), [[0] * 4])[1].reason == "all_wrong"
    assert run_chain(make(**once), [[0.5] * 4])[1].reason == "zero_variance"


# --- acceptance ---


@pytest.mark.parametrize(
    ("accept", "rounds", "trained"),
    [
        ("better", [[0] * 4, [0, 0, 0, 1]], True),
        ("better", [[0.5] * 4, [0, 0.25, 0.5, 0.5]], False),
        ("better", [[0.5] * 4, [0, 0, 0, 0.75]], True),
        ("better", [[0.5] * 4, [0, 0, 0, 0.5 + 1e-9]], False),
        ("better", [[0] * 4, [1] * 4], True),
        ("different", [[0.5] * 4, [0, 0.25, 0.5, 0.5]], True),
        ("different", [[0.5] * 4, [0.25] * 4], True),
        ("different", [[0.5] * 4, [0.5] * 4], False),
        ("solved", [[0, 0.5, 0.5, 0.5]], False),
        ("solved", [[0, 0.5, 0.5, 1]], True),
        ("solved", [[0, 0.5, 0.5, 0.5], [0.75] * 4], False),
        ("solved", [[0, 0.5, 0.5, 0.5], [1] * 4], True),
        ("history", [[0, 0.5, 0.5, 0.5]], True),
        ("history", [[0] * 4, [0, 0, 0, 0.25]], True),
    ],
)
def test_accept_rules(accept: str, rounds: list[list[float]], trained: bool):
    _, decision = run_chain(make(accept=accept), rounds)
    expected = ("improved" if len(rounds) > 1 else "mixed") if trained else "retry"
    assert decision.reason == expected


def test_history_must_beat_the_best_ever_or_reach_the_maximum():
    sampler = make(num_problems=1, accept="history")
    assert run_chain(sampler, [[0, 0, 0, 0.5]])[1].reason == "mixed"
    assert run_chain(sampler, [[0, 0, 0, 0.5], [0, 0, 0, 0.75]])[1].reason == "improved"
    assert run_chain(sampler, [[0, 0, 0, 1]])[1].reason == "mixed"
    assert run_chain(sampler, [[0, 0, 0.75, 0.75], [0, 0, 0, 1]])[1].reason == "improved"


def test_history_without_records_falls_back_on_the_chain():
    sampler = make(num_problems=None, accept="history")
    assert run_chain(sampler, [[0.5] * 4, [0, 0, 0, 0.5], [0, 0.75] * 4])[1].reason == "improved"


def test_a_chain_with_variance_that_is_never_accepted_is_given_up():
    _, decision = run_chain(make(accept="solved", max_attempts=8), [[0, 0, 0, 0.5], [0, 0, 0, 0.5]])
    assert (decision.action, decision.reason) == ("drop", "gave_up")


def test_a_custom_maximum_reward():
    assert run_chain(make(max_reward=0.5), [[0.5] * 4])[1].reason == "solved"
    assert run_chain(make(max_reward=2.0), [[1.0] * 4])[1].reason == "retry"


# --- what is trained ---


def test_all_successes_and_the_last_failures_are_kept():
    rounds = [[0] * 4, [0] * 4, [0, 1, 0, 0, 1, 0, 0, 0]]
    assert run_chain(make(keep_failures=8), rounds)[1].keep == (6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    assert run_chain(make(keep_failures=2), rounds)[1].keep == (9, 12, 14, 15)
    assert run_chain(make(keep_failures=0), rounds)[1].keep == tuple(range(16))


@pytest.mark.parametrize(
    ("rewards", "sizes", "ages", "failures", "versions", "kept"),
    [
        ([0, 0, 0, 1], [2, 2], [9, 0], 0, 4, (2, 3)),
        ([0, 0, 0, 1], [2, 2], [4, 0], 0, 4, (0, 1, 2, 3)),
        ([0, 0, 1, 1], [2, 2], [9, 0], 0, 4, (1, 2, 3)),  # the accepting round holds no failure: the newest aged one
        ([0, 0, 1, 1], [2, 2], [9, 9], 0, 0, (1, 2, 3)),  # the accepting round never ages out
        ([0.5, 0.5, 0, 0], [2, 2], [9, 0], 0, 4, (1, 2, 3)),  # "different": the only successes are old
        ([0, 0, 0, 0, 1], [3, 2], [3, 3], 1, -1, (3, 4)),
        ([0, 0.25, 0.75, 1], [4], [0], 1, -1, (1, 2, 3)),  # above the mean is a success
        ([0, 0.95, 0.95, 0.95], [4], [0], 8, -1, (0, 1, 2, 3)),
        ([0, 1], [0, 2], [5, 0], 1, 0, (0, 1)),
    ],
)
def test_retention(rewards, sizes, ages, failures, versions, kept):
    assert kept_attempts(rewards, sizes, ages, failures, versions) == kept


def test_age_is_judged_when_the_chain_is_accepted():
    """Four stale failures, three fresh ones and a success: what is kept of the paper's example."""
    sampler = make(keep_versions=4)
    (launch,) = sampler.propose(1)
    assert sampler.observe(outcome(launch, [0] * 4, learner_version=10, oldest_version=9))[0].action == "retry"
    (launch,) = sampler.propose(1)
    (decision,) = sampler.observe(outcome(launch, [0, 0, 0, 1], learner_version=14, oldest_version=12))
    assert decision.keep == (4, 5, 6, 7)


# --- sharing the budget ---


def fail_fresh(sampler: NeverGiveUpSampler, num_chains: int) -> None:
    """Leave `num_chains` retries waiting and nothing in flight."""
    for launch in sampler.propose(4 * num_chains):
        assert sampler.observe(outcome(launch, [0] * 4))[0].action == "retry"


def test_retries_take_their_share_and_fresh_problems_the_rest():
    sampler = make(max_retry_frac=0.75)
    fail_fresh(sampler, 30)
    launches = sampler.propose(80)
    assert [x.round for x in launches] == [1] * 15 + [0] * 5
    assert [x.chain_id for x in launches[:15]] == list(range(15)), "longest wait first"
    assert sampler.stats()["retry_frac_in_flight"] == 0.75
    assert [x.round for x in sampler.propose(4)] == [0], "60 + 4 retries of 84 would be more than their share"
    assert [x.round for x in sampler.propose(4)] == [1]
    assert sampler.stats()["retry_frac_in_flight"] == 64 / 88


@pytest.mark.parametrize("concurrency", [48, 64, 200])
def test_neither_side_starves_when_every_problem_fails(concurrency: int):
    """Each failing problem asks for 60 retries after 4 first rollouts, far more than the share of 0.75."""
    sampler = make(num_problems=None, max_waiting=10**6)
    in_flight: list[Launch] = []
    rollouts = [0, 0]
    rng = random.Random(0)
    for _ in range(1000):
        for launch in sampler.propose(concurrency - sum(x.num_rollouts for x in in_flight)):
            rollouts[launch.round > 0] += launch.num_rollouts
            in_flight.append(launch)
        launch = in_flight.pop(rng.randrange(len(in_flight)))
        sampler.observe(outcome(launch, [0] * launch.num_rollouts))
    retry_frac = rollouts[1] / sum(rollouts)
    assert 0.5 < retry_frac < 0.8, f"{retry_frac:.2f} of the rollouts were retries"


def test_no_retry_passes_one_that_waits_for_room():
    sampler = make(num_problems=None, max_retry_frac=1.0)
    run_chain(sampler, [[0] * 4, [0] * 4, [0] * 8])
    (large,) = sampler.propose(1)
    b, c, d = sampler.propose(12)
    for launch in (b, c, large, d):
        sampler.observe(outcome(launch, [0] * launch.num_rollouts))
    b, c = sampler.propose(8)
    assert [(x.chain_id, x.round) for x in (b, c)] == [(1, 1), (2, 1)]
    # The next in line, 32 rollouts of chain 0, does not fit; the 4 of chain 3 would, but came later.
    assert [x.round for x in sampler.propose(8)] == [0, 0]
    for launch in (b, c):
        sampler.observe(outcome(launch, [0, 0, 0, 1]))
    assert [(x.chain_id, x.num_rollouts) for x in sampler.propose(4)] == [(0, 32)]


def test_a_round_larger_than_the_share_still_gets_its_turn():
    sampler = make(num_problems=None, max_retry_frac=0.5)
    fail_fresh(sampler, 1)
    for size in (4, 8, 16, 32):
        (launch,) = sampler.propose(1)
        assert (launch.round > 0, launch.num_rollouts) == (True, size)
        sampler.observe(outcome(launch, [0] * size))


def test_with_no_fresh_problem_retries_take_everything():
    sampler = make(num_problems=10, max_retry_frac=0.25)
    fail_fresh(sampler, 10)
    assert [x.round for x in sampler.propose(1000)] == [1] * 10
    sampler = make(num_problems=10, max_retry_frac=0.0)
    fail_fresh(sampler, 9)
    assert [x.round for x in sampler.propose(8)] == [0, 1], "a share of 0 leaves retries what fresh problems do not use"


def test_a_full_line_turns_new_chains_away_and_serves_those_let_in():
    sampler = make(num_problems=None, max_waiting=2)
    first, second, third = sampler.propose(12)
    assert sampler.observe(outcome(first, [0] * 4))[0].action == "retry"
    assert sampler.observe(outcome(second, [0] * 4))[0].action == "retry"
    (decision,) = sampler.observe(outcome(third, [0] * 4))
    assert (decision.action, decision.reason) == ("drop", "all_wrong")
    first, fourth = sampler.propose(8)
    assert (first.round, fourth.round) == (1, 0)
    assert sampler.observe(outcome(fourth, [0] * 4))[0].action == "retry"
    assert sampler.observe(outcome(first, [0] * 4))[0].action == "retry", "a chain that was let in goes on"


def test_the_line_of_retries_stays_bounded_when_the_policy_collapses():
    sampler = make(num_problems=None, max_waiting=16)
    in_flight: list[Launch] = []
    for _ in range(2000):
        in_flight += sampler.propose(64 - sum(x.num_rollouts for x in in_flight))
        launch = in_flight.pop(0)
        sampler.observe(outcome(launch, [0] * launch.num_rollouts))
    assert sampler.stats()["retries_waiting"] <= 16 + 64 / 4


def test_a_chain_that_waits_for_its_retry_holds_its_problem():
    stream = CyclingStream(3)
    sampler = NeverGiveUpSampler(NeverGiveUpConfig(), stream, 0)
    fail_fresh(sampler, 3)
    drawn = stream.num_drawn
    assert sorted(x.round for x in sampler.propose(12)) == [1, 1, 1]
    assert sampler.propose(100) == []
    assert stream.num_drawn == drawn, "everything is pending: nothing to look for"


# --- the coin ---


def test_the_coin_does_not_depend_on_the_order_in_which_rounds_finish():
    def decisions(reverse: bool) -> dict[int, str]:
        sampler = make(num_problems=None, retry="probability", p_ngu=0.5, seed=3)
        launches = sampler.propose(400)
        ordered = list(reversed(launches)) if reverse else launches
        return {x.chain_id: sampler.observe(outcome(x, [0] * 4))[0].action for x in ordered}

    assert decisions(reverse=False) == decisions(reverse=True)
    assert len(set(decisions(reverse=False).values())) == 2


def test_the_coin_is_uniform_and_independent_across_rounds_chains_and_seeds():
    draws = [[uniform(s, c, r) for r in range(10)] for s in (0, 1, -7, 2**70) for c in range(250)]
    flat = [u for row in draws for u in row]
    assert len(set(flat)) == len(flat)
    assert all(0 <= u < 1 for u in flat)
    standard_error = math.sqrt(1 / 12 / len(flat))
    assert abs(math.fsum(flat) / len(flat) - 0.5) < 4 * standard_error
    successive = math.fsum((row[i] - 0.5) * (row[i + 1] - 0.5) for row in draws for i in range(9)) / (len(draws) * 9)
    assert abs(successive) < 4 / 12 / math.sqrt(len(draws) * 9)


@pytest.mark.parametrize(("p", "round_size", "p_ngu"), [(0.1, 4, 0.9), (0.05, 2, 0.75), (0.2, 4, 0.0)])
def test_expected_attempts_and_acceptance(p: float, round_size: int, p_ngu: float):
    """E[N] = k/(1 - p_ngu q^k) and P(a success) = (1 - q^k)/(1 - p_ngu q^k) for rounds of k (arXiv 2609.13443)."""
    num_chains = 2000
    rng = random.Random(11)
    sampler = make(num_problems=None, retry="probability", p_ngu=p_ngu, round_size=round_size, max_attempts=0)
    attempts: dict[int, int] = {}
    solved: dict[int, bool] = {}
    while len(solved) < num_chains:
        for launch in sampler.propose(round_size * 50):
            rewards = [float(rng.random() < p) for _ in range(launch.num_rollouts)]
            attempts[launch.chain_id] = attempts.get(launch.chain_id, 0) + len(rewards)
            (decision,) = sampler.observe(outcome(launch, rewards))
            if decision.action != "retry":
                solved[launch.chain_id] = decision.action == "train" or decision.reason == "solved"
    # The first chains by id: chains picked because they ended early would be short ones.
    ended = [c for c in range(num_chains // 2) if c in solved]
    assert len(ended) == num_chains // 2
    q_round = (1 - p) ** round_size
    rounds_mean = 1 / (1 - p_ngu * q_round)
    rounds_std = math.sqrt(p_ngu * q_round) * rounds_mean
    mean = math.fsum(attempts[c] for c in ended) / len(ended)
    assert abs(mean - round_size * rounds_mean) <= 3 * round_size * rounds_std / math.sqrt(len(ended))
    accept = (1 - q_round) * rounds_mean
    rate = sum(solved[c] for c in ended) / len(ended)
    assert abs(rate - accept) < 3 * math.sqrt(accept * (1 - accept) / len(ended))


# --- ends ---


def test_an_abandoned_chain_is_forgotten_in_flight_and_waiting():
    sampler = make(num_problems=2)
    first, second = sampler.propose(8)
    sampler.observe(outcome(first, [0] * 4))
    sampler.abandon(first.chain_id)  # waits for its retry
    sampler.abandon(second.chain_id)  # in flight
    assert sampler.stats()["open_chains"] == sampler.stats()["retries_waiting"] == 0
    assert sampler.stats()["retry_frac_in_flight"] == 0
    assert [x.round for x in sampler.propose(8)] == [0, 0], "both problems may be launched again"
    with pytest.raises(ValueError, match="chain 0 is not open"):
        sampler.abandon(first.chain_id)


def test_an_outcome_that_is_not_in_flight_is_refused():
    sampler = make()
    (launch,) = sampler.propose(1)
    sampler.observe(outcome(launch, [0] * 4))
    with pytest.raises(ValueError, match="chain 0 has no round 0 in flight"):
        sampler.observe(outcome(launch, [0] * 4))
    with pytest.raises(ValueError, match="chain 0 has no round 1 in flight"):
        sampler.observe(outcome(Launch(0, 1, launch.problem, 4, 1), [0] * 4))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_attempts": 0},
        {"max_attempts": 0, "retry": "probability", "p_ngu": 1.0},
        {"max_attempts": 3},
        {"p_ngu": 1.1},
        {"keep_versions": -2},
        {"max_reward": math.nan},
        {"accept": "worse"},
    ],
)
def test_config_limits(bad: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, NeverGiveUpConfig)


def test_a_partial_history_table_keeps_the_cool_down():
    config = msgspec.convert({"history": {"retire_at": 0.9}}, NeverGiveUpConfig)
    assert config.history.cool_down == 1
    assert HistoryConfig().cool_down == 0
