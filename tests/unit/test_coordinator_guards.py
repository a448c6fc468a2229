"""Hung processes, a full disk or memory, clocks that jump, and the logs a person reads when something is wrong."""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fakes import Simulation

from pipeline import checkpoints, guards, rundir
from pipeline.checkpoints import latest
from pipeline.config import parse_config
from pipeline.control_cli import logs
from pipeline.coordinator.guarding import Guards
from pipeline.coordinator.status import describe
from pipeline.errors import ConfigError
from pipeline.guards import ClockGuard, DiskGuard, HangWatch, MemoryGuard, tree_bytes
from pipeline.ledger_cli import ledger
from pipeline.messages import Heartbeat, Rollout, pack_ids


class Watched:
    """A run directory, a status file and a clock that only the test moves."""

    def __init__(self, path: Path):
        self.path, self.now, self.stamp = path, 0.0, 0
        self.watch = HangWatch(path, 10.0, lambda: self.now)

    def write(self, **silent_s: float) -> None:
        peers = {name: {"pid": 100 + i, "silent_s": s} for i, (name, s) in enumerate(silent_s.items())}
        rundir.write_atomic(self.path / "status.json", msgspec.json.encode({"pid": 7, "peers": peers}))
        self.stamp += 1
        os.utime(self.path / "status.json", ns=(self.stamp, self.stamp))

    def after(self, seconds: int) -> dict[int, str]:
        """What the last of the looks says, of which there is one a second."""
        for _ in range(seconds):
            self.now += 1.0
            hung = self.watch.hung()
        return hung


def test_a_silent_peer_is_hung_and_a_talking_one_is_not(tmp_path):
    w = Watched(tmp_path)
    w.write(engine=1.0, learner=9.9)
    assert w.after(1) == {}
    w.write(engine=2.0, learner=11.0)
    assert w.after(1) == {101: "has said nothing for 11 s"}


def test_a_coordinator_that_stops_writing_is_hung_whatever_its_last_words(tmp_path):
    w = Watched(tmp_path)
    w.write(engine=1.0)
    assert w.after(1) == {}
    assert w.after(9) == {}
    assert w.after(2) == {7: "has not written status.json for 11 s"}


def test_no_one_hangs_who_was_stopped_together_with_who_looks(tmp_path):
    w = Watched(tmp_path)
    w.write(engine=1.0)
    assert w.after(1) == {}
    w.now += 3600.0  # a scheduler has stopped the whole job
    assert w.after(1) == {}
    w.write(engine=3601.0)
    assert w.after(9) == {}
    w.write(engine=3612.0)
    assert w.after(2) == {100: "has said nothing for 3612 s"}, "it has not come back with the others"


def test_a_status_of_an_earlier_life_says_nothing(tmp_path):
    Watched(tmp_path).write(engine=99.0)
    w = Watched(tmp_path)
    assert w.after(500) == {}, "a new coordinator may take as long to start as it needs"


def test_silence_is_counted_from_the_first_word_after_hello(tmp_path):
    run = Simulation(tmp_path, parse_config({}, "test"))
    run.coordinator.turn(0.0)
    run.inbox.append(("verifier", Heartbeat({})))
    run.coordinator.turn(0.0)
    run.now += 5.0
    peers = describe(run.coordinator)["peers"]
    assert (peers["verifier"]["pid"], peers["verifier"]["silent_s"]) == (1, 5.0)
    run.add_engine("engine-0", boot="2")
    run.coordinator.turn(0.0)
    assert describe(run.coordinator)["peers"]["engine-0"]["silent_s"] is None, "a new process is loading its model"
    run.ledger.close()


