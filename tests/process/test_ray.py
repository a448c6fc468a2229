"""Engines that Ray places: on a cluster of which a node is lost, and on one that the run starts itself."""

import time

import psutil
import pytest
from ports import free_port
from ray_nodes import Nodes
from small_run import SmallRun

from pipeline import rundir
from pipeline.cluster.nodes import read_view
from pipeline.remote.keys import run_keys
from pipeline.role import EXIT_CRASH

pytest.importorskip("ray", reason="the package ray is not installed (extra `ray`)")
pytestmark = [pytest.mark.timeout(560), pytest.mark.xdist_group("ray")]


def begun(address: str, *settings: str) -> SmallRun:
    """A run on the cluster at `address`."""
    cluster = ["cluster.kind=ray", f"cluster.address={address}", *settings]
    run = SmallRun("engines.count=0", f"daemon.listen=tcp://127.0.0.1:{free_port()}", *cluster)
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


def placed(run: SmallRun) -> list[tuple[bool, tuple[str, ...]]]:
    """Of each node whether it lives, and what it holds."""
    view = read_view(run.dir)
    return [] if view is None else [(node.alive, node.holds) for node in view.nodes]


def test_engines_of_a_lost_node_go_to_another_and_nothing_is_lost_or_doubled(closing, capsys):
    closing.append(nodes := Nodes(2, 1))  # the first has room for all engines
    run = begun(nodes.address, "cluster.engines=2")
    try:
        run.until(lambda: all(holds for _, holds in placed(run)) and placed(run), "an engine on every node")
        assert sorted(name for _, holds in placed(run) for name in holds) == ["engine 0", "engine 1"]
        work(run, "remote0", "remote1")
        with rundir.lock(run.dir):  # as its supervisor would
            status = run.ngu("status", str(run.dir)).stdout
        assert status.count("  node ") == 2

        nodes.kill(1)
        killed = time.monotonic()
        run.until(
            lambda: sorted(placed(run)) == [(False, ()), (True, ("engine 0", "engine 1"))], "both engines on one node"
        )
        placed_s = time.monotonic() - killed
        work(run, "remote0", "remote1")
        with capsys.disabled():
            print(f"\na lost node: engines placed after {placed_s:.1f} s, at work {time.monotonic() - killed:.1f} s")
        assert "engine 1 lost" in run.log("ray") or "engine 0 lost" in run.log("ray")
        assert "remote2" not in run.peers()

        run.finish()
        run.until(lambda: run.processes["ray"].poll() is not None, "the end of its engines")
        assert run.processes["ray"].returncode == 0, run.logs()
    finally:
        run.close()


def test_a_cluster_that_a_run_has_started_ends_with_it_even_by_kill_9(capsys):
    run = begun("''", "cluster.verifiers=1")
    try:
        work(run, "remote0")
        judged = lambda: run.status()["verifiers"].get("remote-verifier0", {}).get("num_correct", 0)  # noqa: E731
        run.until(lambda: judged() > 20, "its verdicts")
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

        before = judged()
        start_role(run)
        work(run, "remote0")  # in its place at once, not after daemon.hang_s
        run.until(lambda: judged() > before + 20, "verdicts of its successor")
        role = run.processes["ray"]
        started = children(role.pid)
        run.finish()
        run.until(lambda: role.poll() is not None and gone(started), "the end of its engines")
        assert role.returncode == 0, run.logs()
        left = [path.name for path in run.dir.parent.iterdir() if path.name.startswith("ngu-ray")]
        assert not left, run.logs()
    finally:
        run.close()
