"""The coordinator against fake peers: books that balance, bounds that hold, runs that end."""

from collections import deque

import fakes
import pytest
from fakes import Simulation

from pipeline.checkpoints import latest
from pipeline.config import Config, parse_config
from pipeline.coordinator.status import describe
from pipeline.engines.base import Failure
from pipeline.engines.fake import FakeEngine, FakeScript
from pipeline.errors import RunFailed
from pipeline.messages import (
    Batch,
    Cancel,
    Hello,
    NewWeights,
    PeerFailed,
    PublishAgain,
    Stop,
    WeightsLoaded,
    WorkItems,
)


def config(**changes) -> Config:
    raw = {
        "max_rollouts": 400,
        "engines": {"slots": 8},
        "learner": {"batch_size": 40},
        "eval": {"every_steps": 2, "final_num_rollouts": 2},
        "daemon": {"checkpoint_every_steps": 3},
    }
    for key, value in changes.items():
        table, _, leaf = key.partition("__")
        if leaf:
            raw.setdefault(table, {})[leaf] = value
        else:
            raw[table] = value
    return parse_config(raw, "test")


def hard_is_rare(problem) -> float:
    return 0.6 if problem.level == "easy" else 0.05


@pytest.mark.parametrize("sampler", ["never_give_up", "fixed"])
@pytest.mark.parametrize("batch_by", ["attempts", "completions", "groups"])
def test_a_run_ends_by_itself_with_balanced_books(tmp_path, sampler, batch_by):
    size = {"attempts": 40, "completions": 16, "groups": 4}[batch_by]
    cfg = config(sampler={"kind": sampler}, learner={"batch_by": batch_by, "batch_size": size})
    run = Simulation(tmp_path, cfg, script=FakeScript(hard_is_rare))
    run.run()
    assert run.coordinator.state == "finished"
    assert run.ledger.num_open == 0
    run.ledger.commit()
    stored = run.ledger.stored_counts()
    assert sum(stored.values()) == run.ledger.counts["launched"] >= 400
    assert stored["trained"] == sum(len(g.rollouts) for b in run.batches for g in b.groups)
    assert [e["phase"] for e in run.sink.of_kind("eval")][:1] == ["before"]
    assert [e["phase"] for e in run.sink.of_kind("eval")][-1:] == ["after"]
    assert len(run.sink.of_kind("step")) == run.version > 3
    assert run.coordinator.flow.tally.counters["retries"] > 0 or sampler == "fixed"
    for batch in run.batches:
        own = sum(group.num_attempts for group in batch.groups)
        assert batch.num_attempts == (size if batch_by == "attempts" else own)


def test_by_attempts_a_step_costs_its_batch_size_in_rollouts(tmp_path):
    run = Simulation(tmp_path, config(sampler={"kind": "fixed"}, eval={"every_steps": 0}))
    run.run()
    assert run.version == 10


def test_hard_problems_are_evaluated_more_often_during_training_alone(tmp_path):
    evaluation = {"every_steps": 2, "num_rollouts": 1, "hard_num_rollouts": 3, "final_num_rollouts": 2}
    run = Simulation(tmp_path, config(eval=evaluation))
    run.run()
    counts = {e["phase"]: e["num_rollouts"] for e in run.sink.of_kind("eval")}
    assert counts["during"] == {"easy": 2, "hard": 6}
    assert counts["before"] == counts["after"] == {"easy": 4, "hard": 4}


def test_max_steps_ends_the_run_at_that_step(tmp_path):
    run = Simulation(tmp_path, config(max_steps=4, max_rollouts=10_000))
    run.run()
    assert run.version == 4
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step_000004"
    assert any(isinstance(m, Cancel) for _, m in run.sent), "what still ran at the end is cancelled at the engine"


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_admission_bounds_lag(tmp_path, max_lag):
    cfg = config(staleness={"max_lag": max_lag}, sampler={"kind": "fixed", "num_rollouts": 4}, max_rollouts=2000)
    run = Simulation(tmp_path, cfg, step_turns=60)
    run.run()
    versions = [
        (step, span.policy_version)
        for step, batch in enumerate(run.batches)
        for g in batch.groups
        for r in g.rollouts
        for span in r.version_spans
    ]
    lags = [step - version for step, version in versions]
    # A chain may straddle the edge of a batch by one round, hence the 1.
    assert max(lags) <= max_lag + 1
    assert max(lags) >= max_lag
    if max_lag == 0:
        assert sum(lags) / len(lags) < 0.1