def test_a_nearly_full_disk_saves_and_pauses_until_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "PERIOD_S", 0.0)
    free = {"bytes": 10 * guards.MIN_FREE_BYTES}
    guard = DiskGuard(tmp_path, lambda path: free["bytes"])
    config = parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    run = Simulation(tmp_path, config)
    look = Guards(run.coordinator, guard, MemoryGuard(0, lambda: 0), ClockGuard()).look

    def turns(n: int) -> None:
        for _ in range(n):
            run.turn()
            look()

    while run.version < 1:
        turns(1)
    assert latest(tmp_path) is None
    free["bytes"] = guards.MIN_FREE_BYTES - 1
    turns(100)
    paused_at = run.version
    assert latest(tmp_path) is not None
    assert "nearly full" in run.coordinator.tally.warnings[-1]
    free["bytes"] = guards.MIN_FREE_BYTES + 1
    turns(100)
    assert run.version == paused_at, "at the bound it would pause and go on all the time"
    free["bytes"] = 3 * guards.MIN_FREE_BYTES
    turns(1)
    run.run()
    assert run.coordinator.state == "finished" and run.version > paused_at
    run.ledger.close()


def test_what_a_dead_engine_held_is_given_to_others_before_another_takes_its_place(tmp_path):
    config = parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    run = Simulation(tmp_path, config, num_engines=3)
    while run.version < 1:
        run.turn()
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    coordinator, held = run.coordinator, run.engines["engine-1"].num_in_flight
    for name, pid in (("engine-0", os.getpid()), ("engine-1", dead.pid), ("engine-2", 0)):
        coordinator.peers.known[name] = msgspec.structs.replace(coordinator.peers.known[name], pid=pid)
    run.stopped.add("engine-1")
    run.inbox = deque((name, message) for name, message in run.inbox if name != "engine-1")
    Guards(coordinator, DiskGuard(tmp_path), MemoryGuard(0, lambda: 0), ClockGuard()).look()
    assert held > 0 and run.ledger.counts["failed"] == held
    assert [name for name, peer in coordinator.peers.known.items() if peer.role == "engine"] == ["engine-0", "engine-2"]
    run.run()
    assert coordinator.state == "finished"
    run.ledger.close()


def test_attempts_that_an_engine_never_ends_are_launched_again(tmp_path):
    config = parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    run = Simulation(tmp_path, config, num_engines=2)
    while run.version < 1:
        run.turn()
    coordinator, held = run.coordinator, run.engines["engine-1"].num_in_flight
    look = Guards(coordinator, DiskGuard(tmp_path), MemoryGuard(0, lambda: 0), ClockGuard()).look
    run.stopped.add("engine-1")  # but it lives, and says so
    for _ in range(400):
        run.turn()
    assert coordinator.flow.work.num_held == coordinator.flow.work.held_by("engine-1") >= held > 0
    held = coordinator.flow.work.num_held
    for later in (0.0, 59.0, 11.0):
        run.now += later
        look()
        assert run.ledger.counts["failed"] == (held if later == 11.0 else 0)
    assert f"engine-1 has not ended {held} attempts in 60 s" in coordinator.tally.warnings[-1]
    assert coordinator.flow.work.num_held == 0
    run.stopped.clear()
    run.run()
    assert coordinator.state == "finished" and run.ledger.counts["failed"] == held
    run.ledger.close()


def test_an_attempt_may_take_as_long_as_all_its_tokens_do_at_a_slow_pace(tmp_path):
    run = Simulation(tmp_path, parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}}, "test"))
    coordinator = run.coordinator
    while not coordinator.flow.work.num_held:
        run.turn()
    slow = Rollout(1, 1, 0, b"", pack_ids([1, 2]), b"", (), "stop", "", "e", started_ns=0, finished_ns=10**9)
    coordinator.tally.rollouts([slow], 0)
    look = Guards(coordinator, DiskGuard(tmp_path), MemoryGuard(0, lambda: 0), ClockGuard()).look
    for later in (0.0, 40 * coordinator.config.sampling.max_new_tokens * 0.5 - 1.0):
        run.now += later
        look()
    assert coordinator.tally.counters["warnings"] == 0
    run.ledger.close()


