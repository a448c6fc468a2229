"""What happens to a running daemon: commands while it trains, a rank that dies, kills and stops at random moments."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import Blow, ngu, play
from chaos_audit import Findings, processes_in

from learner.recording import read_record, recorded_steps
from pipeline import rundir
from pipeline.cli import main
from pipeline.metrics import current_records, read_records

pytestmark = pytest.mark.timeout(280)  # real processes import torch, and the machine may be busy

SMALL = ["task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0", "learner.batch_size=48"]


class Daemon:
    def __init__(self, run_dir: Path, *settings: str):
        self.dir = run_dir
        done = ngu("start", "--run-dir", str(run_dir), *SMALL, *settings)
        assert done.returncode == 0, done.stderr

    def wait_for_step(self, step: int) -> None:
        while rundir.read_status(self.dir).get("step", 0) < step:
            assert rundir.is_running(self.dir), self.logs()
            time.sleep(0.05)

    def wait(self) -> dict[str, object]:
        while rundir.is_running(self.dir):
            time.sleep(0.1)
        return rundir.read_status(self.dir)

    def pids(self, words: str) -> list[int]:
        """Processes of this run whose command line holds these words."""
        return [pid for pid, line in processes_in(self.dir) if words in line]

    def checksums(self) -> dict[int, str]:
        """Of the weights that each step gave."""
        return {step: read_record(self.dir, step).checksum for step in recorded_steps(self.dir)}

    def logs(self) -> str:
        return "".join(f"\n--- {p.name}\n{p.read_text()}" for p in sorted((self.dir / "logs").glob("*.log")))

    def assert_ended_well(self, steps: int) -> None:
        assert self.wait()["state"] == "finished", self.logs()
        done = ngu("ledger", str(self.dir), "--verify")
        assert done.returncode == 0, done.stdout
        assert "+ 0 open" in done.stdout
        records = current_records(read_records(self.dir / "metrics.jsonl"))
        assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, steps + 1))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[type[Daemon]]:
    made: list[Daemon] = []

    class Tracked(Daemon):
        def __init__(self, *settings: str):
            super().__init__(tmp_path / "run", *settings)
            made.append(self)

    yield Tracked
    for d in made:
        if (pid := rundir.supervisor_pid(d.dir)) is not None:
            os.kill(pid, signal.SIGTERM)
            d.wait()


def test_commands_act_on_a_running_daemon_and_are_recorded(daemon):
    run = daemon("max_rollouts=20000", "daemon.checkpoint_every_steps=0")
    run.wait_for_step(1)
    paused = ngu("ctl", str(run.dir), "pause")
    assert (paused.returncode, paused.stderr) == (0, "")
    while rundir.read_status(run.dir)["mode"] != "pause":
        time.sleep(0.05)
    assert ngu("status", str(run.dir)).stdout.startswith("paused")
    assert ngu("ctl", str(run.dir), "checkpoint").returncode == 0
    while not list((run.dir / "checkpoints").glob("step_*")):
        assert rundir.is_running(run.dir), run.logs()
        time.sleep(0.05)
    step = rundir.read_status(run.dir)["step"]
    assert ngu("ctl", str(run.dir), "set", "learner.batch_size=1").returncode == 2
    assert ngu("ctl", str(run.dir), "set", f"max_steps={step + 2}").returncode == 0
    assert ngu("ctl", str(run.dir), "set", "learner.lr=1e-5").returncode == 0
    assert ngu("ctl", str(run.dir), "resume").returncode == 0
    run.assert_ended_well(step + 2)
    last = [r for r in read_records(run.dir / "metrics.jsonl") if r["kind"] == "step"][-1]
    assert last["metrics"]["lr"] <= 1e-5
    lines = [json.loads(line) for line in (run.dir / "control.jsonl").read_text().splitlines()]
    assert [line["verb"] for line in lines] == ["pause", "checkpoint", "set", "set", "set", "resume"]


def test_a_rank_that_dies_costs_a_restart_of_the_learner_and_nothing_else(daemon, capsys):
    run = daemon("max_rollouts=20000", "learner.num_processes=2", "daemon.checkpoint_every_steps=2")
    run.wait_for_step(1)
    assert rundir.read_status(run.dir)["learner"]["ranks"] == 2
    assert main(["status", str(run.dir)]) == 0  # here: another process takes as long to start as the run
    assert "learner: 2 ranks" in capsys.readouterr().out
    run.wait_for_step(3)
    others = [run.pids(f"-m pipeline.{role} ") for role in ("coordinator", "worker", "verifiers")]
    first = run.checksums()
    (rank,) = run.pids("--rank 1")
    os.kill(rank, signal.SIGKILL)
    while (again := run.pids("--rank 1")) in ([], [rank]):
        assert rundir.is_running(run.dir), run.logs()
        time.sleep(0.05)
    # The run cannot have ended: its learner is only just starting.
    assert [run.pids(f"-m pipeline.{role} ") for role in ("coordinator", "worker", "verifiers")] == others
    assert f"--resume {run.dir}/checkpoints/step_" in dict(processes_in(run.dir))[again[0]]
    last = rundir.read_status(run.dir)["step"] + 4
    assert main(["ctl", str(run.dir), "set", f"max_steps={last}"]) == 0
    run.assert_ended_well(last)
    assert run.checksums() | first == run.checksums(), "steps that were taken again gave other weights"
    log = (run.dir / "logs" / "daemon.log").read_text()
    assert "starting it again" in log and "starting again from the last checkpoint" not in log


def test_chaos(tmp_path):
    """A run under some of the blows that `just chaos` deals to sixteen."""
    deck = [Blow(role, signal.SIGKILL) for role in ("verifier", "learner", "daemon")]
    deck += [Blow("engine", signal.SIGSTOP), Blow("coordinator", signal.SIGKILL, at_checkpoint=True)]
    outcomes, usage = play(tmp_path / "run", "fake", 1, deck)
    assert [outcome.found for outcome in outcomes] == [Findings(0, 0, [])] * (len(deck) + 1)
    assert usage.faults() == []
