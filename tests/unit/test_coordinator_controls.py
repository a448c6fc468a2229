"""Live commands: what each changes, what is refused, and that a run under them still ends with balanced books."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
from fakes import Simulation

from pipeline import control, control_cli, rundir
from pipeline.checkpoints import latest
from pipeline.config import Config, dump_config, parse_config
from pipeline.control import LIVE_FIELDS, ControlSocket, Reply, Request, Verb, ask
from pipeline.control_cli import ctl
from pipeline.coordinator.controls import Controls
from pipeline.engine_control import EngineControl
from pipeline.errors import ConfigError, NguError
from pipeline.messages import SetLearningRate


def config(**changes) -> Config:
    raw = {
        "max_rollouts": 600,
        "engines": {"slots": 8},
        "learner": {"batch_size": 32},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 0},
    }
    return parse_config(raw | changes, "test")


class Driven:
    """A simulated run with a person at its controls."""

    def __init__(self, path: Path, cfg: Config):
        self.run = Simulation(path, cfg)
        self.controls = Controls(self.run.coordinator)

    def reach(self, step: int) -> "Driven":
        while self.run.version < step:
            self.turn()
        return self

    def turn(self, n: int = 1) -> None:
        for _ in range(n):
            self.run.turn()
            self.run.check_books()

    def do(self, verb: Verb, setting: str = "") -> Reply:
        return self.controls.handle(Request(verb, setting))


@pytest.fixture
def driven(tmp_path):
    made = Driven(tmp_path, config()).reach(2)
    yield made
    made.run.ledger.close()


def test_pause_stops_everything_new_and_resume_goes_on(driven):
    assert driven.do("pause").ok
    driven.turn(60)  # what ran has ended
    flow, version = driven.run.coordinator.flow, driven.run.version
    launched = driven.run.ledger.counts["launched"]
    driven.turn(60)
    assert (driven.run.version, driven.run.ledger.counts["launched"]) == (version, launched)
    assert flow.book.num_in_flight == 0 and driven.run.coordinator.state == "training"
    assert driven.do("pause").text.startswith("nothing to do: paused")
    assert driven.do("resume").ok
    driven.run.run()
    assert driven.run.coordinator.state == "finished"
    assert driven.run.version > version


def test_drain_trains_the_full_batches_and_waits(driven):
    driven.do("drain")
    driven.turn(200)
    flow = driven.run.coordinator.flow
    assert flow.book.num_in_flight == 0
    assert not flow.batcher.ready and driven.run.coordinator.lineage.training is None
    assert driven.run.coordinator.state == "training"
    driven.do("resume")
    driven.run.run()
    assert driven.run.coordinator.state == "finished"


@pytest.mark.parametrize("mode", ["resume", "pause"])
def test_a_checkpoint_on_demand_is_of_a_whole_step(driven, mode, tmp_path):
    driven.do(mode)
    assert latest(tmp_path) is None
    assert driven.do("checkpoint").ok
    driven.turn(40)
    saved = latest(tmp_path)
    assert saved is not None
    driven.do("resume")
    driven.run.ledger.close()
    again = Simulation(tmp_path, config(), resume=saved)
    again.run()
    assert again.coordinator.state == "finished"
    again.ledger.close()


def test_an_evaluation_on_demand_runs_beside_training_one_at_a_time(driven):
    assert driven.do("eval").ok
    assert not driven.do("eval").ok
    driven.run.run()
    assert [e["phase"] for e in driven.run.sink.of_kind("eval")] == ["before", "during", "after"]


def test_shutdown_saves_and_ends(driven, tmp_path):
    driven.do("shutdown")
    driven.run.run()
    assert driven.run.coordinator.state == "stopped"
    assert latest(tmp_path) is not None
    assert not driven.do("pause").ok


def test_set_changes_the_run_and_what_a_restart_reads(driven, tmp_path):
    reply = driven.do("set", "max_steps=4")
    assert reply == Reply(True, "max_steps: 0 -> 4, from step 2 on")
    assert rundir.read_config(tmp_path).max_steps == 4
    driven.do("set", "sampler.max_retry_frac=0.25")
    assert driven.run.coordinator.sampler._config.max_retry_frac == 0.25
    driven.run.run()
    assert driven.run.version == 4


def test_a_new_learning_rate_reaches_the_learner_before_its_next_batch(driven):
    seen = len(driven.run.sent)
    driven.do("set", "learner.lr=0.5")
    driven.turn()
    assert ("learner", SetLearningRate(0.5)) in driven.run.sent[seen:]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learner.batch_size=8", "'learner.batch_size' cannot change while the run goes on"),
        ("seed=1", "'seed' cannot change"),
        ("sampler.p_ngu=2", "p_ngu"),
        ("staleness.max_lag=-1", "max_lag"),
        ("max_rollouts=0", "the run would never end"),
        ("learner.lr", "an override is written"),
        ("sampler.seq_multiplier=8", "completions of 560 tokens and their prompts do not fit into the 512 positions"),
    ],
)
def test_a_bad_setting_is_refused_and_changes_nothing(driven, setting, message):
    before = driven.run.coordinator.config
    reply = driven.do("set", setting)
    assert not reply.ok and message in reply.text
    assert driven.run.coordinator.config is before


def test_evaluations_that_no_engine_would_do_are_refused(tmp_path):
    """Pinned, and started without any: the supervisor has made no engine for them."""
    driven = Driven(tmp_path, config(eval={"every_steps": 0, "final_num_rollouts": 1, "pinned": True})).reach(1)
    for reply in (driven.do("eval"), driven.do("set", "eval.every_steps=2")):
        assert not reply.ok and "eval.pinned needs an engine of its own" in reply.text
    assert driven.run.coordinator.config.eval.every_steps == 0
    driven.run.add_engine("evaluator-1", role="evaluator")
    driven.turn(3)
    assert driven.do("set", "eval.every_steps=2").ok
    driven.run.run()
    assert [e["phase"] for e in driven.run.sink.of_kind("eval")][1] == "during"


def test_every_live_field_is_a_field(driven):
    known = dump_config(Config())
    for key in LIVE_FIELDS:
        value = known
        for name in key.split("."):
            value = value[name]


def test_a_setting_made_since_the_checkpoint_survives_a_crash(tmp_path):
    made = Driven(tmp_path, config()).reach(3)
    made.do("set", "sampler.max_retry_frac=0.25")
    made.turn(30)
    sampler = made.run.coordinator.sampler.state()
    made.run.ledger._db.close()
    again = Simulation(tmp_path, rundir.read_config(tmp_path))
    assert again.coordinator.sampler.state() == sampler
    assert again.coordinator.sampler._config.max_retry_frac == 0.25
    again.run()
    again.ledger.close()


# --- the socket ---


@pytest.fixture
def served(tmp_path):
    """A run directory whose control socket answers `echo` from a thread of its own."""
    run_dir = tmp_path / ("a_directory_with_a_name_longer_than_a_unix_socket_may_have_" * 2)
    (run_dir / "ipc").mkdir(mode=0o700, parents=True)
    (run_dir / "config.json").write_text("{}")
    done = threading.Event()

    def serve() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(run_dir)
            socket = ControlSocket(control.ENDPOINT, run_dir / "control.jsonl")
        ready.set()
        while not done.is_set():
            socket.serve(lambda request: Reply(request.verb != "eval", f"{request.verb} {request.setting}".strip()))
            done.wait(0.005)
        socket.close()

    ready = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(10)
    yield run_dir
    done.set()
    thread.join()


def test_a_command_is_answered_and_recorded_wherever_the_run_lives(served, capsys, monkeypatch):
    monkeypatch.setattr(rundir, "is_running", lambda path: True)
    assert ctl(served, "set", "learner.lr=1e-4") == 0
    with pytest.raises(NguError, match="eval") as refused:
        ctl(served, "eval")
    assert refused.value.exit_status == 1
    assert capsys.readouterr().out == "set learner.lr=1e-4\n"
    lines = [json.loads(line) for line in (served / "control.jsonl").read_text().splitlines()]
    assert [(r["verb"], r["setting"], r["ok"]) for r in lines] == [
        ("set", "learner.lr=1e-4", True),
        ("eval", "", False),
    ]


NO_COMMANDS = [b"", b"\xff\x00", b'{"verb":"explode"}', b'{"verb":"set","x":1}', b"[" * 5000]


@pytest.mark.parametrize("frames", [*([payload] for payload in NO_COMMANDS), [b"{", b"", b"}"]])
def test_bytes_that_are_no_command_are_answered_and_the_next_one_works(served, frames, monkeypatch):
    monkeypatch.chdir(served)
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(control.ENDPOINT)
    socket.send_multipart(frames)
    assert socket.poll(5000)
    assert not msgspec.json.decode(socket.recv(), type=Reply).ok
    context.destroy(linger=0)
    assert ask(served, Request("pause")).ok


def test_a_setting_that_the_run_refuses_is_the_users_mistake(served, monkeypatch):
    monkeypatch.setattr(rundir, "is_running", lambda path: True)
    monkeypatch.setattr(control_cli, "ask", lambda path, request: Reply(False, "no such field"))
    with pytest.raises(ConfigError, match="no such field"):
        ctl(served, "set", "learner.lrr=1")


def test_a_run_that_does_not_answer_is_an_error_with_the_next_step(tmp_path):
    with pytest.raises(NguError, match="ngu status"):
        ask(tmp_path, Request("pause"))
    (tmp_path / "ipc").mkdir()
    with pytest.raises(NguError, match="no answer"):
        ask(tmp_path, Request("pause"), timeout_s=0.05)


@pytest.mark.parametrize("command", [("set",), ("pause", "learner.lr=1"), ("engines", "add"), ("set", "a=1", "b=2")])
def test_a_command_takes_what_it_needs_and_nothing_else(tmp_path, command):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="one key=value"):
        ctl(tmp_path, *command)


class Engines:
    """What the supervisor has, as far as `ngu ctl RUN engines` asks for it."""

    def __init__(self, **settings):
        self.config = parse_config(settings, "test")
        self.alive = [f"engine-{i}" for i in range(self.config.engines.count)]
        self.leaving: list[str] = []

    def engines(self):
        return list(self.alive)

    def is_alive(self, name):
        return name in self.alive or name in self.leaving

    def add_engine(self, name):
        self.alive.append(name)

    def remove_engine(self, name):
        self.alive.remove(name)
        self.leaving.append(name)


def test_engines_are_added_under_free_names_and_the_last_one_stays(tmp_path):
    (tmp_path / "ipc").mkdir()
    have = Engines(engines={"count": 2})
    control = EngineControl(tmp_path, have)

    def say(setting: str) -> tuple[bool, str]:
        reply = control._handle(Request("engines", setting))
        return reply.ok, reply.text

    assert say("remove engine-0") == (True, "engine-0 gives its work back and ends")
    assert say("remove engine-1") == (False, "engine-1 is the only engine; add another first, or `ngu ctl RUN pause`")
    assert say("add 2") == (True, "starting engine-2, engine-3")  # engine-0 has not ended yet
    have.leaving.clear()
    assert say("add 1") == (True, "starting engine-0")
    assert say("remove verifier")[1].startswith("'verifier' is no engine of this machine; there are engine-1")
    for wrong in ("add 0", "add -1", "add", "remove", "add 1 2", "list"):
        assert say(wrong) == (False, "write `engines add N` or `engines remove NAME`")
    control.close()
    have = Engines(engines={"count": 2, "kind": "sglang", "gpus": [0, 1]}, daemon={"listen": "tcp://127.0.0.1:1"})
    control = EngineControl(tmp_path, have)
    assert say("add 1") == (
        False,
        "engines.gpus or engines.urls has no place for more SGLang engines; see `ngu worker`",
    )
    assert say("remove engine-0")[0]
    assert say("remove engine-1")[0], "workers may be elsewhere"
    have.leaving.clear()
    assert say("add 1") == (True, "starting engine-0")  # which has its GPU back
    control.close()


def test_commanding_a_run_that_is_not_running_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not running"):
        ctl(tmp_path, "pause")