def test_a_stop_does_not_wait_for_a_learner_that_dies_in_its_last_save(tmp_path, monkeypatch):
    config = parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    run = Simulation(tmp_path, config)
    while run.version < 2:
        run.turn()
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    coordinator = run.coordinator
    monkeypatch.setattr(run, "_save", lambda name, message: None)  # it dies there
    coordinator.stop_requested = True
    for _ in range(5):
        run.turn()
    assert coordinator.state == "stopping"
    coordinator.peers.known["learner"] = msgspec.structs.replace(coordinator.peers.known["learner"], pid=dead.pid)
    Guards(coordinator, DiskGuard(tmp_path), MemoryGuard(0, lambda: 0), ClockGuard()).look()
    run.turn()
    assert coordinator.state == "stopped"
    assert f"no checkpoint of step {run.version}, as the learner was away" in coordinator.tally.warnings[-1]
    coordinator.close()


@pytest.mark.parametrize("room", [-1, 1])
def test_a_checkpoint_for_which_there_is_no_room_is_not_begun(tmp_path, monkeypatch, room):
    host = Host(tmp_path, monkeypatch)
    part = tmp_path / "checkpoints" / "step_000003" / "model"
    part.mkdir(parents=True)
    with (part / "weights").open("wb") as file:
        file.truncate(10 * guards.MIN_FREE_BYTES)
    size = checkpoints.newest_bytes(tmp_path)
    assert size >= 10 * guards.MIN_FREE_BYTES
    assert host.look(free=size + guards.MIN_FREE_BYTES) == "run"
    assert host.look(free=size + room) == "pause"
    assert host.run.coordinator.save_requested == (room > 0)
    assert host.look(free=size + guards.MIN_FREE_BYTES) == "pause"
    assert host.look(free=size + 2 * guards.MIN_FREE_BYTES) == "run"
    host.run.ledger.close()


# --- logs ---


