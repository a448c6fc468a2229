"""Peers that send what they must not: refused, counted by kind, said once a kind, and nothing else is affected."""

import tempfile
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fakes import VOCAB_SIZE, Simulation, notice
from gateways import GatewayThread, some_work, until
from hostile import SPOILS
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.channels import RouterSocket, Unreadable
from pipeline.config import Config, parse_config
from pipeline.coordinator.peers import MAX_UNSOUND
from pipeline.coordinator.status import describe
from pipeline.coordinator.tally import REFUSAL_PERIOD_S
from pipeline.engines.fake import FakeEngine
from pipeline.errors import RunFailed, WireError
from pipeline.messages import (
    AttemptFailed,
    BatchRequest,
    Heartbeat,
    Hello,
    Judgement,
    Judgements,
    Leave,
    NewWeights,
    PeerWarning,
    Prefix,
    Rollout,
    Rollouts,
    StepDone,
    Verdict,
    VersionSpan,
    WeightsLoaded,
    WeightsRefused,
    WorkItems,
    pack_ids,
    pack_logprobs,
)
from pipeline.remote.client import RemoteSocket
from pipeline.soundness import check_rollout


def config(max_rollouts: int = 600) -> Config:
    raw = {
        "max_rollouts": max_rollouts,
        "engines": {"slots": 8},
        "learner": {"batch_size": 40},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 0, "hang_s": 1.0},
    }
    return parse_config(raw, "test")


class Spoiler:
    """Spoils all but every fourth rollout, each in another way."""

    def __init__(self):
        self.spoilt: Counter[str] = Counter()
        self._num_seen = 0

    def __call__(self, rollout: Rollout) -> Rollout:
        self._num_seen += 1
        if self._num_seen % 4 == 0:
            return rollout
        kind, spoil = SPOILS[self.spoilt.total() % len(SPOILS)]
        self.spoilt[kind] += 1
        return spoil(rollout)


class Besieged(Simulation):
    """Whatever engine-1 sends goes through `spoil`."""

    def __init__(self, path: Path, cfg: Config, spoil: Callable[[Rollout], Rollout]):
        super().__init__(path, cfg, num_engines=2)
        self._spoil = spoil

    def _deliver(self, name: str, ended: list[Any]) -> None:
        super()._deliver(name, [self._spoil(item) for item in ended] if name == "engine-1" else ended)


def errors(run: Simulation) -> dict[str, int]:
    return {k.removeprefix("error/wire/"): n for k, n in run.coordinator.tally.errors().items()}


def trained(run: Simulation) -> list[Rollout]:
    return [r for b in run.batches for g in b.groups for r in g.rollouts]


def test_unsound_rollouts_are_sampled_again_and_none_is_trained(tmp_path):
    spoiler = Spoiler()
    run = Besieged(tmp_path, config(), spoiler)
    run.run()
    run.ledger.close()
    assert run.coordinator.state == "finished" and run.ledger.num_open == 0
    assert set(errors(run)) == set(spoiler.spoilt) == {kind for kind, _ in SPOILS}
    assert all(n <= spoiler.spoilt[kind] for kind, n in errors(run).items()), "the last came when the run had ended"
    assert len(trained(run)) > 100
    for rollout in trained(run):
        rollout.check()
        assert max(rollout.completion_array()) < VOCAB_SIZE and rollout.num_tokens < 5000
    said = [w["text"] for w in run.sink.of_kind("warning") if w["text"].startswith("refused: engine-1: ")]
    assert len(said) == len(spoiler.spoilt), "once a kind"
    assert describe(run.coordinator)["errors"] == run.coordinator.tally.errors()
    assert run.sink.of_kind("step")[-1]["metrics"]["error/wire/logprobs"] > 0


def test_an_engine_that_sends_nothing_sound_is_stopped_and_stays_out(tmp_path):
    run = Besieged(tmp_path, config(), SPOILS[0][1])
    while run.coordinator.state != "training":
        run.turn()
    while "engine-1" not in run.stopped:
        run.turn()
    assert errors(run) == {"logprobs": MAX_UNSOUND}
    run.forgives = True
    run.stopped.clear()  # it does not obey
    run.inbox.append(("engine-1", Heartbeat({})))
    run.turn()
    run.turn()
    assert "engine-1" in run.stopped and "engine-1" not in run.coordinator.peers.known
    run.run()
    run.ledger.close()
    assert run.coordinator.state == "finished" and errors(run) == {"logprobs": MAX_UNSOUND}
    assert {r.engine_id for r in trained(run)} == {"engine-0"}


