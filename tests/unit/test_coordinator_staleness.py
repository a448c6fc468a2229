"""What bounds lag, and what each bound costs: the order of batches, the three policies, the hold on a low ESS."""

import math
import random
from typing import NamedTuple

import pytest
from fakes import Simulation

from pipeline.checkpoints import latest
from pipeline.config import Config, parse_config
from pipeline.coordinator.batcher import Batcher, Cut
from pipeline.engines.fake import FakeScript
from pipeline.messages import Group, Rollout, Verdict
from samplers.base import Problem

MAX_LAG = 2


def config(**changes) -> Config:
    raw = {
        "max_rollouts": 1600,
        "engines": {"slots": 24},
        "learner": {"batch_size": 16},
        "sampler": {"kind": "fixed", "num_rollouts": 2, "drop_zero_variance": False},
        "sampling": {"max_new_tokens": 400},
        "staleness": {"max_lag": MAX_LAG},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 0},
    }
    for key, value in changes.items():
        table, _, leaf = key.partition("__")
        if leaf:
            raw[table][leaf] = value
        else:
            raw[table] = value
    return parse_config(raw, "test")


def log_normal(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(2.5, 0.8)))


def lags(run: Simulation) -> list[int]:
    """Of every trained token's span, at its step."""
    return [
        step - span.policy_version
        for step, batch in enumerate(run.batches)
        for group in batch.groups
        for rollout in group.rollouts
        for span in rollout.version_spans
    ]


class Outcome(NamedTuple):
    """`busy` is the share of turns in which the learner trained; `left_out` that of rollouts not trained."""

    max_lag: int
    left_out: float
    busy: float
    mean_tokens: float


def simulate(path, policy: str, order: str) -> Outcome:
    path.mkdir()
    cfg = config(staleness__policy=policy, learner__batch_order=order)
    run = Simulation(path, cfg, script=FakeScript(length=log_normal), step_turns=12)
    while run.coordinator.state != "training":
        run.turn()
    turns = busy = 0
    while run.coordinator.state == "training":
        run.turn()
        turns += 1
        busy += run.batch is not None
    run.run()
    rollouts = [r for b in run.batches for g in b.groups for r in g.rollouts]
    stale = run.ledger.counts["stale"]
    mean_tokens = sum(r.num_tokens for r in rollouts) / len(rollouts)
    return Outcome(max(lags(run)), stale / (stale + len(rollouts)), busy / turns, mean_tokens)


def test_the_trade_off_between_lag_what_is_dropped_and_an_idle_learner(tmp_path):
    """As long as some rollouts take many times the mean, one of the three has to give."""
    correct = simulate(tmp_path / "correct", "correct", "arrival")
    drop = simulate(tmp_path / "drop", "drop", "arrival")
    pace = simulate(tmp_path / "pace", "pace", "arrival")
    ticket = simulate(tmp_path / "ticket", "correct", "ticket")
    assert correct.max_lag > 2 * MAX_LAG, "admission alone does not bound the maximum"
    assert drop.max_lag == pace.max_lag == ticket.max_lag == MAX_LAG
    assert correct.left_out == pace.left_out == ticket.left_out == 0.0
    assert 0.1 < drop.left_out < 0.4
    assert drop.mean_tokens < 0.9 * correct.mean_tokens, "what is dropped is long"
    assert drop.busy == pytest.approx(correct.busy, abs=0.05)
    assert pace.busy == pytest.approx(ticket.busy, abs=0.05)
    assert correct.busy > 1.5 * pace.busy, "a bound without drops is paid for in idle time"


@pytest.mark.parametrize("batch_by", ["attempts", "completions", "groups"])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_pace_trains_nothing_older_than_max_lag_and_ends(tmp_path, batch_by, max_lag):
    cfg = config(
        max_rollouts=1200,
        learner={"batch_by": batch_by, "batch_size": {"attempts": 24, "completions": 12, "groups": 6}[batch_by]},
        sampler={"kind": "never_give_up"},
        staleness={"max_lag": max_lag, "policy": "pace"},
    )
    script = FakeScript(lambda p: 0.6 if p.level == "easy" else 0.05, length=log_normal)
    run = Simulation(tmp_path, cfg, script=script, step_turns=9)
    run.run()
    assert run.coordinator.state == "finished"
    assert max(lags(run)) <= max_lag
    assert len(run.batches) >= 8


