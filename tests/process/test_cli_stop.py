"""`ngu stop` and `ngu watch` from another process than the one that runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import commands, rundir
from pipeline.cli import main
from pipeline.config import Config

# Stands in for the supervisor: holds the run, and on SIGTERM saves and leaves.
SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from pipeline import rundir
run = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with rundir.lock(run):
    rundir.write_atomic(run / "daemon.pid", str(os.getpid()).encode())
    rundir.write_atomic(run / "status.json", b'{"state": "training", "step": 4}')
    print("up", flush=True)
    if "deaf" in sys.argv:
        sys.stdin.read()
    signal.sigwait({signal.SIGTERM})
    (run / "checkpoints" / "step_000004").mkdir(parents=True)
    rundir.write_atomic(run / "status.json", b'{"state": "stopped", "step": 4}')
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return rundir.create(tmp_path / "run", Config())


def supervise(run: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SUPERVISOR, str(run), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def test_stop_waits_for_the_end_and_says_what_was_saved(run: Path, capsys):
    with supervise(run) as process:
        assert main(["stop", str(run)]) == 0
        assert process.wait() == 0
    out = capsys.readouterr().out
    assert "stopped at step 4" in out and "step_000004" in out and f"ngu resume {run}" in out


def test_a_run_that_does_not_stop_is_an_error_with_its_pid(run: Path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "STOP_TIMEOUT_S", 0.2)
    with supervise(run, "deaf") as process:
        assert main(["stop", str(run)]) == 1
        assert f"kill -9 {process.pid}" in capsys.readouterr().err
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def test_a_held_run_without_a_known_holder_gets_no_signal(run: Path, capsys):
    with supervise(run) as process:
        (run / "daemon.pid").unlink()
        assert main(["stop", str(run)]) == 1
        assert "try again" in capsys.readouterr().err
        process.terminate()


def test_watch_ends_with_the_run(run: Path, monkeypatch, capsys):
    monkeypatch.setattr("pipeline.plots.to_png", lambda figure: b"a picture")
    with supervise(run) as process:
        process.terminate()
        assert main(["watch", str(run)]) == 0
    assert "stopped" in capsys.readouterr().out


def test_start_reports_a_supervisor_that_ends_at_once(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["start", "--run-dir", str(tmp_path / "new")]) == 1
    assert "ended at once with status 1" in capsys.readouterr().err