def test_if_the_only_engine_sends_nothing_sound_the_run_ends_with_the_reason(tmp_path):
    run = Besieged(tmp_path, config(), SPOILS[0][1])
    del run.engines["engine-0"]
    run.inbox = deque(entry for entry in run.inbox if entry[0] != "engine-0")
    with pytest.raises(RunFailed, match=r"could be run and judged .*an engine logprob is not finite"):
        run.run()
    run.ledger.close()


def test_a_kind_of_refusal_is_said_again_only_after_a_while(tmp_path):
    run = Simulation(tmp_path, config())
    tally = run.coordinator.tally
    tally.warn("one\x1b[2J\nline")
    assert tally.take_new_warnings() == ["one [2J line"]
    for wait_s, num_said in ((0.0, 1), (1.0, 0), (REFUSAL_PERIOD_S, 1)):
        run.now += wait_s
        tally.refused("bytes", f"at {run.now}")
        assert len(tally.take_new_warnings()) == num_said
    assert tally.counters["error/wire/bytes"] == 3
    run.ledger.close()


def test_a_continued_rollout_begins_with_what_it_continues():
    work = replace(
        some_work(1)[0],
        prefix=Prefix(pack_ids([5, 6]), pack_logprobs([-1.0, -2.0]), (VersionSpan(0, 0),)),
    )
    spans = (VersionSpan(0, 0), VersionSpan(2, 1))
    whole = Rollout(
        1, 0, 0, pack_ids([1]), pack_ids([5, 6, 7]), pack_logprobs([-1.0, -2.0, -3.0]), spans, "stop", "", "e", 1, 2
    )
    check_rollout(whole, work, 1, 8)
    for spoilt in (
        replace(whole, completion_ids=pack_ids([5, 7, 7])),
        replace(whole, engine_logprobs=pack_logprobs([-1.0, -2.5, -3.0])),
    ):
        with pytest.raises(WireError, match="does not begin with") as raised:
            check_rollout(spoilt, work, 1, 8)
        assert raised.value.kind == "prefix"


def test_bytes_that_are_no_message_are_refused_by_their_senders_name(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ngu") as directory:  # short enough for a Unix socket
        router, context = RouterSocket(f"ipc://{directory}/c"), zmq.Context()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.ROUTING_ID, b"noisy")
        peer.connect(f"ipc://{directory}/c")
        hello = msgspec.msgpack.encode(Hello("engine", "noisy", "b", 1, 8))
        garbage = [[b""], [b"\xc1"], [b"\x91" * 5000], [bytes(100_000)], [hello, b"more"], [b"", hello]]
        for frames in (*garbage, [hello]):
            peer.send_multipart(frames)
        received: list[tuple[str, Any]] = []
        until(lambda: received.extend(router.receive(0.1)) or len(received) == 7, "everything")
        assert {name for name, _ in received} == {"noisy"}
        assert [isinstance(message, Unreadable) for _, message in received] == [True] * 6 + [False]
        run = Simulation(tmp_path, config())
        run.inbox.extend(received[:-1])
        run.turn()
        run.ledger.close()
        assert errors(run) == {"bytes": 6}
        assert "refused: noisy: it sent 0 bytes that are not a message" in run.coordinator.tally.warnings[0]
        context.destroy(linger=0)
        router.close()


# --- whatever else a peer may say ---

