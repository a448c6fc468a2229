"""Centred advantages, ratios, normalisers and packing as pure functions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import Chain, batch_advantages, has_zero_variance
from learner.corrections import effective_sample_frac, importance_ratios, k3_divergence
from learner.losses import Tokens, batch_loss, rollout_normalizers
from learner.packing import SHARED_COST, collate, micro_batches
from pipeline.learner_config import AdvantageConfig, CispoConfig, CorrectionsConfig

REWARDS = st.lists(st.floats(-2, 2, allow_nan=False, width=32), min_size=1, max_size=24)


def centered(rewards, kept=None, kind="centered", anchor=False, clip=100.0):
    rewards = np.asarray(rewards, dtype=np.float64)
    kept = np.arange(rewards.size) if kept is None else np.asarray(kept)
    config = AdvantageConfig(kind=kind, rescale="anchor" if anchor else "none", clip=clip)
    return batch_advantages([Chain(rewards, kept, (rewards.size,))], config)[0]


# --- advantages ---


def test_baseline_counts_the_attempts_that_are_not_kept():
    chain = [0, 0, 0, 0, 0, 0, 0, 1]  # four stale failures, then three fresh ones and a success
    np.testing.assert_allclose(centered(chain, [4, 5, 6, 7]), [-1 / 8] * 3 + [7 / 8])


def test_anchor_scales_the_kept_failures_by_seven_thirds():
    chain = [0, 0, 0, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(centered(chain, [4, 5, 6, 7], anchor=True), [-7 / 24] * 3 + [7 / 8])


def test_anchor_with_aged_out_attempts():
    np.testing.assert_allclose(centered([0, 0, 0, 0, 1], [2, 3, 4], anchor=True), [-0.4, -0.4, 0.8])


def test_anchor_changes_nothing_when_the_whole_chain_is_kept():
    np.testing.assert_allclose(centered([0, 1, 0, 0.5], anchor=True), centered([0, 1, 0, 0.5]))


def test_anchor_leaves_a_one_sided_group_alone():
    np.testing.assert_allclose(centered([0, 0, 1, 1], [2, 3], anchor=True), [0.5, 0.5])
    np.testing.assert_allclose(centered([0, 0, 1, 1], [0, 1], anchor=True), [-0.5, -0.5])


def test_standardized_uses_the_population_deviation_of_the_chain():
    got = centered([0, 0, 0, 1], [2, 3], kind="standardized")
    np.testing.assert_allclose(got, [-0.25 / math.sqrt(3 / 16), 0.75 / math.sqrt(3 / 16)])


def test_clip_bounds_both_sides():
    chain = [0] * 99 + [1]
    assert centered(chain, [99], kind="standardized", clip=4.0) == [4.0]
    assert centered([1 - r for r in chain], [99], kind="standardized", clip=4.0) == [-4.0]


@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.1, 0.95, 1e6])
def test_equal_rewards_have_zero_variance_also_after_float32(reward):
    jittered = np.full(7, reward, dtype=np.float32).astype(np.float64)
    jittered[3] = reward  # the float64 value that the others were rounded from
    assert has_zero_variance(jittered)
    for kind in ("centered", "standardized"):
        assert not centered(jittered, kind=kind, anchor=True).any()


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0] + [0.95] * 7, [0.5, 0.501]])
def test_different_rewards_do_not(rewards):
    assert not has_zero_variance(np.asarray(rewards))
    assert centered(rewards).any()


@given(REWARDS, st.booleans(), st.sampled_from(["centered", "standardized"]), st.data())
def test_advantages_are_finite_bounded_and_ordered_as_the_rewards(rewards, anchor, kind, data):
    kept = data.draw(st.lists(st.sampled_from(range(len(rewards))), unique=True))
    got = centered(rewards, np.array(kept, dtype=np.int64), kind=kind, anchor=anchor, clip=4.0)
    assert got.shape == (len(kept),) and np.isfinite(got).all() and (np.abs(got) <= 4.0).all()
    by_reward = got[np.argsort(np.asarray(rewards)[kept], kind="stable")]
    assert (np.diff(by_reward) >= -1e-9).all()


@given(REWARDS, st.data())
def test_an_anchored_group_with_both_signs_sums_to_zero(rewards, data):
    kept = np.array(data.draw(st.lists(st.sampled_from(range(len(rewards))), unique=True)), dtype=np.int64)
    plain = centered(rewards, kept)
    anchored = centered(rewards, kept, anchor=True, clip=1e12)
    assert (np.sign(anchored) == np.sign(plain)).all()
    if (plain > 0).any() and (plain < 0).any():
        assert abs(anchored.sum()) <= 1e-9 * max(1.0, np.abs(anchored).max())


# --- corrections ---


def test_ratios_are_clipped_and_carry_no_gradient():
    learner = torch.tensor([-1.0, -1.0, -90.0, 0.0], requires_grad=True)
    engine = torch.tensor([-1.0, -2.0, 0.0, -90.0])
    ratios = importance_ratios(learner, engine)
    torch.testing.assert_close(ratios, torch.tensor([1.0, math.e, math.exp(-20), math.exp(20)]))
    assert not ratios.requires_grad


def test_effective_sample_frac():
    assert effective_sample_frac(torch.full((5,), 3.0)) == pytest.approx(1.0)
    assert effective_sample_frac(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_frac(torch.tensor([1.0, 2.0])) == pytest.approx(9 / 10)
    assert effective_sample_frac(torch.zeros(0)) == 1.0


def test_k3_is_unbiased_for_the_divergence_to_the_engine():
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    learner = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    expectation = (engine.exp() * k3_divergence(learner, engine)).sum()
    torch.testing.assert_close(expectation, (engine.exp() * (engine - learner)).sum())
    assert (k3_divergence(engine, engine) == 0).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(AssertionError, match="shapes"):
        importance_ratios(torch.zeros(3), torch.zeros(4))
    with pytest.raises(AssertionError, match="rank"):
        importance_ratios(torch.zeros(3, 1), torch.zeros(3, 1))
    zeros, index = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    tokens = Tokens(zeros, zeros, zeros, zeros, index, index)
    for name, wrong in (("advantages", torch.zeros(3, 1)), ("normalizers", torch.zeros(4))):
        with pytest.raises(AssertionError, match=name):
            batch_loss(tokens._replace(**{name: wrong}), CispoConfig(), CorrectionsConfig(), math.inf)


# --- normalisers ---


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 10, 1 / 10, 1 / 10]),
        ("sequence", [1 / (3 * 2), 1 / (3 * 3), 1 / (3 * 5)]),
        ("prompt", [1 / (2 * 5), 1 / (2 * 5), 1 / (2 * 5)]),
        ("launched", [1 / 8, 1 / 8, 1 / 8]),
    ],
)
def test_normalizers(aggregation, expected):
    got = rollout_normalizers(np.array([2, 3, 5]), np.array([0, 0, 1]), aggregation, num_attempts=8)
    np.testing.assert_allclose(got, expected)


def test_an_empty_completion_counts_in_the_means_it_adds_nothing_to():
    num_tokens, groups = np.array([4, 0]), np.array([0, 1])
    assert rollout_normalizers(num_tokens, groups, "token", 2)[0] == 1 / 4
    assert rollout_normalizers(num_tokens, groups, "sequence", 2)[0] == 1 / 8
    assert rollout_normalizers(num_tokens, groups, "prompt", 2)[0] == 1 / 8
    assert np.isfinite(rollout_normalizers(np.array([0, 0]), groups, "prompt", 0)).all()


# --- packing ---


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        cost = len(batch) * max(lengths[i] for i in batch)
        assert cost <= budget or len(batch) == 1
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(flat, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60)), max_size=40), st.integers(1, 100))
def test_rows_of_one_prompt_lie_together_within_the_budget(rows, budget):
    """The prompt of n tokens is n times the id n."""
    prompts = [np.full(num, num) for num, _ in rows]
    lengths = [num + read for num, read in rows]

    def cost(batch):
        first_of = {prompts[i].size: i for i in reversed(batch)}
        return sum(lengths[i] - (i != first_of[prompts[i].size]) * (1 - SHARED_COST) * prompts[i].size for i in batch)

    batches = micro_batches(lengths, budget, prompts)
    flat = [i for batch in batches for i in batch]
    assert sorted(flat) == list(range(len(rows)))
    assert all(cost(batch) <= budget + 1e-9 or len(batch) == 1 for batch in batches)
    for one, other in itertools.pairwise(batches):
        assert cost([*one, other[0]]) > budget - 1e-9, "no micro-batch ends before it must"
    assert len(list(itertools.groupby(prompts[i].size for i in flat))) == len({num for num, _ in rows})
    for _, group in itertools.groupby(flat, key=lambda i: prompts[i].size):
        own = [lengths[i] for i in group]
        assert own == sorted(own, reverse=True)
    assert not flat or lengths[flat[0]] == max(lengths)


def test_collate_points_at_the_positions_that_predict():
    prompts, completions = [[5, 6], [7], [5, 6]], [[8, 9], [1], [4, 3, 2]]
    batch = collate([np.array(p) for p in prompts], [np.array(c) for c in completions])
    assert batch.input_ids.tolist() == [5, 6, 8, 7, 4, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 2, 3]
    assert batch.positions.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.targets.tolist() == [8, 9, 1, 4, 3, 2]
    assert batch.rows.shapes == ((1, 4), (1, 3), (1, 1)), "rows shorter by a quarter begin another block"
    assert batch.rows.tokens.tolist() == [0, 1, 4, 5, 0, 1, 2, 3]
    assert batch.rows.places.tolist() == [4, 5, 6, 7, 2, 3]
    assert batch.rows.again.tolist() == [[0, 1], [0, 1]]
