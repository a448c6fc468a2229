"""`ngu ctl RUN engines`: the supervisor's processes, with scripts in the place of coordinator and engines."""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import rundir
from pipeline.config import parse_config
from pipeline.control import Request, ask
from pipeline.supervisor import Role, Supervisor

COORDINATOR = "import pathlib, time\nwhile not pathlib.Path('over').exists(): time.sleep(0.02)"
ENGINE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path('left').write_text(sys.argv[1]), sys.exit(0)))
print('up', flush=True)
while not pathlib.Path('over').exists(): time.sleep(0.02)
"""


class Scripted(Supervisor):
    def _learner_roles(self, argv: list[str]) -> list[Role]:
        return []

    def _engine_role(self, name: str) -> Role:
        return Role(name, [sys.executable, "-c", ENGINE, name])

    def _start(self, role: Role) -> None:
        if role.name in ("coordinator", "verifier"):
            role.argv = [sys.executable, "-c", COORDINATOR]
        super()._start(role)


@pytest.fixture
def run(tmp_path: Path):
    config = parse_config({"engines": {"kind": "fake", "count": 2}, "daemon": {"restart_wait_s": 0.0}}, "test")
    path = rundir.create(tmp_path / "run", config)
    supervisor = Scripted(path, config)
    thread = threading.Thread(target=supervisor.run, args=(False,))
    thread.start()
    yield path, supervisor
    (path / "over").touch()
    thread.join()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_engines_come_and_go_and_those_that_stay_are_still_started_again(run):
    path, supervisor = run

    def is_up(name: str) -> bool:
        log = path / "logs" / f"{name}.log"
        return log.exists() and "up" in log.read_text()

    wait_for(lambda: supervisor.is_alive("engine-1") and (path / "ipc" / "supervisor").exists())
    wait_for(lambda: is_up("engine-0") and is_up("engine-1"))
    assert ask(path, Request("engines", "add 1")).text == "starting engine-2"
    wait_for(lambda: is_up("engine-2"))
    assert ask(path, Request("engines", "remove engine-0")).ok
    wait_for(lambda: not supervisor.is_alive("engine-0"))
    assert (path / "left").read_text() == "engine-0"
    assert supervisor.engines() == ["engine-1", "engine-2"]
    role = supervisor._role("engine-2")
    first = role.process
    first.kill()
    wait_for(lambda: role.process is not first)
    assert not supervisor.is_alive("engine-0"), "what was removed does not come back"
    assert ask(path, Request("engines", "add 1")).text == "starting engine-0"
    assert not ask(path, Request("engines", "remove learner")).ok