INTS = st.integers(-(1 << 63), (1 << 63) - 1)
VERSIONS = st.one_of(st.integers(0, 3), INTS)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
SPANS = st.lists(st.builds(VersionSpan, INTS, INTS), max_size=3).map(tuple)
ROLLOUTS = st.builds(
    Rollout,
    attempt_id=st.one_of(st.integers(0, 200), INTS),
    chain_id=st.integers(0, 60),
    round=st.integers(0, 3),
    prompt_ids=st.binary(max_size=12),
    completion_ids=st.binary(max_size=12),
    engine_logprobs=st.binary(max_size=12),
    version_spans=SPANS,
    finish_reason=st.sampled_from(["stop", "length"]),
    text=st.text(max_size=9),
    engine_id=st.text(max_size=5),
    started_ns=INTS,
    finished_ns=st.integers(0, (1 << 64) - 1),
)
JUDGEMENTS = st.builds(Judgement, st.integers(0, 200), st.builds(Verdict, st.just("correct"), FLOATS))
MESSAGES = st.one_of(
    ROLLOUTS.map(lambda r: Rollouts((r, r))),
    st.builds(AttemptFailed, st.one_of(st.integers(0, 200), INTS), st.text(max_size=9), st.booleans()),
    st.builds(WeightsLoaded, VERSIONS, FLOATS, FLOATS, INTS, st.sampled_from([0, -1, 1 << 40])),
    st.builds(WeightsRefused, VERSIONS, st.text(max_size=9)),
    st.builds(Heartbeat, st.dictionaries(st.text(max_size=5), FLOATS, max_size=3), FLOATS),
    st.builds(Leave, st.text(max_size=5)),
    st.builds(Judgements, st.lists(JUDGEMENTS, max_size=2).map(tuple)),
    st.builds(BatchRequest, INTS),
    st.builds(StepDone, INTS, st.just(notice(3)), st.just({"loss": 1.0})),
    st.builds(PeerWarning, st.text(max_size=9)),
    st.builds(Unreadable, st.text(max_size=9)),
    st.builds(Hello, st.just("engine"), st.text(max_size=5), st.text(max_size=5), INTS, st.just(-1)),
)


@settings(max_examples=20)
@given(said=st.lists(st.tuples(st.sampled_from(["engine-1", "nobody"]), MESSAGES), min_size=1, max_size=20))
def test_whatever_an_engine_says_the_run_ends_with_balanced_books(tmp_path_factory, said):
    run = Simulation(tmp_path_factory.mktemp("run"), config(max_rollouts=120), num_engines=2)
    run.alive.add("nobody")  # is asked who it is, and never says
    run.forgives = True
    while run.version < 1:
        run.turn()
    for name, message in said:
        run.inbox.append((name, message))
        match message:  # it keeps to its slots, or the simulation would take the excess for the coordinator's
            case _ if name == "nobody":
                pass
            case Rollouts():
                run.engines["engine-1"].cancel([r.attempt_id for r in message.rollouts])
            case AttemptFailed():
                run.engines["engine-1"].cancel([message.attempt_id])
        run.turn()
        run.check_books()
    run.run()
    run.ledger.close()
    assert run.coordinator.state == "finished"
    assert run.version == len(run.batches)


# --- through the door ---


class Bridged(Simulation):
    """A simulated run with a real gateway, whose workers come over an encrypted connection."""

    def __init__(self, gateway: GatewayThread, cfg: Config):
        self._router = gateway.coordinator
        super().__init__(gateway.run_dir, cfg, make_notice=gateway.publish)

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        return super().receive(timeout_s) + self._router.receive(timeout_s)

    def send(self, name: str, message: Any) -> bool:
        is_here = name in self.engines or name in self.alive
        return super().send(name, message) if is_here else self._router.send(name, message)


class HostileWorker:
    """Takes work as a worker does and sends it back spoilt."""

    def __init__(self, socket: RemoteSocket, cfg: Config):
        self._socket = socket
        self._engine = FakeEngine(cfg.engines.slots, 0, "remote0")
        self.spoiler = Spoiler()

    def turn(self) -> None:
        while (message := self._socket.recv(0.0)) is not None:
            match message:
                case NewWeights():
                    self._engine.load_weights(message.notice)
                    self._socket.send(WeightsLoaded(message.notice.policy_version, 0.0, 0.0, 0))
                case WorkItems():
                    self._engine.submit(message.items)
        for rollout in self._engine.step():
            assert isinstance(rollout, Rollout)
            self._socket.send(Rollouts((self.spoiler(rollout),)))


def test_a_hostile_holder_of_the_key_costs_the_run_nothing_but_its_own_attempts():
    gateway, cfg, kinds = GatewayThread(), config(max_rollouts=1_000_000), {kind for kind, _ in SPOILS}
    socket = RemoteSocket(gateway.address, gateway.key, 4)
    socket.join()
    worker, run = HostileWorker(socket, cfg), Bridged(gateway, cfg)
    while not kinds <= set(errors(run)):
        run.turn()
        run.check_books()
        worker.turn()
        assert not run.coordinator.ended
    run.coordinator.stop_requested = True
    run.run()
    run.ledger.close()
    assert set(errors(run)) == kinds
    for rollout in trained(run):
        rollout.check()
        assert max(rollout.completion_array()) < VOCAB_SIZE
    socket.close()
    gateway.close()