def test_dropping_by_age_is_counted_and_reported(tmp_path):
    cfg = config(staleness={"max_lag": 1, "policy": "drop"}, sampler={"kind": "never_give_up"}, max_rollouts=1500)
    run = Simulation(tmp_path, cfg, script=FakeScript(hard_is_rare), step_turns=40)
    run.run()
    report = run.sink.of_kind("levels")[-1]["left_out"]
    assert report["rollouts"] == run.ledger.counts["stale"] > 0
    assert report["trained"] == run.ledger.counts["trained"]
    assert report["frac_by_level"]["hard"] > report["frac_by_level"]["easy"], "what needs many rounds is starved"
    assert list(report["frac_by_tokens"]) == ["4", "8", "16"]
    for step, batch in enumerate(run.batches):
        for group in batch.groups:
            assert step - min(s.policy_version for r in group.rollouts for s in r.version_spans) <= 1


def test_weights_change_in_flight_and_no_request_is_restarted(tmp_path):
    run = Simulation(tmp_path, config(max_rollouts=2000), script=FakeScript(min_tokens=30, max_tokens=60), step_turns=5)
    run.run()
    rollouts = [r for b in run.batches for g in b.groups for r in g.rollouts]
    assert sum(len(r.version_spans) > 1 for r in rollouts) > 50
    assert run.ledger.counts["failed"] == 0
    sent = [w.attempt_id for _, m in run.sent if isinstance(m, WorkItems) for w in m.items]
    assert len(sent) == len(set(sent))


def test_unknown_verdicts_and_engine_failures_are_sampled_again_never_counted(tmp_path):
    script = FakeScript(pass_rate=lambda p: 1.0, fail_frac=0.1)
    run = Simulation(tmp_path, config(sampler={"kind": "fixed"}), script=script, unknown_every=7)
    run.run()
    assert run.ledger.counts["failed"] > 20
    # Every rollout is right, so a failed or unjudged one that was counted would show as a wrong one.
    assert run.coordinator.tally.counters["verdict/incorrect"] == 0
    assert run.ledger.counts["trained"] == 0
    assert run.coordinator.tally.counters["empty_batches"] == 10
    assert any("the learner starves" in w for w in run.coordinator.tally.warnings)


def test_a_verifier_that_judges_nothing_stops_the_run_with_the_reason(tmp_path):
    run = Simulation(tmp_path, config(), unknown_every=1)
    with pytest.raises(RunFailed, match=r"could not judge 100%.*scripted"):
        run.run()


class FullEngine(FakeEngine):
    """Its model has no room for `impossible` problems."""

    impossible = staticmethod(lambda problem: True)

    def _admit(self, work):
        return Failure(work.attempt_id, "too long", False) if self.impossible(work.problem) else super()._admit(work)


def test_a_run_whose_every_attempt_is_impossible_ends_with_the_reason(tmp_path, monkeypatch):
    """Its budget would be spent on nothing, or without one it would go on for ever."""
    monkeypatch.setattr(fakes, "FakeEngine", FullEngine)
    run = Simulation(tmp_path, config(max_rollouts=0, max_steps=3))
    with pytest.raises(RunFailed, match=r"none of the last .*too long"):
        run.run()


def test_problems_that_cannot_be_run_cost_the_others_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fakes, "FakeEngine", FullEngine)
    monkeypatch.setattr(FullEngine, "impossible", staticmethod(lambda p: p.level == "hard"))
    run = Simulation(tmp_path, config(max_rollouts=0, max_steps=30))
    run.run()
    assert run.version == 30 and run.ledger.counts["failed"] > 16 * run.config.engines.slots
    assert run.coordinator.state == "finished"


