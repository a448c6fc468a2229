"""What the supervisor does about a role that dies, stops or hangs, with roles of a few lines."""

import os
import re
import sys
from pathlib import Path

import pytest
from tiny_supervisor import ENGINE, TinySupervisor

from pipeline import daemon, rundir
from pipeline.config import parse_config
from pipeline.errors import ConfigError
from pipeline.guards import RESTART_WINDOW_S, RestartBudget
from pipeline.logs import LogTail
from pipeline.supervisor import Role

# Does to the first engine what HARM says, and ends the run once there is another.
COORDINATOR = """
import json, os, signal, time
def pid():
    try:
        return int(open("engine").read())
    except FileNotFoundError:
        return 0
while not (first := pid()):
    time.sleep(0.01)
HARM
while pid() == first:
    peers = {"engine-0": {"pid": first, "silent_s": SILENT}}
    open("status.partial", "w").write(json.dumps({"pid": os.getpid(), "peers": peers}))
    os.rename("status.partial", "status.json")
    time.sleep(0.05)
"""


# Kills ranks at the steps of DEATHS, each time when both are there and have met; started again, it ends the run.
MURDERER = """
import json, os, signal, time
NOBODY = [(0, 0), (0, 0)]
def ranks():
    try:
        return [open(f"rank-{i}").read().split() for i in (0, 1)]
    except FileNotFoundError:
        return NOBODY
if os.path.exists("started"):
    raise SystemExit
open("started", "w").close()
before = NOBODY
for step, victim in DEATHS:
    while any(now in before for now in ranks()) or ranks()[0][1] != ranks()[1][1]:
        time.sleep(0.01)
    before = ranks()
    open("partial", "w").write(json.dumps({"step": step}))
    os.rename("partial", "status.json")
    os.kill(int(before[victim][0]), signal.SIGKILL)
while any(now in before for now in ranks()):
    time.sleep(0.01)
"""


