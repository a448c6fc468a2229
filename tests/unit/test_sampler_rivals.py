"""The rules of the rival samplers: how many rollouts, for which problem, and what they cost."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampler_world import CyclingStream, outcome

from samplers.base import Decision, Launch, Outcome, Problem, Sampler
from samplers.estimates import EstimateConfig, Estimates
from samplers.fixed import FixedConfig
from samplers.greso import GresoConfig
from samplers.gvm import GvmConfig
from samplers.history import HistoryConfig
from samplers.isocompute import IsoComputeConfig, isocompute_rollouts
from samplers.knapsack import KnapsackConfig, knapsack_gain
from samplers.planned import allocate
from samplers.registry import SamplerConfig, make_sampler
from samplers.reinforce_ada import ReinforceAdaConfig, balanced
from samplers.two_phase import PilotCommitConfig, SpeedConfig

RIGHT, WRONG = 1.0, 0.0


def make(config: SamplerConfig, num_problems: int | None = 10, seed: int = 0) -> Sampler:
    return make_sampler(config, CyclingStream(num_problems), seed)


def answer(sampler: Sampler, launch: Launch, num_right: int, num_tokens: int | None = None) -> Decision:
    """The decision on a round with its right answers first."""
    rewards = [RIGHT] * num_right + [WRONG] * (launch.num_rollouts - num_right)
    result = outcome(launch, rewards)
    if num_tokens is not None:
        result = msgspec.structs.replace(result, num_tokens=num_tokens)
    (decision,) = sampler.observe(result)
    return decision


# --- estimates ---


def visit(estimates: Estimates, problem: Problem, rewards: list[float], round: int = 0) -> None:
    estimates.observe(problem, outcome(Launch(0, round, problem, len(rewards), 0), rewards))


def test_an_unknown_problem_is_taken_for_one_of_its_level():
    estimates = Estimates(EstimateConfig(), num_problems=4)
    hard, easy = Problem("h", "t", "", "", "hard"), Problem("e", "t", "", "", "easy")
    assert estimates.pass_rate(hard) == 0.5
    for _ in range(200):
        visit(estimates, hard, [WRONG] * 8)
        visit(estimates, easy, [RIGHT] * 8)
    assert estimates.pass_rate(Problem("h2", "t", "", "", "hard")) < 0.05
    assert estimates.pass_rate(Problem("e2", "t", "", "", "easy")) > 0.95
    assert estimates.pass_rate(Problem("n", "t", "", "", "new")) == 0.5


def test_an_estimate_moves_from_the_level_to_the_problem_and_forgets_old_visits():
    config = EstimateConfig(decay=0.5, prior_strength=2.0)
    estimates = Estimates(config, num_problems=4)
    problem = Problem("a", "t", "", "")
    visit(estimates, problem, [RIGHT] * 4)
    prior = (1 + 1) / (2 + 1)
    assert estimates.pass_rate(problem) == pytest.approx((2 * prior + 4) / (2 + 4))
    visit(estimates, problem, [WRONG] * 4)
    prior = (1 + 63 / 64) / (2 + 1 + 63 / 64)
    assert estimates.pass_rate(problem) == pytest.approx((2 * prior + 2) / (2 + 6))


def test_a_later_round_counts_for_the_problem_but_not_for_its_level():
    estimates = Estimates(EstimateConfig(), num_problems=4)
    problem, other = Problem("a", "t", "", ""), Problem("b", "t", "", "")
    visit(estimates, problem, [WRONG] * 8)
    before = estimates.pass_rate(problem), estimates.pass_rate(other)
    visit(estimates, problem, [RIGHT] * 8, round=1)
    assert estimates.pass_rate(problem) > before[0]
    assert estimates.pass_rate(other) == before[1]


def test_lengths_fall_back_to_all_problems_for_a_new_level():
    estimates = Estimates(EstimateConfig(prior_strength=1.0), num_problems=4)
    short = Problem("a", "t", "", "", "short")
    assert estimates.mean_tokens(short) == 1.0
    visit(estimates, short, [WRONG] * 2)  # 10 tokens each
    assert estimates.mean_tokens(short) == 10.0
    assert estimates.mean_tokens(Problem("b", "t", "", "", "long")) == 10.0


def test_an_endless_stream_leaves_no_record_of_its_problems():
    estimates = Estimates(EstimateConfig(), num_problems=None)
    visit(estimates, Problem("a", "t", "", ""), [RIGHT] * 8)
    assert estimates.state().problems == {}
    assert estimates.pass_rate(Problem("b", "t", "", "")) > 0.5


# --- fixed ---


def test_without_the_filter_groups_of_equal_rewards_are_trained():
    sampler = make(FixedConfig(4, drop_zero_variance=False))
    solved, failed, single = sampler.propose(12)
    assert answer(sampler, solved, 4) == Decision(0, "train", "solved", (0, 1, 2, 3))
    assert answer(sampler, failed, 0) == Decision(1, "train", "all_wrong", (0, 1, 2, 3))
    (decision,) = sampler.observe(outcome(single, [WRONG]))
    assert decision.action == "drop", "a group of one has no baseline"


# --- reinforce_ada ---


def test_est_gives_scale_over_the_root_of_the_pass_rate_within_its_limits():
    config = ReinforceAdaConfig(
        rule="est", scale=4, min_rollouts=5, max_rollouts=32, estimate=EstimateConfig(prior_strength=1e-9)
    )
    sampler = make(config, num_problems=4)
    first = sampler.propose(10**6)
    assert [x.num_rollouts for x in first] == [round(4 / math.sqrt(0.5))] * 4
    for launch, num_right in zip(first, [6, 3, 1, 0], strict=True):
        answer(sampler, launch, num_right)
    second = sampler.propose(10**6)
    assert [x.problem.problem_id for x in second] == ["0", "1", "2", "3"]
    assert [x.num_rollouts for x in second] == [5, round(4 / math.sqrt(3 / 6)), round(4 / math.sqrt(1 / 6)), 32]


def test_seq_pos_goes_on_until_one_is_right():
    sampler = make(ReinforceAdaConfig(rule="seq_pos", round_size=3, max_rounds=4, keep=0))
    (launch,) = sampler.propose(1)
    assert answer(sampler, launch, 0) == Decision(0, "retry", "retry")
    (again,) = sampler.propose(1)
    assert (again.chain_id, again.round, again.num_rollouts) == (0, 1, 3)
    assert answer(sampler, again, 1) == Decision(0, "train", "mixed", tuple(range(6)))


def test_a_sequential_chain_ends_after_max_rounds():
    sampler = make(ReinforceAdaConfig(rule="seq_pos", round_size=2, max_rounds=3))
    decisions = [answer(sampler, sampler.propose(1)[0], 0) for _ in range(3)]
    assert [d.action for d in decisions] == ["retry", "retry", "drop"]
    assert decisions[-1].reason == "all_wrong"


def test_seq_balance_waits_for_both_sides_and_keeps_the_newest_of_each():
    sampler = make(ReinforceAdaConfig(rule="seq_balance", round_size=4, max_rounds=4, keep=4))
    (launch,) = sampler.propose(1)
    assert answer(sampler, launch, 3).action == "retry", "only one is wrong"
    (launch,) = sampler.propose(1)
    assert answer(sampler, launch, 1) == Decision(0, "train", "mixed", (2, 4, 6, 7))


def test_seq_balance_trains_what_it_has_after_the_last_round():
    sampler = make(ReinforceAdaConfig(rule="seq_balance", round_size=4, max_rounds=2, keep=4))
    answer(sampler, sampler.propose(1)[0], 4)
    assert answer(sampler, sampler.propose(1)[0], 3) == Decision(0, "train", "mixed", (4, 5, 6, 7))


@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=20), keep=st.integers(2, 12))
def test_a_balanced_group_has_both_sides_and_is_as_even_as_the_chain_allows(rewards: list[float], keep: int):
    if len(set(rewards)) == 1:
        return
    kept = balanced(rewards, keep)
    mean = math.fsum(rewards) / len(rewards)
    above = sum(rewards[i] > mean for i in kept)
    assert list(kept) == sorted(set(kept))
    assert len(kept) == min(keep, len(rewards))
    assert 0 < above < len(kept)
    all_above = sum(r > mean for r in rewards)
    uneven = above < keep // 2 or len(kept) - above < keep - keep // 2
    if uneven and len(kept) == keep:
        assert above == all_above or len(kept) - above == len(rewards) - all_above


# --- knapsack and gvm ---


gain_tables = st.lists(
    st.lists(st.integers(0, 6), min_size=6, max_size=6).map(lambda xs: sorted(xs, reverse=True)), min_size=1, max_size=4
)


@given(tables=gain_tables, extra=st.integers(0, 30), low=st.integers(0, 2), span=st.integers(0, 4))
def test_the_allocation_is_the_best_there_is(tables: list[list[int]], extra: int, low: int, span: int):
    high = min(low + span, 6)
    total = low * len(tables) + extra % ((high - low) * len(tables) + 1)
    gains: list[Callable[[int], float]] = [lambda n, t=t: float(t[n]) if n < 6 else 0.0 for t in tables]
    sizes = allocate(gains, total, low, high)
    assert sum(sizes) == total and all(low <= n <= high for n in sizes)
    everything = itertools.product(range(low, high + 1), repeat=len(tables))
    best = max(value(tables, s) for s in everything if sum(s) == total)
    assert value(tables, sizes) == best


def value(tables: list[list[int]], sizes: tuple[int, ...] | list[int]) -> int:
    return sum(sum(table[:n]) for table, n in zip(tables, sizes, strict=True))


@pytest.mark.parametrize("p", [1e-9, 0.03, 0.4, 0.97, 1 - 1e-9])
def test_knapsack_gains_add_up_to_the_published_value_and_never_grow(p: float):
    gains = [knapsack_gain(p)(n) for n in range(40)]
    q = 1 - p
    for n in range(1, 40):
        assert math.fsum(gains[1:n]) == pytest.approx((1 - p**n - q**n) * p * q * q, abs=1e-15)
    assert gains[1:] == sorted(gains[1:], reverse=True)


@pytest.mark.parametrize("config", [KnapsackConfig(window=5), GvmConfig(window=5)])
def test_a_window_spends_exactly_the_uniform_budget(config: SamplerConfig):
    sampler = make(config, num_problems=5)
    rng = random.Random(0)
    spreads = []
    for _ in range(10):
        window = sampler.propose(40)
        sizes = [x.num_rollouts for x in window]
        assert len(window) == 5 and sum(sizes) == 40
        spreads.append(max(sizes) - min(sizes))
        for launch in window:
            right = int(launch.problem.problem_id) / 5
            answer(sampler, launch, sum(rng.random() < right for _ in range(launch.num_rollouts)))
    assert spreads[0] == 0, "nobody can tell fresh problems apart"
    assert spreads[-1] > 2


def test_a_plan_is_handed_out_one_launch_at_a_time_and_survives_a_crash():
    config = KnapsackConfig(window=4)
    sampler = make(config, num_problems=6)
    (first,) = sampler.propose(1)
    saved = msgspec.msgpack.encode(sampler.state())
    stream = CyclingStream(6)
    stream.num_drawn = 4
    other = make_sampler(config, stream, 0)
    other.restore(msgspec.msgpack.decode(saved))
    assert other.stats()["planned"] == 3
    rest = [other.propose(1) for _ in range(6)]
    assert [x.problem.problem_id for launches in rest for x in launches] == ["1", "2", "3", "4", "5"]
    assert first.problem.problem_id == "0"


def test_a_budget_above_the_window_is_planned_at_once():
    sampler = make(GvmConfig(window=2), num_problems=100)
    assert sum(x.num_rollouts for x in sampler.propose(80)) == 80


def test_knapsack_prefers_problems_that_can_be_won_over_solved_ones():
    sampler = make(KnapsackConfig(window=2, estimate=EstimateConfig(prior_strength=0.01)), num_problems=2)
    for _ in range(6):
        solved, hard = sampler.propose(16)
        answer(sampler, solved, solved.num_rollouts)
        answer(sampler, hard, 1)
    solved, hard = sampler.propose(16)
    assert (solved.num_rollouts, hard.num_rollouts) == (2, 14)


def test_gvm_sizes_are_proportional_to_the_norm_over_the_root():
    config = GvmConfig(
        num_rollouts=50, min_rollouts=2, max_rollouts=200, window=4, estimate=EstimateConfig(prior_strength=1e-9)
    )
    sampler = make(config, num_problems=4)
    shares, lengths = [0.04, 0.2, 0.5, 0.9], [100, 100, 400, 25]
    for launch, share, length in zip(sampler.propose(200), shares, lengths, strict=True):
        answer(sampler, launch, round(share * 50), num_tokens=length * 50)
    weights = [math.sqrt(n) / math.sqrt(p + 1e-3 / p) for p, n in zip(shares, lengths, strict=True)]
    for launch, weight in zip(sampler.propose(200), weights, strict=True):
        assert abs(launch.num_rollouts - 200 * weight / sum(weights)) <= 1


# --- speed and pilot_commit ---


@pytest.mark.parametrize(
    ("num_right", "reason"),
    [(0, "all_wrong"), (1, "too_hard"), (2, "retry"), (12, "retry"), (13, "too_easy"), (16, "solved")],
)
def test_a_pilot_is_skipped_deferred_or_committed_to(num_right: int, reason: str):
    sampler = make(PilotCommitConfig())
    (launch,) = sampler.propose(1)
    assert launch.num_rollouts == 16
    assert answer(sampler, launch, num_right).reason == reason
    if reason == "retry":
        (commit,) = sampler.propose(1)
        assert (commit.chain_id, commit.round, commit.num_rollouts) == (launch.chain_id, 1, 48)
        assert answer(sampler, commit, 0) == Decision(launch.chain_id, "train", "mixed", tuple(range(64)))


def test_a_problem_whose_pilot_is_all_right_is_never_drawn_again():
    sampler = make(PilotCommitConfig(), num_problems=2)
    solved, deferred = sampler.propose(32)
    answer(sampler, solved, 16)
    answer(sampler, deferred, 1)
    assert sampler.stats()["num_retired"] == 1
    assert [x.problem.problem_id for x in sampler.propose(1000)] == ["1"]


def test_speed_continues_on_whatever_is_neither_all_right_nor_all_wrong():
    sampler = make(SpeedConfig(screen=4, more=6))
    launches = sampler.propose(20)
    assert [answer(sampler, x, n).reason for x, n in zip(launches, range(5), strict=True)] == [
        "all_wrong",
        "retry",
        "retry",
        "retry",
        "solved",
    ]
    assert [(x.round, x.num_rollouts) for x in sampler.propose(18)] == [(1, 6)] * 3


def test_screening_sees_graded_rewards_that_differ():
    sampler = make(SpeedConfig(screen=2, more=2))
    (launch,) = sampler.propose(1)
    assert sampler.observe(outcome(launch, [0.2, 0.6]))[0].action == "retry"


# --- what a visit costs ---


def q_power(p: float, n: int) -> float:
    return (1 - p) ** n


COSTS: list[tuple[SamplerConfig, Callable[[float], float]]] = [
    (SpeedConfig(screen=4, more=6), lambda p: 4 + 6 * (1 - p**4 - q_power(p, 4))),
    (
        PilotCommitConfig(pilot=4, commit=5, too_easy=0.75, too_hard=0.25),
        lambda p: 4 + 5 * (1 - p**4 - q_power(p, 4)),
    ),
    (
        ReinforceAdaConfig(rule="seq_pos", round_size=3, max_rounds=4, keep=0),
        lambda p: 3 * (1 - q_power(p, 12)) / (1 - q_power(p, 3)),
    ),
    (IsoComputeConfig(a=2, b=2), lambda p: 4),
    (FixedConfig(5), lambda p: 5),
]


@pytest.mark.parametrize(("config", "cost"), COSTS)
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_the_documented_cost_of_a_visit(config: SamplerConfig, cost: Callable[[float], float], p: float):
    num_visits = 1500
    sampler, rng = make(config, num_problems=None), random.Random(7)
    spent: Counter[int] = Counter()
    ended: set[int] = set()
    while len(ended) < num_visits:
        for launch in sampler.propose(40):
            spent[launch.chain_id] += launch.num_rollouts
            rewards = [float(rng.random() < p) for _ in range(launch.num_rollouts)]
            if sampler.observe(outcome(launch, rewards))[0].action != "retry":
                ended.add(launch.chain_id)
    # The first chains by id: chains picked because they ended early would be short ones.
    costs = [spent[c] for c in range(num_visits // 2) if c in ended]
    assert len(costs) == num_visits // 2
    mean = sum(costs) / len(costs)
    deviation = math.sqrt(sum((c - mean) ** 2 for c in costs) / len(costs))
    assert abs(mean - cost(p)) <= 3.5 * deviation / math.sqrt(len(costs)) + 1e-9


# --- isocompute ---


def test_isocompute_grows_from_its_smallest_to_its_saturated_size():
    config = IsoComputeConfig(a=2, b=7, k=3, log10_c0=3)
    sizes = [isocompute_rollouts(config, c) for c in (0, 1, 10, 100, 1000, 10_000, 10**6, 10**12)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (4, 128)
    assert isocompute_rollouts(config, 1000) == round(2 ** ((2 + 7) / 2))


def test_isocompute_counts_what_it_launched():
    config = IsoComputeConfig(a=1, b=4, k=6, log10_c0=1.5)
    sampler = make(config, num_problems=None)
    spent = 0
    for _ in range(40):
        (launch,) = sampler.propose(1)
        assert launch.num_rollouts == isocompute_rollouts(config, spent)
        spent += launch.num_rollouts
    assert sampler.stats()["num_rollouts"] == 16


def test_a_steep_sigmoid_does_not_overflow():
    assert isocompute_rollouts(IsoComputeConfig(k=1e6), 1) == 8
    assert isocompute_rollouts(IsoComputeConfig(k=1e6), 10**6) == 64


# --- greso ---


def with_streaks(config: GresoConfig, num_problems: int, is_easy: bool, streak: int) -> tuple[Sampler, CyclingStream]:
    stream = CyclingStream(num_problems)
    sampler = make_sampler(config, stream, seed=5)
    state: Any = msgspec.to_builtins(sampler.state())
    state["rule"]["streaks"] = {str(i): [is_easy, streak] for i in range(num_problems)}
    sampler.restore(state)
    return sampler, stream


@pytest.mark.parametrize("is_easy", [True, False])
@pytest.mark.parametrize("streak", [1, 2, 5])
def test_an_offer_is_taken_with_probability_p_to_the_streak(is_easy: bool, streak: int):
    sampler, stream = with_streaks(GresoConfig(p_start=0.6, min_explore=0.2), 5000, is_easy, streak)
    num_taken = 300
    for _ in range(num_taken):
        assert len(sampler.propose(1)) == 1
    p = max(0.6**streak, 0.2)
    assert abs(stream.num_drawn - num_taken / p) < 4 * math.sqrt(num_taken * (1 - p)) / p


def test_visits_without_variance_make_a_streak_that_variance_ends():
    sampler = make(GresoConfig(num_rollouts=2, p_start=0.0, min_explore=1e-9), num_problems=3)
    failed, solved, mixed = sampler.propose(6)
    answer(sampler, failed, 0)
    answer(sampler, solved, 2)
    answer(sampler, mixed, 1)
    launches = sampler.propose(100)
    assert [x.problem.problem_id for x in launches] == ["2"]
    assert sampler.propose(100) == [], "the others are declined while a chain is open"


def test_with_nothing_open_a_declined_problem_is_launched_before_one_that_cools_down():
    history = HistoryConfig(cool_down=64)
    sampler = make(GresoConfig(num_rollouts=2, p_start=0.0, min_explore=1e-9, history=history), num_problems=2)
    solved, failed = sampler.propose(4)
    answer(sampler, solved, 2)
    answer(sampler, failed, 0)
    assert [x.problem.problem_id for x in sampler.propose(1)] == ["1"]


@pytest.mark.parametrize(
    ("num_right", "p_easy", "p_hard"), [(0, 0.6, 0.4), (2, 0.4, 0.6), (1, 0.6, 0.6)], ids=["hard", "easy", "mixed"]
)
def test_p_moves_towards_its_target_share(num_right: int, p_easy: float, p_hard: float):
    sampler = make(GresoConfig(num_rollouts=2, step=0.1, adjust_every=8), num_problems=8)
    for launch in sampler.propose(16):
        answer(sampler, launch, num_right)
    stats = sampler.stats()
    assert stats["p_easy"] == pytest.approx(p_easy) and stats["p_hard"] == pytest.approx(p_hard)


def test_p_stays_a_probability():
    sampler = make(GresoConfig(num_rollouts=2, step=0.9, adjust_every=1), num_problems=None)
    for num_right in (1, 1, 0, 0):
        answer(sampler, sampler.propose(1)[0], num_right)
    assert (sampler.stats()["p_easy"], sampler.stats()["p_hard"]) == (1.0, 0.0)


def test_an_endless_stream_is_never_skipped():
    stream = CyclingStream(None)
    sampler = make_sampler(GresoConfig(num_rollouts=2, p_start=0.0), stream, 0)
    for _ in range(20):
        answer(sampler, sampler.propose(1)[0], 0)
    assert stream.num_drawn == 20


# --- mechanics they share ---


def test_waiting_rounds_go_before_fresh_problems():
    sampler = make(SpeedConfig(screen=2, more=3))
    first, second = sampler.propose(4)
    answer(sampler, second, 1)
    answer(sampler, first, 1)
    assert [(x.chain_id, x.round, x.ticket) for x in sampler.propose(7)] == [(1, 1, 2), (0, 1, 3), (2, 0, 4)]


def test_an_outcome_that_is_not_in_flight_is_refused():
    sampler = make(SpeedConfig(screen=2, more=3))
    (launch,) = sampler.propose(1)
    result = outcome(launch, [RIGHT, WRONG])
    sampler.observe(result)
    with pytest.raises(ValueError, match="chain 0 has no round 0 in flight"):
        sampler.observe(result)
    with pytest.raises(ValueError, match="chain 0 has no round 1 in flight"):
        sampler.observe(Outcome(0, 1, (RIGHT,), (True,), (False,), 1, 0, 0))
    sampler.abandon(0)
    assert sampler.stats()["rounds_waiting"] == sampler.stats()["open_chains"] == 0
    with pytest.raises(ValueError, match="chain 0 is not open"):
        sampler.abandon(0)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "reinforce_ada", "min_rollouts": 9, "max_rollouts": 8},
        {"kind": "reinforce_ada", "keep": 0},
        {"kind": "reinforce_ada", "rule": "seq_pos", "keep": 1},
        {"kind": "reinforce_ada", "round_size": 1, "max_rounds": 1},
        {"kind": "reinforce_ada", "scale": 0.0},
        {"kind": "gvm", "num_rollouts": 3},
        {"kind": "gvm", "beta": 0.5},
        {"kind": "knapsack", "num_rollouts": 200},
        {"kind": "knapsack", "estimate": {"decay": 1.5}},
        {"kind": "greso", "min_explore": 0.0},
        {"kind": "pilot_commit", "too_easy": 0.1},
        {"kind": "speed", "low": 0.8, "high": 0.5},
        {"kind": "isocompute", "a": 5.0, "b": 4.0},
    ],
)
def test_rival_config_limits(bad: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, SamplerConfig)
