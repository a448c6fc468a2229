"""The coordinator's process around its loop."""

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from fakes import Simulation

from pipeline import rundir
from pipeline.config import Config, parse_config
from pipeline.coordinator import __main__ as process
from pipeline.errors import RunFailed
from pipeline.messages import Heartbeat


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the process's main function around a coordinator, with nothing else of it real."""
    run = rundir.create(tmp_path / "run", Config())
    monkeypatch.chdir(tmp_path)  # main goes into the run directory
    for name in ("RouterSocket", "Ledger", "open_sinks", "control", "StatusFile", "DiskGuard", "make_task"):
        monkeypatch.setattr(process, name, MagicMock())
    monkeypatch.setattr(process, "make_sampler", MagicMock())
    monkeypatch.setattr(sys, "argv", ["coordinator", str(run)])
    before = signal.getsignal(signal.SIGTERM)

    def main(coordinator: Any) -> None:
        monkeypatch.setattr(process, "Coordinator", lambda *args: coordinator)
        process.main()

    yield main
    signal.signal(signal.SIGTERM, before)


def test_a_stop_cannot_kill_a_coordinator_that_is_already_exiting(around):
    ended = SimpleNamespace(ended=True, state="finished", clock=time.monotonic, close=MagicMock())
    ended.recover = lambda snapshot: None
    around(ended)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # Python leaves this one in place when it exits


@pytest.mark.parametrize("error", [RunFailed("no more"), ZeroDivisionError("division by zero")])
def test_what_was_measured_since_the_last_step_is_kept_when_it_fails_or_crashes(around, tmp_path, error):
    config = parse_config({"learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    simulated = Simulation(tmp_path, config)
    while simulated.version < 2 or not simulated.coordinator.tally._since_step or simulated.batch is None:
        simulated.turn()
    simulated.inbox.append(("learner", Heartbeat({"peak_gib": 3.5})))
    coordinator: Any = simulated.coordinator
    coordinator.turn(0.0)
    coordinator.recover = lambda snapshot: None

    def fail(timeout_s: float) -> None:
        raise error

    coordinator.turn = fail
    with pytest.raises(type(error)):
        around(coordinator)
    (record,) = simulated.sink.of_kind("failure")
    assert str(error) in record["reason"]
    assert record["metrics"]["generated/reward_mean"] > 0 and record["metrics"]["queue/in_flight"] > 0
    assert record["metrics"]["learner/peak_gib"] == 3.5
    rollouts = [rollout for group in simulated.batch.groups for rollout in group.rollouts]
    assert record["metrics"]["in_step/tokens"] == sum(rollout.num_tokens for rollout in rollouts) > 0
    simulated.ledger.close()
