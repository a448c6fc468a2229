"""The kinds of advantages and their rescalings, and what objective each of them climbs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import Chain, batch_advantages, power_advantages
from pipeline.errors import ConfigError
from pipeline.learner_config import AdvantageConfig


def advantages(rewards, kind, kept=None, **options):
    rewards = np.asarray(rewards, dtype=np.float64)
    kept = np.arange(rewards.size) if kept is None else np.asarray(kept)
    config = AdvantageConfig(kind=kind, **{"clip": 100.0} | options)
    return batch_advantages([Chain(rewards, kept, (rewards.size,))], config)[0]


def test_leave_one_out_compares_with_the_others():
    np.testing.assert_allclose(advantages([1, 0, 0, 0.5], "leave_one_out"), [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])
    assert advantages([1.0], "leave_one_out").tolist() == [0.0]


def test_max_rl_divides_by_the_pass_rate():
    np.testing.assert_allclose(advantages([1, 0, 0, 0], "max_rl"), [3, -1, -1, -1])
    assert not advantages([0, 0, 0], "max_rl").any()


def test_max_rl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match="a reward is -1"):
        advantages([1, -1, -1], "max_rl")


def test_batch_normalisation_gives_the_batch_unit_spread():
    chains = [
        Chain(np.array([1.0, 0.0, 0.0, 0.0]), np.arange(4), (4,)),
        Chain(np.array([1.0, 1.0, 0.0]), np.array([1, 2]), (3,)),
        Chain(np.ones(3), np.arange(3), (3,)),
    ]
    got = np.concatenate(batch_advantages(chains, AdvantageConfig(kind="batch_standardized")))
    plain = np.concatenate(batch_advantages(chains, AdvantageConfig(kind="centered")))
    assert got.std() == pytest.approx(1.0)
    np.testing.assert_allclose(got, plain / plain.std())


def test_batch_normalisation_of_nothing_is_nothing():
    config = AdvantageConfig(kind="batch_standardized")
    assert batch_advantages([], config) == []
    assert not batch_advantages([Chain(np.ones(3), np.arange(3), (3,))], config)[0].any()
    # One kept rollout has no spread; dividing by it would give a NaN.
    (lone,) = batch_advantages([Chain(np.array([0.0, 1.0]), np.array([1]), (2,))], config)
    assert lone.tolist() == [0.5]


def test_ratio_multiplies_by_the_share_that_is_kept():
    chain = [0, 0, 0, 0, 0, 0, 0, 1]
    plain = advantages(chain, "centered", [4, 5, 6, 7])
    np.testing.assert_allclose(advantages(chain, "centered", [4, 5, 6, 7], rescale="ratio"), plain / 2)
    np.testing.assert_allclose(advantages(chain, "centered", [4, 5, 6, 7], rescale="count_ratio"), plain)


def test_count_ratio_divides_by_the_mean_share():
    chains = [
        Chain(np.array([0.0, 0.0, 0.0, 1.0]), np.array([2, 3]), (4,)),  # a half is kept
        Chain(np.array([0.0, 1.0]), np.arange(2), (2,)),  # all of it
    ]
    plain = batch_advantages(chains, AdvantageConfig(kind="centered"))
    got = batch_advantages(chains, AdvantageConfig(kind="centered", rescale="count_ratio"))
    np.testing.assert_allclose(got[0], plain[0] * 0.5 / 0.75)
    np.testing.assert_allclose(got[1], plain[1] * 1.0 / 0.75)


@pytest.mark.parametrize("kind", ["centered", "standardized", "leave_one_out", "batch_standardized", "max_rl"])
def test_one_failure_among_nearly_right_answers_is_no_zero_variance_group(kind):
    got = advantages([0.0] + [0.95] * 7, kind)
    assert np.isfinite(got).all() and got[0] < 0 < got[1]
    equal = np.full(8, 0.95, dtype=np.float32)
    assert not advantages(equal, kind).any()


# --- the power family ---


def test_power_coefficients_are_the_binomial_series():
    failures = np.zeros(6)
    ones = (1,) * 6
    baselines = 1 / (2 + np.arange(6))  # one success of two in the prior, then failures only
    np.testing.assert_allclose(power_advantages(failures, ones, 1.0), -baselines)
    halves = [math.comb(2 * i, i) / 4**i for i in range(6)]
    np.testing.assert_allclose(power_advantages(failures, ones, 0.5), -baselines * halves)
    assert power_advantages(failures, ones, 0.0).tolist() == [-0.5, 0, 0, 0, 0, 0]
    assert power_advantages(np.zeros(0), (), 1.0).size == 0


def test_power_baseline_never_knows_the_reward_it_is_compared_with():
    rng = np.random.default_rng(0)
    rounds = (2, 3, 1)
    rewards = rng.random(6)
    before = power_advantages(rewards, rounds, 1.0) - rewards
    for index in range(6):
        other = rewards.copy()
        other[index] += 1.0
        moved = power_advantages(other, rounds, 1.0) - other - before
        assert abs(moved[index]) < 1e-12  # its own baseline stays
        start = 0 if index < 2 else 2 if index < 5 else 5
        assert not np.abs(moved[:start]).any() or np.abs(moved[:start]).max() < 1e-12  # so do those of earlier rounds


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_power_weighs_a_problem_by_its_pass_rate_to_the_minus_alpha(alpha, p):
    """Exact: sum over all chains that stop at the first success, of P(chain) sum A_i s_i; s = 1/p or -1/(1 - p)."""
    cap, weight = 400, 0.0
    for length in range(1, cap + 1):
        rewards = np.zeros(length)
        rewards[-1] = 1.0
        scores = np.where(rewards > 0, 1 / p, -1 / (1 - p))
        probability = (1 - p) ** (length - 1) * p
        weight += probability * float((power_advantages(rewards, (1,) * length, alpha) * scores).sum())
    assert weight == pytest.approx(p**-alpha, rel=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1))
def test_power_is_finite_and_trains_groups_without_variance(rewards, alpha):
    got = advantages(rewards, "power", alpha=alpha)
    assert np.isfinite(got).all()
    assert advantages([1.0], "power").tolist() == [0.5]


def test_power_refuses_to_be_rescaled():
    with pytest.raises(ValueError, match="predictable"):
        AdvantageConfig(kind="power", rescale="anchor")


# --- credit for the best of a chain ---


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("centered", [-0.4, 0.6, -0.4, 0.6, -0.4]),
        ("standardized", [-math.sqrt(2 / 3), math.sqrt(1.5), -math.sqrt(2 / 3), math.sqrt(1.5), -math.sqrt(2 / 3)]),
        ("leave_one_out", [-0.5, 0.75, -0.5, 0.75, -0.5]),
        ("max_rl", [-1, 1.5, -1, 1.5, -1]),
    ],
)
def test_credit_for_the_best_counts_the_best_as_one_and_the_rest_as_nothing(kind, expected):
    graded = [0.25, 0.75, 0.5, 0.75 - 1e-9, 0.0]
    np.testing.assert_allclose(advantages(graded, kind, credit="best"), expected)
    below_zero = [r - 3 for r in graded]
    np.testing.assert_allclose(advantages(below_zero, kind, credit="best"), expected)


def test_the_best_is_that_of_the_whole_chain():
    graded = [0.5, 0.0, 0.25, 0.25]
    np.testing.assert_allclose(advantages(graded, "centered", [1, 2, 3], credit="best"), [-0.25] * 3)
    anchored = advantages([0.5, 0.25, 0.5, 0.75, 1.0], "centered", [2, 3, 4], credit="best", rescale="anchor")
    np.testing.assert_allclose(anchored, [-0.4, -0.4, 0.8])


@given(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=12),
    st.sampled_from(["centered", "standardized", "leave_one_out", "batch_standardized", "max_rl"]),
    st.sampled_from(["none", "anchor", "ratio", "count_ratio"]),
)
def test_credit_for_the_best_changes_no_advantage_of_zeros_and_ones(rewards, kind, rescale):
    both = [advantages(rewards, kind, credit=credit, rescale=rescale).tolist() for credit in ("reward", "best")]
    assert both[0] == both[1]


def test_equal_rewards_have_no_best():
    assert not advantages([0.5, 0.5, 0.5 + 1e-9], "centered", credit="best").any()


def test_power_refuses_a_credit_that_knows_later_draws():
    with pytest.raises(ValueError, match="depends on later draws"):
        AdvantageConfig(kind="power", credit="best")