def test_a_lost_engine_costs_only_its_rollouts_in_flight(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    while run.version < 2:
        run.turn()
    held = run.engines["engine-1"].num_in_flight
    assert held > 0
    run.add_engine("engine-1", boot="2")
    run.run()
    assert run.ledger.counts["failed"] == held
    assert run.ledger.num_open == 0


def test_a_late_result_of_a_replaced_attempt_is_ignored(tmp_path):
    run = Simulation(tmp_path, config())
    while run.version < 1:
        run.turn()
    old = run.engines["engine-0"]
    run.add_engine("engine-0", boot="2")
    run.turn()
    for _ in range(30):
        run._deliver("engine-0", old.step())
    run.run()
    assert run.coordinator.tally.counters["late_rollouts"] > 0
    assert run.ledger.num_open == 0


def test_a_peer_of_another_protocol_is_refused_by_name(tmp_path):
    run = Simulation(tmp_path, config())
    run.inbox.append(("old", Hello("engine", "old", "x", 1, 8, protocol=99)))
    run.alive.add("old")
    run.turn()
    assert ("old", Stop()) in run.sent
    assert "old speaks protocol 99" in run.coordinator.tally.warnings[0]
    assert not any(name == "old" and isinstance(m, NewWeights) for name, m in run.sent)


def test_a_stopped_run_resumes_to_the_same_end(tmp_path):
    run = Simulation(tmp_path, config(), script=FakeScript(hard_is_rare))
    while run.version < 4:
        run.turn()
    run.coordinator.stop_requested = True
    run.run()
    assert run.coordinator.state == "stopped"
    assert run.ledger.num_open > 0
    rounds = {c.chain_id: len(c.round_sizes) for c in run.coordinator.flow.book.chains.values()}
    run.ledger.close()
    checkpoint = latest(tmp_path)
    assert checkpoint is not None

    again = Simulation(tmp_path, config(), script=FakeScript(hard_is_rare), resume=checkpoint)
    again.check_books()
    assert {c.chain_id: len(c.round_sizes) for c in again.coordinator.flow.book.chains.values()} == rounds
    again.run()
    assert again.coordinator.state == "finished"
    assert again.version == run.version + len(again.batches)
    assert again.ledger.num_open == 0
    assert again.coordinator.tally.counters["launched"] >= 400
    assert "before" not in [e["phase"] for e in again.sink.of_kind("eval")]


def test_one_batch_at_a_time_and_only_on_request(tmp_path):
    run = Simulation(tmp_path, config(max_rollouts=800))
    in_training = 0
    seen = 0
    while not run.coordinator.ended:
        run.turn()
        batches = [m for _, m in run.sent[seen:] if isinstance(m, Batch)]
        seen = len(run.sent)
        in_training += len(batches)
        assert in_training <= run.version + 1


def test_engines_are_refilled_while_chains_wait(tmp_path):
    run = Simulation(tmp_path, config(max_rollouts=3000, staleness={"max_lag": 8}), step_turns=1)
    idle = busy = 0
    while run.version < 20:
        run.turn()
        if run.coordinator.state == "training" and run.version > 1:
            free = 8 - run.engines["engine-0"].num_in_flight
            idle, busy = idle + free, busy + 8 - free
    # At most the slots that one token's finishers leave free until the next turn.
    assert idle / (idle + busy) < 0.15


@pytest.mark.parametrize("max_lag", [0, 1])
def test_batches_with_nothing_to_train_on_do_not_end_a_run_before_its_budget(tmp_path, max_lag):
    cfg = config(sampler={"kind": "fixed"}, staleness={"max_lag": max_lag})
    run = Simulation(tmp_path, cfg, script=FakeScript(pass_rate=lambda p: 1.0))
    run.run()
    assert run.coordinator.state == "finished"
    assert run.ledger.counts["launched"] == cfg.max_rollouts


def test_an_engine_holds_what_it_says_with_its_weights_not_with_hello(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=1)
    run.inbox.append(("engine-0", WeightsLoaded(0, 0.0, 0.0, 0, slots=3)))
    run.coordinator.turn(0.0)
    assert run.coordinator.flow.work.num_slots == 3


# --- engines that cannot go on ---


def fail(run: Simulation, name: str, reason: str) -> None:
    """As a worker that ends: it says why, and nothing more."""
    run.inbox = deque((sender, message) for sender, message in run.inbox if sender != name)
    run.stopped.add(name)
    run.inbox.append((name, PeerFailed(reason)))


def test_an_engine_that_fails_costs_its_rollouts_in_flight_and_the_run_goes_on_with_the_others(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    while run.version < 2:
        run.turn()
    held = run.engines["engine-1"].num_in_flight
    assert held > 0
    fail(run, "engine-1", "weights 2: the engine's logprobs differ")
    run.turn()
    assert run.ledger.counts["failed"] == held
    status = describe(run.coordinator)
    assert list(status["peers"]) == ["learner", "verifier", "engine-0"] and status["errors"] == {"error/engine": 1}
    assert "engine-1 failed" in status["warnings"][-1] and "logprobs differ" in status["warnings"][-1]
    while run.version < 4:
        run.turn()
    run.stopped.clear()
    run.add_engine("engine-1", boot="2")
    run.run()
    assert run.coordinator.state == "finished" and run.ledger.counts["failed"] == held
    assert "engine-1" in {r.engine_id for batch in run.batches[4:] for g in batch.groups for r in g.rollouts}


def test_the_last_engine_that_fails_ends_the_run_however_often_the_others_come_back(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    while run.version < 2:
        run.turn()
    fail(run, "engine-1", "logprobs differ")
    run.turn()
    run.add_engine("engine-1", boot="2")  # back, but with nothing loaded when the other fails too
    fail(run, "engine-0", "logprobs differ")
    with pytest.raises(RunFailed, match="engine-0: logprobs differ"):
        run.turn()
    run.ledger.close()


def test_another_role_that_fails_ends_the_run(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    run.turn()
    run.inbox.append(("learner", PeerFailed("8 steps in a row were refused")))
    with pytest.raises(RunFailed, match="learner: 8 steps in a row"):
        run.turn()
    run.ledger.close()


# --- weights that engines refuse ---


def test_weights_that_an_engine_found_damaged_are_published_again(tmp_path):
    run, refused = Simulation(tmp_path, config(), num_engines=2), []

    def refuses_once(name: str, version: int) -> bool:
        if (name, version) not in (("engine-0", 0), ("engine-1", 3)) or (name, version) in refused:
            return False
        refused.append((name, version))
        return True

    run.refuses = refuses_once
    run.run()
    assert run.coordinator.state == "finished"
    assert refused == [("engine-0", 0), ("engine-1", 3)]
    assert [m for _, m in run.sent if isinstance(m, PublishAgain)] == [PublishAgain(0), PublishAgain(3)]
    assert describe(run.coordinator)["errors"] == {"error/weights": 2}
    assert run.sink.of_kind("step")[-1]["metrics"]["error/weights"] == 2
    assert any("engine-1 refused weights 3: scripted" in w["text"] for w in run.sink.of_kind("warning"))


def test_weights_that_no_engine_ever_loads_end_the_run_with_the_reason(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    run.refuses = lambda name, version: version == 2
    with pytest.raises(RunFailed, match=r"every engine refused weights 2, last engine-\d: scripted"):
        run.run()


def test_an_engine_that_alone_refuses_leaves_the_run_to_the_others(tmp_path):
    run = Simulation(tmp_path, config(), num_engines=2)
    run.refuses = lambda name, version: name == "engine-1" and version >= 2
    run.forgives = True
    run.run()
    assert run.coordinator.state == "finished"
    assert len(run.sink.of_kind("step")) == run.version > 4
    last = [r.engine_id for g in run.batches[-1].groups for r in g.rollouts]
    assert set(last) == {"engine-0"}
    asked = [m.policy_version for _, m in run.sent if isinstance(m, PublishAgain)]
    assert all(asked.count(version) < 3 for version in asked)


def test_a_pinned_evaluation_engine_gets_the_version_again(tmp_path):
    pinned = {"every_steps": 2, "num_rollouts": 2, "final_num_rollouts": 2, "pinned": True}
    run = Simulation(tmp_path, config(eval=pinned))
    run.add_engine("evaluator-1", role="evaluator")
    seen = []

    def refuses_first(name: str, version: int) -> bool:
        if name == "evaluator-1":
            seen.append(version)
        return name == "evaluator-1" and seen.count(version) == 1

    run.refuses = refuses_first
    run.run()
    assert run.coordinator.state == "finished"
    assert "during" in [e["phase"] for e in run.sink.of_kind("eval")]


def test_an_engine_that_stays_behind_does_not_keep_the_run_from_ending(tmp_path):
    run = Simulation(tmp_path, config(daemon={"hang_s": 1.0}), num_engines=2)
    run.forgives = True
    while run.version < 2:
        run.turn()
    send = run.send

    def drop_weights(name: str, message: object) -> bool:
        return True if name == "engine-1" and isinstance(message, NewWeights) else send(name, message)

    run.send = drop_weights
    run.run()
    assert run.coordinator.state == "finished"
    assert any("engine-1 has not loaded weights" in w["text"] for w in run.sink.of_kind("warning"))
