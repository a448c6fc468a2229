"""A learner with a rank on another node of a Ray cluster: it begins there with nothing, and survives the node."""

import os
import signal
import time
from pathlib import Path

import pytest
from chaos import ngu
from chaos_audit import processes_in
from ray_nodes import Nodes

from learner.recording import read_record, recorded_steps
from pipeline import rundir
from pipeline.cluster.nodes import read_view

pytest.importorskip("ray", reason="the package ray is not installed (extra `ray`)")
pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("ray")]

SETTINGS = ["engines.kind=fake", "task.eval_per_level=1", "eval.final_num_rollouts=1", "eval.every_steps=0"]
SETTINGS += ["learner.batch_size=48", "learner.num_processes=2", "daemon.checkpoint_every_steps=2"]
SETTINGS += ["max_rollouts=0", "max_steps=1000"]
# The rank fits on nodes of two CPUs alone.
CLUSTER = ["cluster.kind=ray", "cluster.learner_nodes=2", "cluster.cpus_per_rank=2", "cluster.private_network=true"]


def until(condition, run_dir: Path) -> None:
    while not condition():
        logs = [log.read_text() for log in sorted((run_dir / "logs").glob("*.log"))]
        assert rundir.is_running(run_dir), "\n".join(logs)
        time.sleep(0.05)


def step(run_dir: Path) -> int:
    return rundir.read_status(run_dir).get("step", 0)


def lasting(run_dir: Path) -> list[int]:
    """Processes that the loss of a node must not cost."""
    words = ("-m pipeline.coordinator ", "-m pipeline.verifiers ", "-m pipeline.cluster.ray_role ")
    return sorted(pid for pid, line in processes_in(run_dir) if any(w in line for w in words))


def checksums(run_dir: Path) -> dict[int, str]:
    return {number: read_record(run_dir, number).checksum for number in recorded_steps(run_dir)}


def test_a_learner_waits_for_a_node_in_the_place_of_a_lost_one_and_goes_on_where_it_was(tmp_path, closing, capsys):
    closing.append(nodes := Nodes(1, 2))
    run = tmp_path / "run"
    done = ngu("start", "--run-dir", str(run), *SETTINGS, *CLUSTER, f"cluster.address={nodes.address}")
    assert done.returncode == 0, done.stderr
    try:
        until(lambda: step(run) >= 3, run)
        said = ngu("status", str(run)).stdout
        assert "learner: 2 ranks" in said and "): learner rank 1" in said, said
        others = lasting(run)
        first = checksums(run)

        nodes.kill(1)
        killed = time.monotonic()
        until(lambda: (view := read_view(run)) is not None and view.waiting == ("learner rank 1",), run)
        stood = step(run)
        assert "no room for learner rank 1" in ngu("status", str(run)).stdout
        nodes.add(2)
        until(lambda: step(run) > stood + 1, run)
        with capsys.disabled():
            print(f"\na lost node of the learner: it went on after {time.monotonic() - killed:.1f} s")
        assert lasting(run) == others
        again = checksums(run)
        assert again | first == again, "steps that were taken again gave other weights"

        assert ngu("ctl", str(run), "set", f"max_steps={step(run) + 3}").returncode == 0
        until(lambda: rundir.read_status(run)["state"] == "finished", run)
    finally:
        if (pid := rundir.supervisor_pid(run)) is not None:
            os.kill(pid, signal.SIGTERM)
            while rundir.is_running(run):
                time.sleep(0.05)
    done = ngu("ledger", str(run), "--verify")
    assert done.returncode == 0 and "+ 0 open" in done.stdout, done.stdout
    daemon = (run / "logs" / "daemon.log").read_text()
    assert "starting it again" in daemon and "starting again from the last checkpoint" not in daemon
