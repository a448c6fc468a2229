"""The engine worker's loop over a socket that is a list."""

import sys
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import publish, save_model_dir, teacher_forced, tiny_model, work

from pipeline.config import Config, EnginesConfig
from pipeline.engines.fake import FakeEngine
from pipeline.errors import EngineError, WeightError
from pipeline.messages import (
    AttemptFailed,
    Cancel,
    Heartbeat,
    NewWeights,
    PeerFailed,
    Rollouts,
    Stop,
    VerifyJobs,
    WeightsLoaded,
    WeightsRefused,
    WorkItems,
)
from pipeline.weights import WeightPublisher
from pipeline.worker import Worker, import_libraries

torch.set_num_threads(1)


class ScriptedSocket:
    """Receives a script: messages, or what makes one now, and None where nothing has arrived yet."""

    def __init__(self, *script):
        self._script = deque(script)
        self.sent = []
        self.waits = []

    def say_hello(self):
        self.sent.append("hello")

    def rejoin(self):
        self.sent.append("hello again")

    def leave(self):
        self.sent.append("farewell")

    def send(self, message):
        self.sent.append(message)

    def recv(self, timeout_s):
        self.waits.append(timeout_s)
        message = self._script.popleft()
        return message() if callable(message) else message

    def of(self, kind):
        return [m for m in self.sent if isinstance(m, kind)]


def run(kind, *script):
    socket = ScriptedSocket(*script)
    Worker(Config(engines=EnginesConfig(kind=kind, slots=2)), "engine-0", socket).run()
    return socket


@pytest.fixture
def weights(tmp_path):
    """Makes notices of a tiny model's versions."""
    model_dir = save_model_dir(tmp_path / "model", "qwen2")
    publisher = WeightPublisher(tmp_path / "weights")
    yield lambda version: publish(publisher, tiny_model("qwen2", version), version, model_dir)
    publisher.close()


def test_it_serves_work_that_came_before_the_weights(weights):
    items = WorkItems(tuple(work(i, "ab") for i in range(5)))
    socket = run("fake", items, Cancel((2,)), None, NewWeights(weights(0)), *[None] * 60, Cancel((4,)), Stop(), None)
    assert socket.sent[0] == "hello"
    assert isinstance(socket.sent[1], Heartbeat)
    (loaded,) = socket.of(WeightsLoaded)
    assert (loaded.policy_version, loaded.num_in_flight) == (0, 0)
    rollouts = [r for m in socket.of(Rollouts) for r in m.rollouts]
    assert sorted(r.attempt_id for r in rollouts) == [0, 1, 3, 4]
    assert {r.engine_id for r in rollouts} == {"engine-0"}


def test_it_waits_for_messages_only_when_nothing_is_in_flight(weights, monkeypatch):
    monkeypatch.setattr("pipeline.worker.HEARTBEAT_S", 1e6)
    items = WorkItems((work(0, "ab"),))
    socket = run("fake", NewWeights(weights(0)), None, items, None, *[None] * 30, Stop(), None)
    assert socket.waits[2] > 0.0  # nothing to do yet
    assert socket.waits[4] == 0.0  # one attempt is running
    assert socket.waits[-2] > 0.0  # and has ended since
    assert max(socket.waits) <= 1e6  # in time for the next heartbeat


def test_prompts_that_cannot_run_are_reported(weights):
    items = WorkItems((work(0, "a" * 100), work(1, "ab", max_new_tokens=2)))
    socket = run("embedded", NewWeights(weights(0)), items, *[None] * 5, Stop(), None)
    (failed,) = socket.of(AttemptFailed)
    assert (failed.attempt_id, failed.retryable) == (0, False)
    assert [r.attempt_id for m in socket.of(Rollouts) for r in m.rollouts] == [1]


def test_only_the_newest_of_several_waiting_versions_is_loaded(weights):
    notices = [NewWeights(weights(v)) for v in range(4)]  # the first two files are gone
    socket = run("embedded", *notices, None, Stop(), None)
    assert [m.policy_version for m in socket.of(WeightsLoaded)] == [3]


def test_a_version_that_vanished_is_forgiven_when_a_newer_one_came(weights):
    gone = weights(0)
    newer = [weights(v) for v in (1, 2)][-1]
    socket = run("embedded", NewWeights(gone), None, NewWeights(newer), None, Stop(), None)
    assert [m.policy_version for m in socket.of(WeightsLoaded)] == [2]
    assert not socket.of(PeerFailed)


