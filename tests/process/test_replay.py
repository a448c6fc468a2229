"""A run that was killed and resumed, its steps taken again by `ngu replay`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import rundir

pytestmark = pytest.mark.timeout(280)  # real processes import torch, and the machine may be busy

STEPS = 12
SMALL = ["task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0", "learner.batch_size=48"]


def ngu(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pipeline.cli", *args], capture_output=True, text=True, check=False)


def test_a_killed_and_resumed_run_is_repeated_bit_for_bit(tmp_path: Path):
    run = tmp_path / "run"
    settings = [*SMALL, f"max_steps={STEPS}", "max_rollouts=0", "daemon.checkpoint_every_steps=4"]
    done = ngu("start", "--run-dir", str(run), *settings)
    assert done.returncode == 0, done.stderr
    try:
        while rundir.read_status(run).get("step", 0) < 5:
            assert rundir.is_running(run), "the run ended early"
            time.sleep(0.02)
        supervisor = rundir.supervisor_pid(run)
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)  # every role dies with it
        while rundir.is_running(run):
            time.sleep(0.02)
        assert rundir.read_status(run)["step"] < STEPS
        done = ngu("resume", "--no-tui", str(run))
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        ngu("stop", str(run))

    done = ngu("replay", str(run), "--steps", f"1..{STEPS}", "--json", "learner.loss.kind=asymre")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["from_step"] == 0 and report["is_identical"]
    assert [step["step"] for step in report["steps"]] == list(range(1, STEPS + 1))
    cosines = [step["variant"]["gradient_cosine"] for step in report["steps"]]
    # One step may have the same direction under both: what its batch holds depends on who came first.
    assert min(cosines) < 0.99999 and all(-1.0 <= round(cosine, 6) <= 1.0 for cosine in cosines)
    done = ngu("replay", str(run), "--steps", f"{STEPS - 1}..{STEPS}", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["from_step"] == 8, "from the last checkpoint before"
    done = ngu("replay", str(run), "--steps", f"{STEPS}..{STEPS + 1}")
    assert done.returncode == 2 and f"those that can are 1..{STEPS}" in done.stderr
