"""How a run ends that is told to, whatever has become of its roles, and one that the disk has no room for."""

import errno
from pathlib import Path

import pytest
from tiny_supervisor import LEARNER, TinySupervisor

from pipeline import rundir
from pipeline import supervisor as supervisors
from pipeline.config import parse_config
from pipeline.supervisor import Role, RoleEnded

# Told to stop it waits for nobody who is not there.
PATIENT = """
import json, os, signal, time
def say(state):
    open("partial", "w").write(json.dumps({"state": state, "step": 3}))
    os.rename("partial", "status.json")
def stop(*_):
    open("stopping", "w").close()
    while lives(0) or lives(1):
        time.sleep(0.01)
    say("stopped")
    raise SystemExit
def lives(rank):
    return os.path.exists(f"/proc/{open(f'rank-{rank}').read().split()[0]}")
signal.signal(signal.SIGTERM, stop)
say("training")
while True:
    time.sleep(0.01)
"""


class Stopped(TinySupervisor):
    """Once both ranks are there, and the coordinator listens; the second rank dies in the stop."""

    learner = f"{LEARNER.removesuffix('time.sleep(100)' + chr(10))}\nwhile not os.path.exists('stopping'):\n"
    learner += "    time.sleep(0.01)\nif rank == '0': time.sleep(100)\nraise SystemExit(70)"

    def _end_if_hung(self, role: Role, why: str) -> None:
        self.stop_requested |= all((self.run_dir / name).exists() for name in ("rank-0", "rank-1", "status.json"))
        super()._end_if_hung(role, why)


class Busy(Stopped):
    """In a step that takes long."""

    learner = LEARNER


def test_a_stop_waits_for_a_learner_only_so_long(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisors, "STOP_GRACE_S", 0.4)
    config = parse_config({"daemon": {"max_restarts": 0}, "learner": {"num_processes": 2}}, "test")
    supervisor = Busy(rundir.create(tmp_path / "run", config), config)
    supervisor.code = PATIENT
    assert supervisor.run(resume=False) == 0
    assert "the learner has not saved within 0 s; the run stops without it" in capsys.readouterr().err
    assert rundir.read_status(supervisor.run_dir)["state"] == "stopped"


def test_a_disk_without_room_for_a_socket_ends_the_run_with_that_as_its_reason(tmp_path, monkeypatch):
    supervisor = TinySupervisor(rundir.create(tmp_path / "run", config := parse_config({}, "test")), config)
    rundir.write_atomic(supervisor.run_dir / "status.json", b'{"state": "training", "step": 3}')

    def full_disk(path: Path, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(supervisors, "tie", full_disk)
    monkeypatch.setattr(rundir, "write_atomic", full_disk)
    assert supervisor.run(resume=False) == 1
    status = rundir.read_status(supervisor.run_dir)
    assert (status["state"], status["step"]) == ("failed", 3)
    assert "the supervisor cannot go on: [Errno 28] No space left on device" in status["reason"]


class Early(TinySupervisor):
    """Stopped as soon as its coordinator is there, or gone."""

    def _end_if_hung(self, role: Role, why: str) -> None:
        self.stop_requested |= (self.run_dir / "rank-0").exists()
        super()._end_if_hung(role, why)

    def _pause(self, seconds: float) -> RoleEnded | None:
        self.stop_requested = True
        return super()._pause(seconds)


def test_a_stop_is_one_without_the_learner_too(tmp_path, capsys):
    config = parse_config({"daemon": {"max_restarts": 0}, "learner": {"num_processes": 2}}, "test")
    supervisor = Stopped(rundir.create(tmp_path / "run", config), config)
    supervisor.code = PATIENT
    assert supervisor.run(resume=False) == 0
    err = capsys.readouterr().err
    assert "learner-1 exited with 70" in err and "the run stops without it" in err, err
    assert rundir.read_status(supervisor.run_dir)["state"] == "stopped"


@pytest.mark.parametrize(
    ("code", "said"),
    [("open('rank-0', 'w').close(); import time; time.sleep(100)", ""), ("raise SystemExit(70)", "starting again")],
    ids=["while it starts", "while it waits to be started again"],
)
def test_a_run_without_a_coordinator_that_listens_stops_at_once(tmp_path, capsys, code, said):
    config = parse_config({"daemon": {"restart_wait_s": 1000.0}}, "test")
    supervisor = Early(rundir.create(tmp_path / "run", config), config)
    rundir.write_atomic(supervisor.run_dir / "status.json", b'{"state": "training", "step": 3}')  # of an earlier life
    supervisor.code = code
    assert supervisor.run(resume=False) == 0
    status = rundir.read_status(supervisor.run_dir)
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "", 3)
    assert said in capsys.readouterr().err
    assert all(role.process is not None and role.process.poll() is not None for role in supervisor.roles)
