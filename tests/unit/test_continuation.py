"""Rollouts cut off by their length and gone on with: what the sampler asks for and what the coordinator makes of it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fakes import Simulation
from sampler_world import CyclingStream

from pipeline.config import Config, parse_config
from pipeline.engines.fake import FakeScript
from pipeline.errors import ConfigError
from pipeline.messages import Rollout, WorkItems
from samplers.base import Decision, Launch, Outcome
from samplers.never_give_up import NeverGiveUpConfig, NeverGiveUpSampler

# --- the sampler ---


def make(**config: Any) -> NeverGiveUpSampler:
    fields = {"seq_multiplier": 3, "keep_failures": 0} | config
    return NeverGiveUpSampler(msgspec.convert(fields, NeverGiveUpConfig), CyclingStream(9), seed=0)


def observe(
    sampler: NeverGiveUpSampler, launch: Launch, rewards: Sequence[float], lengths: Sequence[float]
) -> Decision:
    """Rollouts of a whole number of limits were cut off."""
    correct, cut = tuple(r >= 1 for r in rewards), tuple(length == int(length) for length in lengths)
    outcome = Outcome(launch.chain_id, launch.round, tuple(rewards), correct, cut, 0, 0, 0, tuple(lengths))
    (decision,) = sampler.observe(outcome)
    return decision


def next_launch(sampler: NeverGiveUpSampler) -> Launch:
    (launch,) = sampler.propose(1)
    restored = make()
    restored.restore(sampler.state())
    assert restored.state() == sampler.state()
    return launch


def test_a_retry_goes_on_with_what_was_cut_off_and_draws_the_rest():
    sampler = make()
    decision = observe(sampler, next_launch(sampler), [0, 0, 0, 0], [1, 0.5, 1, 0.25])
    assert (decision.action, decision.resume) == ("retry", (0, 2))
    launch = next_launch(sampler)
    assert (launch.num_rollouts, launch.num_resumed) == (4, 2)
    # Judged so far: two failures of the first round. The round's first two are those that went on.
    decision = observe(sampler, launch, [1, 0, 0, 0], [1.5, 2, 0.5, 1])
    assert (decision.action, decision.keep, decision.resume) == ("train", (0, 1, 2, 3, 4, 5), ())


def test_a_rollout_grows_up_to_the_multiple_and_counts_once():
    sampler = make(max_attempts=8)
    sizes, lengths = [], [1, 1, 1, 1]
    launch = next_launch(sampler)
    for _ in range(4):
        sizes.append((launch.num_rollouts, launch.num_resumed))
        decision = observe(sampler, launch, [0] * launch.num_rollouts, lengths)
        if decision.action == "drop":
            break
        launch = next_launch(sampler)
        lengths = [length + 1 for length in lengths if length < 3][: launch.num_resumed]
        lengths += [0.5] * (launch.num_rollouts - launch.num_resumed)
    # Four rollouts three times as long; at that length they end, and four new ones use the attempts up.
    assert sizes == [(4, 0), (4, 4), (4, 4), (4, 0)]
    assert decision.reason == "gave_up"


def test_what_is_right_or_of_unknown_length_is_not_gone_on_with():
    sampler = make(accept="solved", max_reward=2.0)
    decision = observe(sampler, next_launch(sampler), [1, 0.5, 0, 0], [1, 1, 0.5, 0.5])
    assert decision.resume == (1,)
    sampler = make()
    launch = next_launch(sampler)
    (decision,) = sampler.observe(Outcome(launch.chain_id, 0, (0.0,) * 4, (False,) * 4, (True,) * 4, 0, 0, 0))
    assert decision.resume == ()


def test_only_the_final_verdict_counts():
    """A partial reward that is taken back neither sets the bar nor counts in the history."""
    sampler = make(round_size=2, retry="probability", p_ngu=1.0)
    observe(sampler, next_launch(sampler), [0.5, 0.5], [1, 1])
    assert sampler.state()["history"].records["0"].attempts == 0
    decision = observe(sampler, next_launch(sampler), [0.25, 0], [1.5, 1.5])
    assert (decision.action, decision.reason, decision.keep) == ("train", "improved", (0, 1))
    assert sampler.state()["history"].records["0"].attempts == 2


def test_a_lost_coin_ends_the_chain_with_all_that_was_cut_off():
    decision = observe(sampler := make(retry="probability", p_ngu=0.0), next_launch(sampler), [0] * 4, [1] * 4)
    assert (decision.action, decision.resume) == ("drop", ())


# --- the coordinator ---


class Watched(Simulation):
    """Keeps every rollout that the engines gave and every work item that they got."""

    def __init__(self, *arguments: Any, **options: Any):
        self.rollouts: list[Rollout] = []
        super().__init__(*arguments, **options)

    def _deliver(self, name: str, ended: list[Any]) -> None:
        self.rollouts += [item for item in ended if isinstance(item, Rollout)]
        super()._deliver(name, ended)


def config(**changes: Any) -> Config:
    raw = {
        "max_rollouts": 400,
        "engines": {"slots": 8},
        "learner": {"batch_size": 40},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "sampling": {"max_new_tokens": 6},
        "sampler": {"seq_multiplier": 2, "keep_failures": 0},
    }
    return parse_config(raw | changes, "test")


def test_a_run_trains_rollouts_that_were_put_together_over_rounds(tmp_path):
    run = Watched(tmp_path, config(), script=FakeScript(lambda p: 0.1, fail_frac=0.05), num_engines=2, unknown_every=29)
    run.run()  # checks the books at every turn
    counts = run.ledger.counts
    assert counts["continued"] > 20 and run.ledger.num_open == 0
    trained = [r for batch in run.batches for g in batch.groups for r in g.rollouts]
    long = [r for r in trained if r.num_tokens > 6]
    assert len(long) > 5 and max(r.num_tokens for r in trained) <= 12
    beginnings = {}
    for rollout in run.rollouts:
        if rollout.finish_reason == "length":
            beginnings.setdefault(rollout.chain_id, []).append(rollout)
    across = 0
    for rollout in long:
        starts = [b.version_array().tolist() for b in beginnings[rollout.chain_id] if b.round < rollout.round]
        assert rollout.version_array()[:6].tolist() in starts
        across += rollout.version_array()[0] < rollout.version_array()[6]
        rollout.check()
    assert across
    for batch in run.batches:
        for group in batch.groups:
            assert sum(group.round_sizes) == group.num_attempts
            assert [group.chain_rewards[i] for i in group.draw_indices] == [v.reward for v in group.verdicts]
            assert len({r.attempt_id for r in group.rollouts}) == len(group.rollouts)
    generated = sum(engine.stats()["tokens"] for engine in run.engines.values())
    assert run.coordinator.flow.tally.counters["generated_tokens"] <= generated


def test_every_attempt_may_be_interrupted_at_a_length_of_its_own(tmp_path):
    cut = {"min_tokens": 3, "max_tokens": 8, "answer_tokens": 4, "phrase": "now say it", "thought_end": "!"}
    run = Watched(tmp_path, config(sampler={"kind": "fixed"}, sampling={"max_new_tokens": 12, "interruption": cut}))
    run.run()
    items = [w for _, message in run.sent if isinstance(message, WorkItems) for w in message.items]
    assert {w.interruption.position for w in items if w.interruption} == set(range(3, 9))
    assert {w.purpose for w in items if w.interruption} == {"train", "eval"}
    interrupted = [r for r in run.rollouts if r.forced_spans]
    assert run.coordinator.flow.tally.counters["interrupted"] == len(interrupted) > 50
    trained = [r for batch in run.batches for g in batch.groups for r in g.rollouts]
    assert any(r.forced_spans for r in trained)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"interruption": {"max_tokens": 4}}, "min_tokens"),
        ({"interruption": {"min_tokens": 4, "max_tokens": 3}}, "min_tokens"),
        ({"interruption": {"min_tokens": 4, "max_tokens": 5, "answer_tokens": 2}}, "max_new_tokens"),
        ({"interruption": {"phrase": ""}}, "empty"),
        ({"interruption": {"min_tokens": 1, "max_tokens": 2, "answer_tokens": 2}}, "only one"),
    ],
)
def test_lengths_that_cannot_be_are_refused(bad, words):
    with pytest.raises(ConfigError, match=words):
        config(sampling={"max_new_tokens": 6} | bad)
