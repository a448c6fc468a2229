"""Engines that Ray places: on a cluster of which a node is lost, and on one that the run starts itself."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_run import SmallRun

from pipeline import rundir
from pipeline.cluster.nodes import read_view
from pipeline.remote.keys import run_keys
from pipeline.role import EXIT_CRASH

pytest.importorskip("ray", reason="the package ray is not installed (extra `ray`)")
pytestmark = [pytest.mark.timeout(560), pytest.mark.xdist_group("ray")]

RAY_CLUSTER = Path(__file__).parents[1] / "support" / "ray_cluster.py"


class Nodes:
    """`ray_cluster.py` with two nodes, of which the first has room for all engines."""

    def __init__(self, directory: str):
        argv = [sys.executable, str(RAY_CLUSTER), "2", "1"]
        self._process = subprocess.Popen(
            argv, env=os.environ | {"RAY_TMPDIR": directory}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._answer()
        assert self.address, "no cluster came up"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self, node: int) -> None:
        assert self._process.stdin is not None
        print(node, file=self._process.stdin, flush=True)
        assert self._answer() == str(node)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    directory = tempfile.mkdtemp(prefix="ngu")  # short enough for Ray's sockets
    made = Nodes(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


def begun(address: str) -> SmallRun:
    """A run with two engines on the cluster at `address`, both of which work."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = ["cluster.kind=ray", f"cluster.address={address}", "cluster.engines=2"]
    run = SmallRun("engines.count=0", f"daemon.listen=tcp://127.0.0.1:{port}", *settings)
    run_keys(run.dir)
    run.start("gateway", "pipeline.remote.gateway", str(run.dir))
    start_role(run)
    return run


def start_role(run: SmallRun) -> None:
    run.start("ray", "pipeline.cluster.ray_role", str(run.dir))


def work(run: SmallRun, *engines: str) -> None:
    """Wait until each of these engines has done something more."""
    before = dict(run.by_engine)

    def have_worked() -> bool:
        if run.processes["ray"].poll() == EXIT_CRASH:
            start_role(run)  # as a supervisor does: on a busy machine Ray takes longer to start than it allows itself
        return all(run.trained_by(name, before.get(name, 0) + 50) for name in engines)

    run.until(have_worked, f"work of {engines}")


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def placed(run: SmallRun) -> list[tuple[bool, tuple[int, ...]]]:
    """Of each node whether it lives, and its engines."""
    view = read_view(run.dir)
    return [] if view is None else [(node.alive, node.engines) for node in view.nodes]


def test_engines_of_a_lost_node_go_to_another_and_nothing_is_lost_or_doubled(nodes: Nodes, capsys):
    run = begun(nodes.address)
    try:
        run.until(lambda: all(engines for _, engines in placed(run)) and placed(run), "an engine on every node")
        assert sorted(e for _, engines in placed(run) for e in engines) == [0, 1]
        work(run, "remote0", "remote1")
        with rundir.lock(run.dir):  # as its supervisor would
            status = run.ngu("status", str(run.dir)).stdout
        assert status.count("  node ") == 2

        nodes.kill(1)
        killed = time.monotonic()
        run.until(lambda: sorted(placed(run)) == [(False, ()), (True, (0, 1))], "both engines on one node")
        placed_s = time.monotonic() - killed
        work(run, "remote0", "remote1")
        with capsys.disabled():
            print(f"\na lost node: engines placed after {placed_s:.1f} s, at work {time.monotonic() - killed:.1f} s")
        assert "engine 1 is lost" in run.log("ray") or "engine 0 is lost" in run.log("ray")
        assert "remote2" not in run.peers()

        run.finish()
        run.until(lambda: run.processes["ray"].poll() is not None, "the end of its engines")
        assert run.processes["ray"].returncode == 0, run.logs()
    finally:
        run.close()


def test_a_cluster_that_a_run_has_started_ends_with_it_even_by_kill_9(capsys):
    run = begun("''")
    try:
        work(run, "remote0", "remote1")
        role = run.processes["ray"]
        started = children(role.pid)
        assert {"raylet", "gcs_server"} <= {process.name() for process in started}
        # Two processes of Ray that do nothing spend a minute on reporting its death to one that is gone.
        agents = [process for process in started if process.name().endswith("Agent")]
        assert len(agents) == 2
        role.kill()
        killed = time.monotonic()
        role.wait()
        run.until(lambda: gone([p for p in started if p not in agents]), "the end of all that Ray had started")
        with capsys.disabled():
            print(f"\na killed role: the rest is gone after {time.monotonic() - killed:.1f} s")
        for agent in agents:
            agent.kill()

        start_role(run)
        work(run, "remote0", "remote1")  # in their places at once, not after daemon.hang_s
        role = run.processes["ray"]
        started = children(role.pid)
        run.finish()
        run.until(lambda: role.poll() is not None and gone(started), "the end of its engines")
        assert role.returncode == 0, run.logs()
        left = [path.name for path in run.dir.parent.iterdir() if path.name.startswith(("ngu-ray", "ngu-engine"))]
        assert not left, run.logs()
    finally:
        run.close()