@pytest.fixture
def written(tmp_path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs" / "engine-0.log").write_text("one\ntwo")
    (tmp_path / "logs" / "learner.log").write_text("three\n")
    return tmp_path


def test_lines_come_after_the_name_of_their_process(written, capsys):
    assert logs(written) == 0
    assert capsys.readouterr().out == "engine-0 | one\nengine-0 | two\nlearner | three\n"
    assert logs(written, role="learner") == 0
    assert capsys.readouterr().out == "learner | three\n"


def test_an_unknown_role_is_refused_with_the_known_ones(written):
    with pytest.raises(ConfigError, match="logs are there of engine-0, learner"):
        logs(written, role="enigne-0")


def test_following_prints_what_is_added_and_ends_with_the_run(written, capsys):
    with rundir.lock(written):
        follower = threading.Thread(target=logs, args=(written,), kwargs={"follow": True})
        follower.start()
        with (written / "logs" / "learner.log").open("a") as log:
            log.write("four\n")
        (written / "logs" / "verifier.log").write_text("five")
    follower.join(10)
    assert not follower.is_alive()
    out = capsys.readouterr().out.splitlines()
    assert sorted(out) == ["engine-0 | one", "engine-0 | two", "learner | four", "learner | three", "verifier | five"]


# --- memory and clock ---

PLENTY = float(100 * guards.MIN_FREE_BYTES)


class Host:
    """A simulated run on a machine whose disk, memory and clock the test sets."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, wall: Callable[[], float] = time.time, **changes):
        monkeypatch.setattr(guards, "PERIOD_S", 0.0)
        monkeypatch.setattr(guards, "MEMORY_PERIOD_S", 0.0)
        raw = {"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}, "guards": changes}
        cfg = parse_config(raw, "test")
        self.run = Simulation(path, cfg)
        self.free, self.resident = PLENTY, 0.0
        memory = MemoryGuard(cfg.guards.memory_gib * (1 << 30), lambda: int(self.resident * (1 << 30)))
        self._guards = Guards(self.run.coordinator, DiskGuard(path, lambda _: int(self.free)), memory, ClockGuard(wall))

    def look(self, free: float | None = None, resident: float | None = None) -> str:
        self.free = self.free if free is None else free
        self.resident = self.resident if resident is None else resident
        self._guards.look()
        return self.run.coordinator.mode

    @property
    def warnings(self) -> list[str]:
        return list(self.run.coordinator.tally.warnings)


def test_room_on_the_disk_does_not_undo_what_a_person_asked_for(tmp_path, monkeypatch):
    host = Host(tmp_path, monkeypatch)
    coordinator = host.run.coordinator
    coordinator.mode = "drain"
    assert host.look(free=0) == "pause"
    assert host.look(free=PLENTY) == "drain"
    host.look(free=0)
    coordinator.mode = "run"  # a person said resume, knowing better
    assert host.look(free=PLENTY) == "run"


def test_memory_warns_at_nine_tenths_and_pauses_at_the_bound_until_there_is_room(tmp_path, monkeypatch):
    host = Host(tmp_path, monkeypatch, memory_gib=1.0)
    assert host.look(resident=0.89) == "run" and not host.warnings
    assert host.look(resident=0.95) == "run" and "nine tenths of guards.memory_gib = 1" in host.warnings[-1]
    assert host.look(resident=1.0) == "pause" and host.run.coordinator.save_requested
    assert "more than guards.memory_gib = 1: saved and paused" in host.warnings[-1]
    assert host.look(resident=0.95) == "pause"
    assert host.look(free=0, resident=0.5) == "pause", "for the disk now"
    assert host.look(free=PLENTY) == "run"
    assert host.run.coordinator.tally.host == {"host/resident_bytes": 0.5 * (1 << 30), "host/disk_free_bytes": PLENTY}


def test_memory_over_the_bound_stops_a_run_that_is_told_to_and_only_warns_another(tmp_path, monkeypatch):
    host = Host(tmp_path, monkeypatch, memory_gib=1.0, memory="stop")
    host.look(resident=2.0)
    host.run.run()
    assert host.run.coordinator.state == "stopped" and latest(tmp_path) is not None
    host.run.ledger.close()
    (tmp_path / "other").mkdir()
    other = Host(tmp_path / "other", monkeypatch, memory_gib=1.0, memory="warn")
    assert other.look(resident=2.0) == "run" and "more than guards.memory_gib = 1" in other.warnings[-1]
    assert not other.run.coordinator.stop_requested


def test_memory_of_a_tree_is_that_of_its_processes():
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'1' * (64 << 20); print(len(x), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin and child.stdout
    child.stdout.readline()
    own, alone = tree_bytes(os.getpid()), tree_bytes(child.pid)
    child.communicate(b"\n")
    assert 64 << 20 < alone < 128 << 20
    assert own > alone
    assert tree_bytes(child.pid) == 0


def test_a_clock_that_jumps_is_noticed_once_and_breaks_nothing(tmp_path, monkeypatch):
    wall = {"s": 1e9}
    monkeypatch.setattr(time, "time", lambda: wall["s"])
    monkeypatch.setattr(time, "time_ns", lambda: int(wall["s"] * 1e9))
    host = Host(tmp_path, monkeypatch, wall=lambda: wall["s"] + time.monotonic())
    for jump, step in ((-3e6, 1), (7e6, 2), (2.0, 3)):
        while host.run.version < step:
            host.run.turn()
        wall["s"] += jump
        host.look()
        host.look()
    host.run.run()
    host.run.ledger.close()
    assert host.run.coordinator.state == "finished"
    jumps = [w for w in host.warnings if "the wall clock jumped by" in w]
    assert [w.split("by ")[1].split(",")[0] for w in jumps] == ["-3000000 s", "+7000000 s"]
    (tmp_path / "config.json").write_text("{}")
    assert ledger(tmp_path, verify=True) == 0


def test_unknown_verdicts_are_a_warning_at_half_the_rate_that_ends_the_run(tmp_path):
    raw = {"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}
    run = Simulation(tmp_path, parse_config(raw, "test"), unknown_every=3)
    run.run()
    run.ledger.close()
    words = "could not judge more than 25% of recent rollouts; above 50%"
    assert sum(words in warning["text"] for warning in run.sink.of_kind("warning")) == 1
    assert run.sink.of_kind("step")[-1]["metrics"]["guard/unknown_verdict_frac"] > 0.25


def test_a_moment_stopped_between_two_clock_readings_is_no_jump():
    readings = iter([0.0, 0.0, 60.0, 70.0, 71.0])
    guard = ClockGuard(wall=lambda: 1000.0, monotonic=lambda: next(readings))
    assert guard.jump_s() == 0.0
