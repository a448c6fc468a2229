"""A whole run on SGLang, whose server is killed in the middle."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sglang_bench import servers_of

from pipeline import rundir
from pipeline.metrics import current_records, read_records

# One process of pytest-xdist for all tests of the real server; it starts within half a minute on a quiet machine.
pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]
STEPS = 5
SETTINGS = [
    *("engines.kind=sglang", "engines.slots=32", "max_rollouts=20000", f"max_steps={STEPS}"),
    *("learner.batch_size=48", "sampling.max_new_tokens=40", "task.eval_per_level=1"),
    *("eval.every_steps=0", "eval.final_num_rollouts=1", "daemon.checkpoint_every_steps=0"),
]


def test_a_run_goes_on_when_its_server_is_killed(environment, tmp_path, capsys):
    run, output = tmp_path / "run", tmp_path / "output"
    ngu = [sys.executable, "-m", "pipeline.cli"]
    with output.open("w") as out:
        process = subprocess.Popen(
            [*ngu, "train", "--no-tui", "--run-dir", str(run), *SETTINGS], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while not (run / "status.json").exists() or rundir.read_status(run)["step"] < 2:
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        (server,) = servers_of(run / "model")
        os.kill(server, signal.SIGKILL)
        assert process.wait() == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    check_run(run, capsys)


def check_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert servers_of(run / "model") == []
    ledger = [sys.executable, "-m", "pipeline.cli", "ledger", str(run), "--verify"]
    done = subprocess.run(ledger, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "+ 0 open" in done.stdout
    steps = [r for r in current_records(read_records(run / "metrics.jsonl")) if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["metrics"]["weights/canary_error"] < 1e-4
    assert steps[-1]["metrics"]["engine-0/update_count"] >= 1
    # The first step trains on what the very weights it holds have sampled.
    assert abs(steps[0]["metrics"]["ess"] - 1.0) < 1e-3
    log = (run / "logs" / "engine-0.log").read_text()
    assert "the SGLang server was killed by signal 9" in log
    assert "serves again after" in log
    with capsys.disabled():
        print(f"\nkill -9 of the server: {log.strip().splitlines()[-1]}")
