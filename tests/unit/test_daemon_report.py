"""The supervisor's last act, the report, survives a stop that comes late."""

import os
import signal
from pathlib import Path

import pytest

from pipeline import daemon, rundir
from pipeline.config import Config


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_report_is_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
):
    run = rundir.create(tmp_path / "run", Config())
    handled: list[object] = []

    def report(run_dir: Path) -> None:
        handled.append(signal.getsignal(signum))
        if callable(handled[0]) and handled[0] is not signal.default_int_handler:  # or it would end the tests
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(daemon, "_write_report", report)
    monkeypatch.setattr(daemon.Supervisor, "run", lambda self, resume: 0)
    before = signal.getsignal(signum)
    assert daemon.run(run, resume=False) == 0
    assert handled[0] not in (signal.SIG_DFL, signal.default_int_handler)
    assert signal.getsignal(signum) == before