@pytest.mark.parametrize("batch_by", ["completions", "groups"])
def test_max_lag_0_is_synchronous_whatever_a_batch_counts(tmp_path, batch_by):
    """A chain that closes with more completions than its round launched used to fill a batch while others still ran."""
    cfg = config(
        max_rollouts=1200,
        learner={"batch_by": batch_by, "batch_size": 12 if batch_by == "completions" else 4},
        sampler={"kind": "fixed", "num_rollouts": 5},
        staleness={"max_lag": 0},
    )
    run = Simulation(tmp_path, cfg, script=FakeScript(length=log_normal), step_turns=9)
    run.run()
    assert max(lags(run)) == 0
    assert len(run.batches) >= 8


def test_by_ticket_groups_are_trained_in_the_order_of_their_launch(tmp_path):
    cfg = config(learner__batch_order="ticket", max_rollouts=1200)
    run = Simulation(tmp_path, cfg, script=FakeScript(length=log_normal), step_turns=3)
    run.run()
    chains = [g.chain_id for b in run.batches for g in b.groups]
    assert chains == sorted(chains) and len(chains) > 400


def test_a_batch_in_launch_order_stops_at_a_gap_and_takes_what_is_due_beyond_its_size():
    rollout = Rollout(1, 1, 0, b"", b"", b"", (), "stop", "", "e", 0, 0)

    def group(number: int) -> Group:
        return Group(number, Problem("p", "list", "?", "1"), (rollout,), (Verdict("correct", 1.0),), (0,), (1.0,), (1,))

    batcher = Batcher("groups", 1)
    for ticket, version in ((3, 2), (1, 0), (2, 0)):
        batcher.add_round(1, group(ticket), ticket, version)
    assert not batcher.can_take(Cut(gap=0)), "an older launch still runs"
    assert batcher.can_take(Cut(gap=2))
    assert [g.chain_id for g in batcher.take(Cut(gap=math.inf, due=0))] == [1, 2]
    assert batcher.num_waiting == 3, "one left, one beyond the size, one in training"
    assert batcher.num_batches == 3


# --- the hold on a low effective sample size ---


def held_run(path, bad_step: int = 4) -> Simulation:
    cfg = config(
        max_rollouts=1600,
        staleness={"max_lag": 3, "min_ess": 0.5},
        daemon={"checkpoint_every_steps": 3},
        learner={"batch_size": 40},
    )
    script = FakeScript(min_tokens=20, max_tokens=60)
    return Simulation(path, cfg, script=script, step_turns=30, ess=lambda step: 0.3 if step == bad_step else 0.95)


def in_flight(run: Simulation) -> int:
    return run.coordinator.flow.book.num_in_flight


def test_a_low_ess_holds_launches_until_what_was_launched_before_is_trained(tmp_path):
    run = held_run(tmp_path)
    while run.coordinator.policy_version < 4:
        run.turn()
    flow, launched = run.coordinator.flow, run.ledger.counts["launched"]
    assert flow.is_holding and in_flight(run)
    while flow.is_holding:
        assert run.ledger.counts["launched"] == launched
        run.turn()
    resumed_at = run.coordinator.policy_version
    assert resumed_at > 4
    run.run()
    assert run.coordinator.state == "finished" and run.ledger.counts["launched"] == 1600
    left = [r for g in run.batches[resumed_at].groups for r in g.rollouts if r.oldest_version < resumed_at]
    assert sum(r.num_tokens for r in left) and len(left) < 40, "less than a batch was left, and came first"
    assert {r.oldest_version for g in run.batches[resumed_at].groups[len(left) // 2 :] for r in g.rollouts} == {
        resumed_at
    }
    assert run.coordinator.tally.counters["ess_holds"] == 1
    assert any(
        "effective sample size 0.30 is under staleness.min_ess = 0.5" in w for w in run.coordinator.tally.warnings
    )
    assert [r["metrics"]["staleness/ess_holds"] for r in run.sink.of_kind("step")][2:5] == [0, 1, 1]


def test_a_hold_survives_a_kill(tmp_path):
    run = held_run(tmp_path)
    while not run.coordinator.flow.is_holding:
        run.turn()
    launched = run.ledger.counts["launched"]
    run.turn()
    run.ledger._db.close()  # as a kill does
    path = latest(tmp_path)
    assert path is not None
    again = Simulation(tmp_path, run.config, script=run.script, step_turns=30, resume=path)
    assert again.coordinator.flow.is_holding, "from the checkpoint and the journal since"
    while again.coordinator.flow.is_holding:
        assert again.ledger.counts["launched"] <= launched + 1
        again.turn()
    again.run()
    assert again.coordinator.state == "finished"


def test_a_floor_of_0_never_holds(tmp_path):
    cfg = config(max_rollouts=400, staleness={"max_lag": 1, "min_ess": 0.0})
    run = Simulation(tmp_path, cfg, ess=lambda step: 0.01)
    run.run()
    assert run.coordinator.tally.counters["ess_holds"] == 0
