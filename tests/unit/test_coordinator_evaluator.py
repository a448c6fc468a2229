"""Pinned evaluation beside training: one version from the first token to the last, on an engine that trains nothing."""

from pathlib import Path

import pytest
from fakes import Simulation

from pipeline.config import Config, parse_config
from pipeline.engines.fake import FakeScript
from pipeline.messages import NewWeights, WorkItems

EVALUATOR = "evaluator-1"


def config(pinned: bool) -> Config:
    raw = {
        "max_rollouts": 800,
        "engines": {"slots": 8},
        "learner": {"batch_size": 40},
        "sampler": {"kind": "fixed"},
        "eval": {"every_steps": 2, "num_rollouts": 30, "final_num_rollouts": 2, "pinned": pinned},
    }
    return parse_config(raw, "test")


def simulate(path: Path, pinned: bool) -> Simulation:
    """A step takes as long as a rollout or two, and an evaluation several of both."""
    return Simulation(path, config(pinned), script=FakeScript(pass_rate=lambda p: 0.5, max_tokens=24), step_turns=60)


def test_in_flight_the_weights_change_under_an_evaluation(tmp_path: Path):
    run = simulate(tmp_path, pinned=False)
    run.run()
    during = [e for e in run.sink.of_kind("eval") if e["phase"] == "during"]
    assert any(e["version_min"] < e["version_max"] for e in during)


def test_pinned_every_evaluation_is_of_one_version(tmp_path: Path):
    run = simulate(tmp_path, pinned=True)
    run.add_engine(EVALUATOR, role="evaluator")
    run.run()
    during = [e for e in run.sink.of_kind("eval") if e["phase"] == "during"]
    assert len(during) >= 2
    assert all(e["step"] == e["version_min"] == e["version_max"] for e in during)
    assert all(sum(e["num_rollouts"].values()) == 120 for e in during)
    work = [(name, w.purpose, w.attempt_id) for name, m in run.sent if isinstance(m, WorkItems) for w in m.items]
    assert {purpose for name, purpose, _ in work if name == EVALUATOR} == {"eval"}
    assert len({a for name, _, a in work if name == EVALUATOR}) == 120 * len(during)
    assert len({a for name, purpose, a in work if name != EVALUATOR and purpose == "eval"}) == 2 * 8
    newest = [m.notice.policy_version for name, m in run.sent if name == EVALUATOR and isinstance(m, NewWeights)]
    assert newest == sorted(set(newest)) and len(newest) < run.version + 1, "no load in the middle of an evaluation"


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_evaluator_lost_in_the_middle(tmp_path: Path, comes_back: bool):
    run = simulate(tmp_path, pinned=True)
    run.add_engine(EVALUATOR, role="evaluator")
    while not (run.coordinator.flow.evaluation and run.coordinator.flow.evaluation.is_pinned):
        run.turn()
    for _ in range(5):
        run.turn()
    del run.engines[EVALUATOR]
    run.coordinator.peers.lose(EVALUATOR)
    run.turn()
    assert run.coordinator.flow.evaluation is None
    if comes_back:
        run.add_engine(EVALUATOR, boot="2", role="evaluator")
    run.run()
    assert run.coordinator.state == "finished" and run.ledger.num_open == 0
    during = [e for e in run.sink.of_kind("eval") if e["phase"] == "during"]
    assert bool(during) == comes_back
    assert all(e["version_min"] == e["version_max"] and sum(e["num_rollouts"].values()) == 120 for e in during)
