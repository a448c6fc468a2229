"""Workers on two hosts far away, as processes: they share their host's weights, and the run completes."""

import signal

import pytest
from far_hosts import FarRun
from namespaces import FarMachine, why_not_permitted

pytestmark = pytest.mark.timeout(280)  # the machine may be busy


def test_hosts_behind_long_lossy_cables_get_each_version_once_and_the_run_completes(closing):
    if reason := why_not_permitted(FarMachine):
        pytest.skip(f"network namespaces: {reason}")
    for _ in range(2):
        closing.append(FarMachine())
    run = FarRun(closing[:2], "daemon.hang_s=5.0")
    closing.append(run)
    names = run.start_workers("pipeline.cli")
    versions = lambda: [p["version"] or 0 for n, p in run.peers().items() if n.startswith("remote")]  # noqa: E731
    run.until(lambda: len(versions()) == 4 and min(versions()) >= 10, "ten versions at every worker")
    run.until(lambda: all(run.trained_by(f"remote{i}", 50) for i in range(4)), "rollouts of every worker")
    gateway = run.gateway
    assert (gateway["workers"], gateway["hosts"], gateway["copies"]) == (4, 2, 1.0), gateway
    # The one that fetches is killed: the other one of its host goes on with the next version at once.
    run.processes[names[0]].send_signal(signal.SIGKILL)
    run.processes[names[2]].send_signal(signal.SIGKILL)
    before = run.version
    run.until(lambda: len(versions()) == 2 and min(versions()) > before + 5, "newer versions at the other two")
    run.finish()
    for name in (names[1], names[3]):
        run.until(lambda: run.processes[name].poll() is not None, "the worker to hear that the run is over")  # noqa: B023
        assert run.processes[name].returncode == 0, run.log(name)
