"""`ngu study` with a real run: killed in the middle of it, the same command ends what it began."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import rundir

STUDY = """
seeds = [0]
thresholds = [0.3]
set = {max_rollouts = 64, learner.batch_size = 32, task.eval_per_level = 1, eval.every_steps = 1}
[arms.ngu]
"""


@contextmanager
def started(file: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "pipeline.cli", "study", str(file), "--out", str(out), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # not kill: it has a run to end


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_a_study_that_is_killed_goes_on(tmp_path: Path):
    file, out = tmp_path / "study.toml", tmp_path / "out"
    run = out / "runs/ngu/seed_0"
    file.write_text(STUDY)
    with started(file, out) as process:
        wait_for(run / "daemon.pid", process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert not rundir.is_running(run) and not run.with_suffix(".json").exists()

    with started(file, out) as process:
        printed, said = process.communicate()
    assert process.returncode == 0, said
    assert "[1/1] ngu seed 0: hard pass@1" in said
    (trace,) = json.loads(printed)["traces"]
    assert (trace["state"], trace["steps"], trace["rollouts"]) == ("finished", 2, 64)
    points = trace["points"]
    assert points[0]["step"] == 0 and points[-1]["step"] == 2 and len(points) >= 3
    assert all(0.0 < p["overall"] < 1.0 for p in points)
    spent = [p["core_s"] for p in points]
    assert spent[0] == 0.0 and spent == sorted(spent)
    assert 0.0 < spent[-1] < trace["run_core_s"] < (os.cpu_count() or 1) * trace["wall_s"]
    assert not Path(f"/dev/shm/ngu-{(run / 'run_id').read_text().strip()}").exists()