# Says how the run goes until it is told to stop, and then how it went, as far as it knows.
UNKNOWING = """
import json, os, signal, time
def say(state):
    open("partial", "w").write(json.dumps({"state": state, "step": 3}))
    os.rename("partial", "status.json")
def stop(*_):
    say("stopped")
    raise SystemExit
signal.signal(signal.SIGTERM, stop)
while True:
    say("training")
    time.sleep(0.01)
"""
# Dies as soon as the run's step can be read, which tells the supervisor how far it came.
MORTAL = """
import os, signal, time
while not os.path.exists("status.json"):
    time.sleep(0.01)
print("no memory", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("harm", "silent_s", "said"),
    [
        ("os.kill(first, signal.SIGKILL)", 0, "engine-0 was killed by signal 9"),
        ("os.kill(first, signal.SIGSTOP)", 0, "engine-0 is stopped (SIGSTOP): it is killed"),
        ("pass", 99, "engine-0 has said nothing for 99 s: it is killed"),
    ],
    ids=["dies", "stops", "hangs"],
)
def test_a_role_that_dies_stops_or_hangs_is_replaced_alone(tmp_path, monkeypatch, capsys, harm, silent_s, said):
    monkeypatch.setattr("pipeline.guards.PERIOD_S", 0.0)
    config = parse_config({"daemon": {"restart_wait_s": 0.0, "hang_s": 50.0}}, "test")
    supervisor = TinySupervisor(rundir.create(tmp_path / "run", config), config)
    supervisor.code = COORDINATOR.replace("HARM", harm).replace("SILENT", str(silent_s))
    assert supervisor.run(resume=False) == 0
    err = capsys.readouterr().err
    assert said in err and err.count("starting it again in 0 s") == 1
    assert all(role.process is not None and role.process.poll() is not None for role in supervisor.roles)
    for role in ("coordinator", "engine-0"):
        assert not LogTail(supervisor.run_dir / "logs" / f"{role}.log")._file, "nothing went wrong inside a role"


@pytest.mark.parametrize(
    ("deaths", "num_alone", "num_whole"),
    [([(3, 1), (4, 0)], 2, 0), ([(3, 0), (3, 1)], 1, 1)],
    ids=["further on", "at the same step"],
)
def test_ranks_of_a_learner_are_replaced_together_unless_they_come_no_further(
    tmp_path, capsys, deaths, num_alone, num_whole
):
    config = parse_config({"daemon": {"restart_wait_s": 0.0}, "learner": {"num_processes": 2}}, "test")
    supervisor = TinySupervisor(rundir.create(tmp_path / "run", config), config)
    supervisor.code = MURDERER.replace("DEATHS", str(deaths))
    assert supervisor.run(resume=False) == 0
    err = capsys.readouterr().err
    assert err.count("starting it again in 0 s") == num_alone and "engine" not in err, err
    assert err.count("starting again from the last checkpoint") == num_whole, err
    assert all(role.process is not None and role.process.poll() is not None for role in supervisor.roles)
    assert not LogTail(supervisor.run_dir / "logs" / "coordinator.log")._file, "nothing went wrong inside a role"


def test_a_learner_that_dies_at_every_start_ends_the_run_with_that_as_its_reason(tmp_path, capsys):
    daemon = {"restart_wait_s": 0.0, "max_restarts": 3}
    config = parse_config({"daemon": daemon, "learner": {"num_processes": 2}}, "test")
    supervisor = TinySupervisor(rundir.create(tmp_path / "run", config), config)
    supervisor.code, supervisor.learner = UNKNOWING, MORTAL
    assert supervisor.run(resume=False) == 1
    err = capsys.readouterr().err
    # Alone, then with all others, since it came no further, and alone again.
    assert (err.count("starting it again"), err.count("starting again from the last checkpoint")) == (2, 1), err
    status = rundir.read_status(supervisor.run_dir)
    assert status["state"] == "failed" and "(no memory); no restarts are left in this hour" in status["reason"]
    assert status["reason"].startswith("learner") and "was killed by signal 9" in status["reason"]


@pytest.mark.parametrize(
    ("words", "num_restarts", "why"),
    [
        (
            "f'CudaError: {os.getpid()} bytes at {os.getpid() ** 4:#x}'",
            1,
            "twice at step 3 in these words; mend that and `ngu resume`",
        ),
        ("('one', 'two', 'three', 'four')[len(os.listdir('crashes'))]", 3, "no restarts are left in this hour"),
    ],
    ids=["the same", "another"],
)
def test_a_learner_that_crashes_twice_in_the_same_words_is_not_tried_a_third_time(
    tmp_path, capsys, words, num_restarts, why
):
    raw = {"daemon": {"restart_wait_s": 0.0}, "learner": {"num_processes": 2}}
    supervisor = TinySupervisor(rundir.create(tmp_path / "run", config := parse_config(raw, "test")), config)
    (supervisor.run_dir / "crashes").mkdir()
    crash = f"import sys\nif sys.argv[-1] == '1': time.sleep(100)\nprint({words}, flush=True)\n"
    crash += "open(f'crashes/{os.getpid()}', 'w').close()\nraise SystemExit(70)"
    supervisor.code, supervisor.learner = UNKNOWING, MORTAL.partition("print")[0] + crash
    assert supervisor.run(resume=False) == 1
    assert len(list((supervisor.run_dir / "crashes").iterdir())) == num_restarts + 1, capsys.readouterr().err
    status = rundir.read_status(supervisor.run_dir)
    assert status["state"] == "failed" and status["reason"].startswith("learner exited with 70 (")
    assert status["reason"].endswith(why) or f"; {why}" in status["reason"]


# Ends when the engine has said which cores it may use, and says so of itself.
PLACED = """
import os, time
def cores(pid):
    return sorted(os.sched_getaffinity(pid))
while not os.path.exists("engine"):
    time.sleep(0.01)
open("cores", "w").write(repr((cores(int(open("engine").read())), cores(0))))
"""


def test_an_engine_has_a_core_to_itself_and_the_other_roles_have_the_rest(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    config = parse_config({"engines": {"own_cores": True, "count": 1}}, "test")
    run_dir = rundir.create(tmp_path / "run", config)
    if len(mine) == 1:
        with pytest.raises(ConfigError, match="1 engines and the other roles take 2 cores, and there are 1"):
            TinySupervisor(run_dir, config)
        return
    supervisor = TinySupervisor(run_dir, config)
    supervisor.code = PLACED
    assert supervisor.run(resume=False) == 0
    assert (run_dir / "cores").read_text() == repr((mine[:1], mine[1:]))
    assert sorted(os.sched_getaffinity(0)) == mine, "the supervisor itself stays where it was"
    with pytest.raises(ConfigError, match=f"{len(mine)} engines and the other roles take {len(mine) + 1} cores"):
        TinySupervisor(run_dir, parse_config({"engines": {"own_cores": True, "count": len(mine)}}, "test"))


# Kills the engines of DEATHS one after the other, and ends the run once there is another process in the place of LEFT.
HUNTER = """
import os, signal, time
def pid(name):
    try:
        return int(open(name).read())
    except FileNotFoundError:
        return 0
