"""`ngu study` with real runs on fake engines: killed in the middle, it goes on and loses nothing that had ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import rundir

STUDY = """
seeds = [0]
thresholds = [0.3]
set = {max_rollouts = 64, engines.kind = "fake", learner.batch_size = 32, task.eval_per_level = 1, eval.every_steps = 1}
[arms.ngu]
[arms.fixed.sampler]
kind = "fixed"
"""


def start(file: Path, out: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pipeline.cli", "study", str(file), "--out", str(out), "--json"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_a_study_that_is_killed_goes_on(tmp_path: Path):
    file, out = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(STUDY)
    process = start(file, out)
    wait_for(out / "runs/fixed/seed_0/daemon.pid", process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "[1/2] ngu seed 0: hard pass@1" in said and "the same command goes on" in said
    assert not rundir.is_running(out / "runs/fixed/seed_0")
    assert not (out / "runs/fixed/seed_0.json").exists()
    kept = (out / "runs/ngu/seed_0.json").stat().st_mtime_ns

    process = start(file, out)
    printed, said = process.communicate()
    assert process.returncode == 0, said
    assert "1 of 2 runs are there already" in said
    assert (out / "runs/ngu/seed_0.json").stat().st_mtime_ns == kept
    found = json.loads(printed)
    assert [t["state"] for t in found["traces"]] == ["finished", "finished"]
    for trace in found["traces"]:
        assert (trace["steps"], trace["rollouts"]) == (2, 64)
        points = trace["points"]
        assert points[0]["step"] == 0 and points[-1]["step"] == 2 and len(points) >= 3
        # A fake engine is right every second time; what is trained is no model of it, so nothing is learnt.
        assert all(0.0 < p["overall"] < 1.0 for p in points)
        spent = [p["core_s"] for p in points]
        assert spent[0] == 0.0 and spent == sorted(spent)
        assert 0.0 < spent[-1] < trace["run_core_s"] < os.cpu_count() * trace["wall_s"]
    assert not list(Path("/dev/shm").glob(f"ngu-{(out / 'runs/ngu/seed_0/run_id').read_text().strip()}*"))
