"""The job that `ngu slurm` writes: clean shell, and run here with stand-ins for Slurm's commands."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import rundir
from pipeline.cli import main
from pipeline.cluster.config import SlurmConfig
from pipeline.cluster.slurm import job_script

pytestmark = pytest.mark.timeout(560)  # real processes import torch, and the machine may be busy

STANDINS = Path(__file__).parents[1] / "support" / "slurm"
# Stands for `ngu`: a run that trains until it is stopped, and engines that end as the lines of the file `ends` say.
NGU = """#!/usr/bin/env bash
case $1 in
resume) trap 'echo "stopped at step 3" >state; exit 0' TERM ;;
worker) trap 'exit 0' TERM ;;
esac
echo "ngu $1" >>"$CALLS"
stay() { while [ ! -e over ]; do /bin/sleep 0.02; done; }
case $1 in
status) cat state ;;
resume)
    echo training >state
    stay
    echo finished >state
    ;;
worker)
    read -r status <ends
    sed -i 1d ends
    [ "$status" = works ] || exit "$status"
    stay
    ;;
esac
"""


class Job:
    """Copies of one batch script, one after another, in a directory of their own."""

    def __init__(self, path: Path):
        self.path = path
        self.calls_file = path / "calls"
        self.calls_file.touch()
        self.env = os.environ | {"CALLS": str(self.calls_file), "SLURM_JOB_ID": "17"}
        self.env["PATH"] = f"{path}/bin:{STANDINS}:{os.environ['PATH']}"
        self.process: subprocess.Popen[str] | None = None

    def install_ngu(self, text: str) -> None:
        (self.path / "bin").mkdir()
        (self.path / "bin" / "ngu").write_text(text)
        (self.path / "bin" / "ngu").chmod(0o755)

    def start(self, script: Path) -> None:
        self.process = subprocess.Popen(
            ["bash", str(script)],
            cwd=self.path,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def until(self, condition: Callable[[], Any]) -> None:
        assert self.process is not None
        while not condition():
            assert self.process.poll() is None, f"the job has ended: {self.process.communicate()[0]}"
            time.sleep(0.02)

    def tell(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Status and output, once nothing is left that could still write."""
        assert self.process is not None
        text = self.process.communicate(timeout=400)[0]
        return self.process.returncode, text

    def calls(self, name: str) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if line.startswith(name)]

    def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def small(**settings: Any) -> SlurmConfig:
    return SlurmConfig(**({"engines_per_node": 1} | settings))


def started(job: Job, slurm: SlurmConfig, *ends: str) -> None:
    job.install_ngu(NGU)
    (job.path / "ends").write_text("".join(f"{end}\n" for end in ends))
    (job.path / "job.sbatch").write_text(job_script(slurm, job.path / "the run", 1))
    job.start(job.path / "job.sbatch")
    job.until(lambda: len(job.calls("ngu worker")) == len(ends) and (job.path / "state").exists())


@pytest.mark.parametrize(
    "settings",
    [
        {
            "partition": "gpu",
            "account": "us",
            "engine_nodes": 4,
            "head_options": ("--mem=0",),
            "setup": "module load x",
        },
        {"engine_nodes": 0, "head_gpus": 0, "requeue": False},
    ],
)
def test_the_script_is_clean(settings: dict[str, Any]):
    text = job_script(SlurmConfig(**settings), Path("/a run's %directory"), 5555)
    argv = [Path(sys.executable).with_name("shellcheck"), "-"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_an_engine_that_dies_is_started_again_and_a_run_that_finishes_ends_the_job(job: Job):
    started(job, small(), "1", "137", "works")
    (job.path / "over").touch()
    assert job.end() == (0, "")
    assert job.calls("scontrol") == []


def test_where_only_engines_hear_of_a_preemption_the_run_is_saved_and_queued_again(job: Job):
    started(job, small(), "works")
    (call,) = job.calls("srun")
    os.kill(int(call.split()[1]), signal.SIGTERM)
    assert job.end() == (0, "")
    assert (job.path / "state").read_text() == "stopped at step 3\n"
    assert job.calls("scontrol") == ["scontrol requeue 17"]


def test_a_run_that_no_engine_can_work_for_is_stopped_and_not_queued_again(job: Job):
    started(job, small(), "2")
    assert job.end() == (1, "no engine is left: the run was stopped\n")
    assert (job.path / "state").read_text() == "stopped at step 3\n"
    assert job.calls("scontrol") == []


def test_without_requeue_and_nodes_for_engines_a_warning_stops_the_run(job: Job):
    started(job, small(engine_nodes=0, requeue=False))
    job.tell()
    assert job.end() == (0, "")
    assert (job.path / "state").read_text() == "stopped at step 3\n"
    assert job.calls("scontrol") == job.calls("srun") == []


def test_a_preempted_run_goes_on_with_its_engines_until_it_has_finished(job: Job, capsys, monkeypatch):
    job.install_ngu(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline.cli "$@"\n')
    monkeypatch.setenv("PATH", job.env["PATH"])
    monkeypatch.setenv("CALLS", job.env["CALLS"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = job.path / "run"
    settings = [f"daemon.listen=tcp://127.0.0.1:{port}", "engines.kind=fake", "engines.slots=16"]
    settings += ["max_rollouts=0", "max_steps=100000"]
    settings += ["task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0", "learner.batch_size=32"]
    settings += ["cluster.kind=slurm", "cluster.engines_per_node=1", "cluster.setup='export OMP_NUM_THREADS=1'"]
    assert main(["slurm", *settings, "--run-dir", str(run), "--submit"]) == 0
    assert "job 17" in capsys.readouterr().out
    assert job.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out.startswith("not started")

    job.start(run / "job.sbatch")
    job.until(lambda: rundir.read_status(run).get("step", 0) >= 1)
    engines = [name for name, peer in rundir.read_status(run)["peers"].items() if peer["role"] == "engine"]
    assert engines == ["remote0"]
    job.tell()
    status, text = job.end()
    assert (status, job.calls("scontrol")) == (0, ["scontrol requeue 17"]), text
    stopped = rundir.read_status(run)
    assert stopped["state"] == "stopped"

    job.start(run / "job.sbatch")
    job.until(lambda: rundir.read_status(run)["state"] == "training")
    steps = stopped["step"] + 5
    assert main(["ctl", str(run), "set", f"max_steps={steps}"]) == 0
    status, text = job.end()
    assert (status, len(job.calls("scontrol"))) == (0, 1), text
    assert rundir.read_status(run)["state"] == "finished"
    assert json.loads((run / "summary.json").read_text())["steps"] >= steps
    assert main(["ledger", str(run), "--verify"]) == 0
