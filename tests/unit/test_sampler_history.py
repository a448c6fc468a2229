import math
import random

import msgspec
import pytest
from sampler_world import outcome

from samplers.base import Launch, Problem
from samplers.history import MAX_COOL_DOWN, History, HistoryConfig, HistoryState

PROBLEM = Problem("p", "test", "prompt", "answer")


def observe(history: History, *rounds: list[float]) -> None:
    """One visit to the problem."""
    for round, rewards in enumerate(rounds):
        history.observe("p", outcome(Launch(0, round, PROBLEM, len(rewards), 0), rewards), max(rewards))


def test_posterior_counts_all_attempts_and_the_reported_rate_first_rounds_only():
    history = History(HistoryConfig(), num_problems=1)
    assert history.posterior_mean("p") == 0.5
    assert history.first_round_rate("p") is None
    observe(history, [0, 0, 0, 0], [1, 0, 0, 0])
    observe(history, [1, 0, 0, 0])
    assert history.posterior_mean("p", 2, 3) == (2 + 2) / (5 + 12)
    assert history.first_round_rate("p") == 1 / 8
    record = history.records.get("p")
    assert record is not None
    assert (record.visits, record.attempts, record.correct, record.best_reward) == (2, 12, 2, 1)


def test_first_round_rate_is_unbiased_under_stopping_where_the_plain_rate_is_not():
    p, num_visits = 0.3, 4000
    rng = random.Random(0)
    history = History(HistoryConfig(), num_problems=1)
    plain_rates = []
    for _ in range(num_visits):
        draws = [0.0]
        while (draws[-1] if len(draws) > 1 else 0.0) == 0.0:
            draws.append(float(rng.random() < p))
        draws = draws[1:]
        plain_rates.append(1 / len(draws))
        observe(history, *([r] for r in draws))
    rate = history.first_round_rate("p")
    assert rate is not None
    assert abs(rate - p) < 3 * math.sqrt(p * (1 - p) / num_visits)
    mean = math.fsum(plain_rates) / num_visits
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in plain_rates) / num_visits)
    assert abs(mean - -p * math.log(p) / (1 - p)) < 3 * spread / math.sqrt(num_visits)
    assert abs(history.posterior_mean("p") - p) < 0.02


def test_cool_down_doubles_with_each_solved_visit_in_a_row_and_ends_with_a_failure():
    history = History(HistoryConfig(cool_down=3), num_problems=1)
    skips = []
    for _ in range(7):
        observe(history, [1, 1])
        record = history.records.get("p")
        assert record is not None
        skips.append(record.skips_left)
    assert skips == [3, 6, 12, 24, 48, MAX_COOL_DOWN, MAX_COOL_DOWN]
    observe(history, [1, 0])
    record = history.records.get("p")
    assert record is not None
    assert (record.skips_left, record.solved_streak) == (0, 0)


def test_a_streak_of_thousands_of_visits_stays_capped():
    history = History(HistoryConfig(cool_down=1), num_problems=1)
    for _ in range(3000):
        observe(history, [1])
    record = history.records.get("p")
    assert record is not None
    assert (record.skips_left, record.solved_streak) == (MAX_COOL_DOWN, 3000)


def test_retirement_needs_both_the_rate_and_the_attempts():
    history = History(HistoryConfig(retire_at=0.75, retire_min_attempts=8), num_problems=1)
    observe(history, [1, 1, 1, 1])
    assert history.num_retired == 0
    observe(history, [1, 0, 0, 0])  # 5 of 8
    assert history.num_retired == 0
    observe(history, [1, 1, 1, 1])  # 9 of 12
    assert history.num_retired == 1
    observe(history, [0, 0, 0, 0])
    record = history.records.get("p")
    assert record is not None
    assert record.retired, "retirement is permanent"
    assert history.num_retired == 1


def test_retirement_is_off_by_default():
    history = History(HistoryConfig(), num_problems=1)
    for _ in range(50):
        observe(history, [1, 1, 1, 1])
    assert history.num_retired == 0


def test_an_endless_stream_leaves_no_records():
    history = History(HistoryConfig(cool_down=1, retire_at=0.5), num_problems=None)
    observe(history, [1, 1, 0, 0], [1, 1])
    assert history.records.get("p") is None
    assert history.stats() == {"num_retired": 0.0, "first_round_pass_rate": 0.5}
    assert msgspec.to_builtins(history.state())["records"] == {}


def test_state_survives_msgpack_exactly():
    history = History(HistoryConfig(cool_down=2, retire_at=0.5, retire_min_attempts=4), num_problems=3)
    observe(history, [0.1, 1 / 3], [-2.5])
    observe(history, [1, 1, 1, 1])
    assert history.num_retired == 1
    saved = msgspec.msgpack.encode(msgspec.to_builtins(history.state()))
    other = History(HistoryConfig(cool_down=2, retire_at=0.5, retire_min_attempts=4), num_problems=3)
    other.restore(msgspec.convert(msgspec.msgpack.decode(saved), HistoryState))
    assert other.records.get("p") == history.records.get("p")
    assert other.stats() == history.stats()


@pytest.mark.parametrize("bad", [{"cool_down": -1}, {"retire_at": 0.0}, {"retire_at": 1.1}, {"retire_min_attempts": 0}])
def test_config_limits(bad: dict[str, float]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, HistoryConfig)
