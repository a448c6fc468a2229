"""The coordinator's process around its loop."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pipeline import rundir
from pipeline.config import Config
from pipeline.coordinator import __main__ as process


def test_a_stop_cannot_kill_a_coordinator_that_is_already_exiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = rundir.create(tmp_path / "run", Config())
    monkeypatch.chdir(tmp_path)  # main goes into the run directory
    for name in ("RouterSocket", "Ledger", "open_sinks", "control", "StatusFile", "DiskGuard", "make_task"):
        monkeypatch.setattr(process, name, MagicMock())
    monkeypatch.setattr(process, "make_sampler", MagicMock())
    ended = SimpleNamespace(ended=True, state="finished", recover=lambda snapshot: None)
    monkeypatch.setattr(process, "Coordinator", lambda *args: ended)
    monkeypatch.setattr(sys, "argv", ["coordinator", str(run)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        process.main()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # Python leaves this one in place when it exits
    finally:
        signal.signal(signal.SIGTERM, before)