def test_damaged_weights_are_refused_the_version_before_serves_and_the_same_version_whole_is_taken(weights, capfd):
    first, second = weights(0), weights(1)
    path = Path(second.path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1)]
    offsets = (0, 8, 100, len(whole) // 2, len(whole) - 1)
    damaged += [whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :] for offset in offsets]

    def written(data):
        path.write_bytes(data)
        return NewWeights(second)

    def turns(attempt_id):
        return [WorkItems((work(attempt_id, "ab", max_new_tokens=3),)), *[None] * 6]

    script = [NewWeights(first), None]
    for number, data in enumerate(damaged):  # read twice, with a look for newer ones between
        script += [partial(written, data), None, None, *turns(number)]
    script += [partial(written, whole), *turns(len(damaged)), Stop(), None]
    socket = run("embedded", *script)
    refused = socket.of(WeightsRefused)
    assert [m.policy_version for m in refused] == [1] * len(damaged)
    assert all(second.path in m.reason and "publish the version again" in m.reason for m in refused)
    assert capfd.readouterr().err.count("engine-0 refused weights") == len(damaged)
    assert [m.policy_version for m in socket.of(WeightsLoaded)] == [0, 1]
    rollouts = [r for m in socket.of(Rollouts) for r in m.rollouts]
    assert [r.attempt_id for r in rollouts] == list(range(len(damaged) + 1))
    for r in rollouts:
        version = int(r.attempt_id == len(damaged))
        assert {span.policy_version for span in r.version_spans} == {version}
        ids = [*r.prompt_array(), *r.completion_array()]
        expected = teacher_forced(tiny_model("qwen2", version), ids)[len(r.prompt_array()) - 1 :]
        assert r.logprob_array() == pytest.approx(expected, abs=1e-4)


def test_first_weights_that_are_damaged_are_waited_for(weights):
    notice = weights(0)
    whole = Path(notice.path).read_bytes()
    Path(notice.path).write_bytes(whole[:-1])

    def mended():
        Path(notice.path).write_bytes(whole)
        return NewWeights(notice)

    work_items = WorkItems((work(0, "ab", max_new_tokens=3),))
    socket = run("embedded", NewWeights(notice), None, None, None, mended, None, work_items, *[None] * 6, Stop(), None)
    assert len(socket.of(WeightsRefused)) == len(socket.of(Rollouts)) == 1


def test_weights_that_fail_the_canary_twice_end_the_worker_before_another_token(weights, tmp_path):
    good = weights(0)
    bad_publisher = WeightPublisher(tmp_path / "bad")
    honest = teacher_forced(tiny_model("qwen2", 1), list(range(3, 12)))
    bad = bad_publisher.publish(tiny_model("qwen2", 2).state_dict(), 1, good.model_dir, list(range(3, 12)), honest)
    socket = ScriptedSocket(
        NewWeights(good), WorkItems((work(0, "ab", max_new_tokens=40),)), None, NewWeights(bad), None, None
    )
    worker = Worker(Config(engines=EnginesConfig(kind="embedded", slots=2)), "engine-0", socket)
    with pytest.raises(WeightError, match="logprobs differ"):
        worker.run()
    assert isinstance(socket.sent[-1], PeerFailed)
    assert "weights 1" in socket.sent[-1].reason
    assert [m.policy_version for m in socket.of(WeightsLoaded)] == [0]
    bad_publisher.close()


def test_a_message_for_another_role_ends_the_worker_with_one_line():
    socket = ScriptedSocket(VerifyJobs(()), None)
    with pytest.raises(Exception, match="VerifyJobs"):
        Worker(Config(engines=EnginesConfig(kind="fake", slots=2)), "engine-0", socket).run()
    (failed,) = socket.of(PeerFailed)
    assert "\n" not in failed.reason


def test_rollouts_that_end_within_a_moment_travel_together(weights, monkeypatch):
    monkeypatch.setattr("pipeline.worker.SEND_EVERY_S", 1e6)
    items = WorkItems(tuple(work(i, "ab", max_new_tokens=1 + i) for i in range(5)))
    socket = run("fake", NewWeights(weights(0)), items, *[None] * 30, Stop(), None)
    messages = [[r.attempt_id for r in m.rollouts] for m in socket.of(Rollouts)]
    # The first has nothing to wait for, and with the last there is nothing more to wait for.
    assert messages == [[0], [1, 2, 3, 4]]