killed = {}
for name in DEATHS:
    while (now := pid(name)) in (0, killed.get(name)):
        time.sleep(0.01)
    killed[name] = now
    os.kill(now, signal.SIGKILL)
while LEFT is None or pid(LEFT) == killed[LEFT]:
    time.sleep(0.01)
"""


class Engines(TinySupervisor):
    """Several, and nothing else than a coordinator."""

    def _start_all(self, checkpoint: Path | None) -> None:
        self.roles = [Role("coordinator", [sys.executable, "-S", "-c", self.code])]
        self.roles += [self._engine_role(name) for name in self._engine_names]
        for role in self.roles:
            self._start(role)

    def _engine_role(self, name: str) -> Role:
        return Role(name, [sys.executable, "-S", "-c", ENGINE.replace('"engine', f'"{name}')])


def test_an_engine_that_dies_too_often_is_missed_for_an_hour_and_ends_the_run_only_as_the_last(tmp_path, capsys):
    raw = {"daemon": {"restart_wait_s": 0.0, "max_restarts": 2}, "engines": {"count": 2}}
    config = parse_config(raw, "test")
    supervisor = Engines(rundir.create(tmp_path / "run", config), config)
    deaths = ["engine-1"] * 3 + ["engine-0"] * 2  # which has a budget of its own
    supervisor.code = HUNTER.replace("DEATHS", str(deaths)).replace("LEFT", "'engine-0'")
    assert supervisor.run(resume=False) == 0
    waits = re.findall(r"(engine-\d) was killed by signal 9 .* starting it again in (\d+)", capsys.readouterr().err)
    assert sorted(name for name, _ in waits) == sorted(deaths)
    assert [name for name, wait in waits if int(wait) > 3000] == ["engine-1"], waits

    supervisor = Engines(rundir.create(tmp_path / "again", config), config)
    supervisor.code = HUNTER.replace("DEATHS", str([*deaths, "engine-0"])).replace("LEFT", "None")
    assert supervisor.run(resume=False) == 1
    reason = rundir.read_status(supervisor.run_dir)["reason"]
    assert reason.startswith("engine-0 was killed by signal 9") and "no restarts are left" in reason


class Ending(TinySupervisor):
    """The run is over at once; one role takes its time, and another never ends."""

    def _start_all(self, checkpoint: Path | None) -> None:
        python = [sys.executable, "-S", "-c"]
        slow = "import time; time.sleep(0.5); open('done', 'w')"
        self.roles = [
            Role("coordinator", [*python, ""]),
            Role("engine-0", [*python, "import time; time.sleep(100)"], grace_s=0.0),
            Role("ray", [*python, slow], grace_s=100.0),
        ]
        for role in self.roles:
            self._start(role)


def test_each_role_has_its_own_time_to_end_with_the_run(tmp_path):
    supervisor = Ending(rundir.create(tmp_path / "run", config := parse_config({}, "test")), config)
    assert supervisor.run(resume=False) == 0
    assert (supervisor.run_dir / "done").exists()
    assert [role.process and role.process.returncode for role in supervisor.roles] == [0, -9, 0]


def test_a_budget_of_restarts_is_for_an_hour_and_its_waits_double():
    now = 0.0
    budget = RestartBudget(3, 2.0, lambda: now)
    assert [budget.take() for _ in range(3)] == [2.0, 4.0, 8.0]
    assert budget.is_spent
    now = RESTART_WINDOW_S + 1
    assert not budget.is_spent and budget.take() == 2.0
    assert RestartBudget(0, 0.0).is_spent
    now += RESTART_WINDOW_S + 1
    assert [budget.take() for _ in range(3)] == [2.0, 4.0, 8.0]
    now += 600
    assert budget.take() == RESTART_WINDOW_S - 600, "until the hour is over"
    many = RestartBudget(100, 1.0)
    assert [many.take() for _ in range(50)][-1] == 60.0


def test_the_supervisor_in_the_background_keeps_its_own_log(tmp_path, monkeypatch):
    run = rundir.create(tmp_path / "run", parse_config({}, "test"))
    (run / "logs").mkdir()
    monkeypatch.setattr(sys, "argv", ["daemon", str(run)])
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with rundir.lock(run):
        assert daemon.main() == 2
    tail = LogTail(run / "logs" / "daemon.log")
    assert [line for line in tail.read(final=True) if "error: " in line and "is in use" in line]
    tail.close()