def test_an_engine_is_busy_as_long_as_it_has_attempts(weights, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("pipeline.worker.time", SimpleNamespace(monotonic=lambda: clock.now))

    def after(seconds, message=None):
        def arrive():
            clock.now += seconds
            return message

        return arrive

    turn = (after(0.1), after(0.0))  # nothing has come, and a turn takes so long
    items = WorkItems((work(0, "ab", max_new_tokens=3),))
    script = [after(5.0, NewWeights(weights(0))), None, after(7.0, items), None, after(0.1), after(0.1), *turn * 4]
    socket = run("fake", *script, after(2.0), after(2.0), after(2.0), Stop(), None)
    assert socket.of(Heartbeat)[-1].stats["busy_s"] == pytest.approx(0.2)


def test_a_worker_that_leaves_sends_what_has_ended_first(weights, monkeypatch):
    monkeypatch.setattr("pipeline.worker.SEND_EVERY_S", 1e6)
    items = WorkItems((*(work(i, "ab", max_new_tokens=1 + i) for i in range(2)), work(2, "ab", max_new_tokens=40)))
    socket = ScriptedSocket(NewWeights(weights(0)), items, *[None] * 3, lambda: worker.stop())
    worker = Worker(Config(engines=EnginesConfig(kind="fake", slots=3)), "engine-0", socket)
    worker.run()
    assert [[r.attempt_id for r in m.rollouts] for m in socket.of(Rollouts)] == [[0], [1]]
    assert socket.sent[-2:] == [socket.of(Rollouts)[-1], "farewell"]


class LosingEngine(FakeEngine):
    """Loses its server at the third step, and is ready again at the third look."""

    def __init__(self, retryable=True):
        super().__init__(slots=2, seed=0, engine_id="engine-0")
        self.slots = 5
        self.retryable = retryable
        self.steps, self.looks = 0, 3

    @property
    def ready(self):
        self.looks += 1
        return self.looks >= 3

    def step(self):
        self.steps += 1
        if self.steps == 3:
            self.cancel(list(self._running) + [w.attempt_id for w in self._waiting])
            self.looks = 0
            raise EngineError("the server died", self.retryable)
        return super().step()


def test_an_engine_that_loses_its_server_leaves_the_rotation_and_comes_back_with_weights(weights, monkeypatch, capfd):
    engine = LosingEngine()
    monkeypatch.setattr("pipeline.worker.make_engine", lambda *arguments: engine)
    notice, early = NewWeights(weights(0)), WorkItems((work(0, "ab", 40),))
    late, after = WorkItems((work(1, "ab"),)), WorkItems((work(2, "ab"),))
    # `late` was sent before the coordinator heard of the loss.
    socket = run("fake", notice, early, *[None] * 3, late, None, notice, *[None] * 5, after, *[None] * 40, Stop(), None)
    assert [m.slots for m in socket.of(WeightsLoaded)] == [6, 6]  # its own five, and one that waits for the next
    order = [m for m in socket.sent if m in ("hello", "hello again") or isinstance(m, WeightsLoaded | Rollouts)]
    assert [m if isinstance(m, str) else type(m).__name__ for m in order] == [
        *("hello", "WeightsLoaded", "hello again", "WeightsLoaded", "Rollouts")
    ]
    assert [r.attempt_id for m in socket.of(Rollouts) for r in m.rollouts] == [2]
    log = capfd.readouterr().err
    assert "the server died" in log
    assert "serves again after" in log


def test_an_engine_that_is_lost_for_good_ends_the_worker(weights, monkeypatch):
    engine = LosingEngine(retryable=False)
    monkeypatch.setattr("pipeline.worker.make_engine", lambda *arguments: engine)
    socket = ScriptedSocket(NewWeights(weights(0)), WorkItems((work(0, "ab", 40),)), *[None] * 9)
    with pytest.raises(EngineError, match="the server died"):
        Worker(Config(engines=EnginesConfig(kind="fake", slots=2)), "engine-0", socket).run()
    assert socket.of(PeerFailed)


def test_an_engine_that_will_be_the_embedded_one_loads_its_kernels_before_its_first_word(monkeypatch):
    """Compiled anew they take seconds, many at once on a busy machine a minute: after the first word that is a hang."""

    def loads_kernels(kind) -> bool:
        try:
            import_libraries(EnginesConfig(kind=kind))
        except ImportError:
            return True
        return False

    monkeypatch.setitem(sys.modules, "pipeline.engines.embedded.kernels", None)  # to import it fails
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kinds = ("auto", "embedded", "transformers", "sglang")
    assert [kind for kind in kinds if loads_kernels(kind)] == ["auto", "embedded"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [kind for kind in kinds if loads_kernels(kind)] == ["embedded"]
