"""Workers on other machines: what their link keeps, what the door refuses, what a gateway passes on."""

import math
import socket
import stat
from pathlib import Path

import msgspec
import pytest
import xxhash
import zmq
from gateways import GatewayThread, Proxy, rollout, some_work, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.channels import Unreadable
from pipeline.config import parse_config
from pipeline.errors import ConfigError, NguError
from pipeline.messages import (
    AttemptFailed,
    Cancel,
    Heartbeat,
    Hello,
    Judgement,
    Judgements,
    Leave,
    NewWeights,
    PeerWarning,
    Rollouts,
    StepDone,
    Stop,
    Verdict,
    VerifyJob,
    VerifyJobs,
    WeightsLoaded,
    WeightsNotice,
    WeightsRefused,
    WorkItems,
)
from pipeline.remote import client
from pipeline.remote import gateway as gateway_module
from pipeline.remote.client import RemoteSocket
from pipeline.remote.download import WINDOW
from pipeline.remote.keys import WorkerKeys, read_keys, run_keys
from pipeline.remote.link import Link
from pipeline.remote.wire import MAX_FRAME_BYTES, PIECE_BYTES, Pull, Resume, Up
from pipeline.soundness import check


@pytest.fixture
def gateway():
    made = GatewayThread()
    yield made
    made.close()


def joined(gateway: GatewayThread, address: str = "", slots: int = 0, place: int = -1) -> RemoteSocket:
    worker = RemoteSocket(address or gateway.address, gateway.key, slots, place)
    worker.join()
    return worker


def take(worker: RemoteSocket, kind: type):
    """The next message of that kind; others are dropped."""
    return until(lambda: m if isinstance(m := worker.recv(0.01), kind) else None, kind.__name__)


# --- keys and config ---


def test_keys_are_private_made_once_and_told_apart(tmp_path):
    keys = run_keys(tmp_path)
    assert run_keys(tmp_path) == keys
    files = sorted((tmp_path / "keys").iterdir())
    assert [f.name for f in files] == ["gateway.key", "worker.key"]
    assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
    worker = tmp_path / "keys" / "worker.key"
    assert read_keys(worker, WorkerKeys).gateway_public == keys.public
    with pytest.raises(ConfigError, match=r"gateway\.key: not a worker key"):
        read_keys(tmp_path / "keys" / "gateway.key", WorkerKeys)
    with pytest.raises(ConfigError, match=r"copy RUN/keys/worker\.key"):
        read_keys(tmp_path / "none", WorkerKeys)
    worker.write_text(worker.read_text().replace(keys.public, "é" * 40))
    with pytest.raises(ConfigError, match="damaged"):
        read_keys(worker, WorkerKeys)
    worker.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(worker, WorkerKeys)


@pytest.mark.parametrize("listen", ["0.0.0.0:5555", "tcp://host", "tcp://*:70000", "ipc://x", "tcp://a b:1"])
def test_an_address_to_listen_at_is_checked(listen):
    with pytest.raises(ConfigError, match="tcp://ADDRESS:PORT"):
        parse_config({"daemon": {"listen": listen}}, "run.toml")


# --- the link ---


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_link_delivers_everything_once_and_in_order_whatever_its_connections_lose(data):
    sender, receiver = Link[int](), Link[int]()
    delivered: list[int] = []
    under_way: list[tuple[int, int]] = []

    def arrive(frames):
        for number, body in frames:
            if receiver.accept(number):
                delivered.append(body)

    for body in range(data.draw(st.integers(0, 30))):
        under_way.append((sender.send(body), body))
        match data.draw(st.sampled_from(["keep", "deliver", "acknowledge", "cut"])):
            case "deliver":
                arrive(under_way)
                under_way = []
            case "acknowledge":
                sender.acknowledged(receiver.received)
            case "cut":  # some of it had arrived, perhaps out of the middle of what an older connection still held
                arrive(under_way[data.draw(st.integers(0, len(under_way))) :])
                sender.acknowledged(receiver.received)
                under_way = list(sender.unacknowledged)
    arrive(under_way)
    assert delivered == list(range(len(delivered)))
    sender.acknowledged(receiver.received)
    arrive(list(sender.unacknowledged))
    assert receiver.received == len(delivered) == sender._num_sent


# --- a worker's life ---


def test_a_worker_gets_config_weights_and_work_and_gives_back_what_it_holds(gateway):
    worker = RemoteSocket(gateway.address, gateway.key, slots=3)
    welcome = worker.join()
    assert welcome.config["engines"] == {**welcome.config["engines"], "kind": "fake", "slots": 3, "count": 1}
    (hello,) = until(gateway.engines, "the engine's Hello")
    assert (hello.name, hello.slots, hello.pid, hello.host) == ("remote0", 3, 0, socket.gethostname())
    assert hello.via == gateway.of(Hello)[0].boot_id
    gateway.coordinator.send("remote0", NewWeights(gateway.publish(0, 3_000_000)))
    notice = take(worker, NewWeights).notice
    assert Path(notice.path).read_bytes() == (gateway.run_dir / "0.safetensors").read_bytes()
    assert (Path(notice.model_dir) / "config.json").read_text() == "{}"
    worker.send(WeightsLoaded(0, 0.0, 0.0, 0))
    gateway.coordinator.send("remote0", WorkItems(some_work(1, 2, 3)))
    gateway.coordinator.send("remote0", Cancel((3,)))
    assert [w.attempt_id for w in take(worker, WorkItems).items] == [1, 2, 3]
    assert take(worker, Cancel).attempt_ids == (3,)
    worker.send(Rollouts((rollout(1), rollout(3), rollout(99))))  # 3 was cancelled, 99 is another's
    worker.send(AttemptFailed(99, "made up", retryable=True))
    worker.send(Heartbeat({"slots_used": 1.0}))
    until(lambda: gateway.stats["late"] == 3, "what is not its own to be counted")
    until(lambda: gateway.of(Rollouts), "the one that is")
    assert [r.attempt_id for m in gateway.of(Rollouts) for r in m.rollouts] == [1]
    assert not gateway.of(AttemptFailed)
    worker.send(WeightsLoaded(7, 0.0, 0.0, 0))
    worker.send(WeightsLoaded(0, 0.0, math.nan, 0))
    worker._link.acknowledged(1 << 20)  # or the next heartbeat would wait for its turn
    worker.send(Heartbeat({"slots_used": math.inf}))
    until(lambda: gateway.stats["rejected"] == 3, "what is not sound to be counted")
    assert [m.canary_error for m in gateway.of(WeightsLoaded)] == [0.0]
    scratch = notice.model_dir
    worker.leave()
    worker.close()
    assert not Path(scratch).exists()
    (left,) = until(lambda: gateway.of(Leave), "the farewell")
    assert left.boot_id == hello.boot_id
    assert not gateway.of(PeerWarning)
    until(lambda: gateway.stats["workers"] == 0, "the end of the session")
    again = joined(gateway)
    assert again._hello.name == "remote0"
    until(lambda: len(gateway.engines()) == 2, "its Hello, before which there is nobody to send to")
    gateway.coordinator.send("remote0", Stop())
    take(again, Stop)
    again.close()


def test_one_that_is_started_again_takes_the_place_of_the_one_before_at_once(gateway):
    first, other = (joined(gateway, place=place) for place in (4, -1))
    assert (first._hello.name, other._hello.name) == ("remote4", "remote0")
    until(lambda: len(gateway.engines()) == 2, "their Hellos")
    gateway.coordinator.send("remote4", WorkItems(some_work(1, 2)))
    assert take(first, WorkItems)
    again = joined(gateway, place=4)
    assert again._hello.name == "remote4"
    # To the coordinator another process of that name is the end of the one before; its farewell may be overtaken.
    until(lambda: len(gateway.engines()) == 3, "the Hello of another process")
    assert len({hello.boot_id for hello in gateway.engines() if hello.name == "remote4"}) == 2
    assert "started again" in until(lambda: gateway.of(PeerWarning), "a warning")[0].text

    first.send(Rollouts((rollout(1),)))  # it was only out of reach, and has to begin anew beside the other
    assert take(first, Cancel).attempt_ids == (2,)
    until(lambda: len(gateway.engines()) == 4, "its Hello")
    assert gateway.engines()[-1].name == "remote1"
    until(lambda: gateway.stats["workers"] == 3, "three workers")
    assert not gateway.of(Rollouts)
    for worker in (first, other, again):
        worker.close()


def test_a_verifier_judges_from_elsewhere_what_it_was_given(gateway):
    engine = joined(gateway, place=4)
    worker = RemoteSocket(gateway.address, gateway.key, 9, place=4, role="verifier")
    assert set(worker.join().config) == {"task", "verifier"}
    (hello,) = until(lambda: [h for h in gateway.of(Hello) if h.role == "verifier"], "its Hello")
    assert (hello.name, hello.slots, hello.relay) == ("remote-verifier4", 9, "")
    problem = some_work(1)[0].problem
    gateway.coordinator.send("remote-verifier4", VerifyJobs(tuple(VerifyJob(i, problem, "", False) for i in (1, 2))))
    assert [job.attempt_id for job in take(worker, VerifyJobs).jobs] == [1, 2]
    worker.send(Judgements(tuple(Judgement(i, Verdict("correct", 1.0)) for i in (2, 2, 3))))
    until(lambda: gateway.stats["late"] == 2, "what is not its own to be counted")
    (passed_on,) = until(lambda: gateway.of(Judgements), "the verdict")
    assert [j.attempt_id for j in passed_on.judgements] == [2]
    assert not gateway.of(Leave), "an engine of the same place is another worker"
    worker.leave()
    worker.close()
    (left,) = until(lambda: gateway.of(Leave), "the farewell")
    assert left.boot_id == hello.boot_id
    check(left, hello, newest_version=0)  # or the coordinator would go on giving it answers to judge
    engine.close()


def test_a_version_under_way_is_finished_and_those_between_are_skipped(gateway):
    worker = joined(gateway)
    until(gateway.engines, "the engine's Hello")
    notices = [gateway.publish(v, 8_000_000) for v in range(4)]
    gateway.coordinator.send("remote0", NewWeights(notices[0]))

    def is_under_way() -> bool:
        worker._wait(0.01)
        download = worker._fetcher._download
        return download is not None and download._next > (WINDOW + 1) * PIECE_BYTES

    until(is_under_way, "some of the first version")
    for notice in notices[1:]:
        gateway.coordinator.send("remote0", NewWeights(notice))
    for version in range(3):
        (gateway.run_dir / f"{version}.safetensors").unlink()  # as a learner does with its older ones
    got = [take(worker, NewWeights).notice]
    worker.send(WeightsLoaded(0, 0.0, 0.0, 0))
    got.append(take(worker, NewWeights).notice)
    assert [n.policy_version for n in got] == [0, 3]
    assert [xxhash.xxh3_64_hexdigest(Path(n.path).read_bytes()) for n in got] == [n.checksum for n in notices[::3]]
    worker.close()


def test_damaged_weights_never_leave_and_what_a_worker_refused_is_sent_anew(gateway):
    worker = joined(gateway)
    until(gateway.engines, "the engine's Hello")
    notice = gateway.publish(0, 300_000)
    path = Path(notice.path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", whole[:1000] + b"x" + whole[1001:]):
        path.write_bytes(damaged)
        known = len(gateway.of(WeightsRefused))
        gateway.coordinator.send("remote0", NewWeights(notice))
        until(lambda: len(gateway.of(WeightsRefused)) > known, "the refusal in the worker's name")  # noqa: B023
    path.write_bytes(whole)
    first = None
    for _ in range(2):
        gateway.coordinator.send("remote0", NewWeights(notice))
        local = Path(take(worker, NewWeights).notice.path)
        assert local.read_bytes() == whole
        inode = local.stat().st_ino
        assert inode != first, "fetched anew"
        first = inode
        known = len(gateway.of(WeightsRefused))
        worker.send(WeightsRefused(0, "\x1b[2J\n" + "x" * 1000))
        until(lambda: len(gateway.of(WeightsRefused)) > known, "the worker's refusal")  # noqa: B023
    assert {len(m.reason) <= 500 and m.reason.isprintable() for m in gateway.of(WeightsRefused)} == {True}
    worker.send(WeightsRefused(9, "of a version that there is not"))
    worker.send(WeightsLoaded(0, 0.0, 0.0, 0))
    until(lambda: gateway.of(WeightsLoaded), "the load")
    assert {m.policy_version for m in gateway.of(WeightsRefused)} == {0}
    worker.close()


def test_nothing_is_lost_or_doubled_over_a_link_that_is_cut_again_and_again(gateway):
    proxy = Proxy(gateway.address)
    worker = joined(gateway, proxy.address, slots=400)
    until(gateway.engines, "the engine's Hello")
    gateway.coordinator.send("remote0", NewWeights(gateway.publish(0, 20_000_000)))
    got: list[int] = []
    notices = []
    sent = 0

    def step():
        match worker.recv(0.0):
            case WorkItems() as message:
                got.extend(w.attempt_id for w in message.items)
                worker.send(Rollouts(tuple(rollout(w.attempt_id, 400) for w in message.items)))
            case NewWeights() as message:
                notices.append(message.notice)

    for cut in range(6):
        for attempt_id in range(sent, sent + 40):
            gateway.coordinator.send("remote0", WorkItems(some_work(attempt_id)))
            step()
        sent += 40
        if cut == 3:  # no word to either side: only heartbeats notice
            proxy.is_swallowing = True
            known = proxy.num_connections
            until(lambda: step() or proxy.num_connections > known, "a new connection")  # noqa: B023
            proxy.is_swallowing = False
        proxy.cut()
    results = lambda: [r.attempt_id for m in gateway.of(Rollouts) for r in m.rollouts]  # noqa: E731
    until(lambda: step() or (len(results()) >= sent and notices), "every result")
    assert got == results() == list(range(sent))
    assert gateway.stats["late"] == 0
    assert gateway.stats["joined"] == 1, "one session over all these connections"
    assert xxhash.xxh3_64_hexdigest(Path(notices[0].path).read_bytes()) == notices[0].checksum
    worker.close()
    proxy.close()


def test_one_that_is_cut_off_too_long_loses_its_work_and_comes_back_as_new():
    gateway = GatewayThread(hang_s=2.0)
    proxy = Proxy(gateway.address)
    worker = joined(gateway, proxy.address)
    (first,) = until(gateway.engines, "the engine's Hello")
    gateway.coordinator.send("remote0", WorkItems(some_work(1, 2)))
    take(worker, WorkItems)
    worker.send(Heartbeat({}))
    until(lambda: [name for name, m in gateway.hear() if isinstance(m, Heartbeat) and name == "remote0"], "its word")
    notice = gateway.publish(0, 20_000_000)
    gateway.coordinator.send("remote0", NewWeights(notice))
    under_way = lambda: worker._wait(0.01) and worker._fetcher._model is not None  # noqa: E731
    until(lambda: under_way() or gateway.of(Leave), "the model, but not the weights")  # a slow test is cut off earlier
    proxy.cut()
    until(lambda: gateway.of(Leave), "the end of its session")
    assert gateway.of(Leave)[0].boot_id == first.boot_id
    (warning,) = until(lambda: gateway.of(PeerWarning), "a warning")
    assert "s; its attempts are launched again" in warning.text
    worker.send(Rollouts((rollout(1),)))
    assert 2 in take(worker, Cancel).attempt_ids, "it is somebody else's now"
    second = until(lambda: gateway.engines()[1:], "its second Hello")[0]
    assert (second.name, second.boot_id != first.boot_id) == ("remote0", True)
    gateway.coordinator.send("remote0", NewWeights(notice))
    assert take(worker, NewWeights).notice.checksum == notice.checksum
    gateway.coordinator.send("remote0", WorkItems(some_work(3)))
    take(worker, WorkItems)
    worker.send(Rollouts((rollout(3), rollout(2))))
    until(lambda: gateway.of(Rollouts), "a result")
    assert [r.attempt_id for m in gateway.of(Rollouts) for r in m.rollouts] == [3]
    worker.close()
    proxy.close()
    gateway.close()


# --- who is not let in ---


def raw(gateway: GatewayThread) -> zmq.Socket:
    """A connection that has the right key and says whatever it likes."""
    keys = read_keys(gateway.key, WorkerKeys)
    made = zmq.Context().socket(zmq.DEALER)
    made.curve_publickey, made.curve_secretkey = keys.public.encode(), keys.secret.encode()
    made.curve_serverkey = keys.gateway_public.encode()
    made.setsockopt(zmq.LINGER, 0)
    made.connect(gateway.address)
    return made


def close_raw(made: zmq.Socket) -> None:
    made.context.destroy(linger=0)


def refused_with(address: str, key: Path, reason: str) -> None:
    worker = RemoteSocket(address, key, 0)
    with pytest.raises(NguError, match=reason):
        worker.join()
    worker.close()


def test_keys_of_other_runs_and_plain_connections_are_refused_and_the_rest_goes_on(gateway, tmp_path, monkeypatch):
    friend = joined(gateway)
    until(gateway.engines, "the engine's Hello")
    (tmp_path / "other").mkdir()
    other = run_keys(tmp_path / "other")
    refused_with(gateway.address, tmp_path / "other" / "keys" / "worker.key", r"worker\.key is the key of another run")
    mixed = tmp_path / "mixed.key"  # knows the gateway, but not the secret that it admits
    stranger = zmq.curve_keypair()
    mixed.touch(0o600)
    mixed.write_bytes(
        msgspec.json.encode(WorkerKeys(*(k.decode() for k in stranger), gateway_public=gateway.keys.public))
    )
    refused_with(gateway.address, mixed, r"mixed\.key: it is the key of another run")
    assert other.public != gateway.keys.public
    plain = zmq.Context().socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(gateway.address)
    plain.send(b"\x91\xa5hello")
    before = gateway.stats["refused"]
    with socket.create_connection(("127.0.0.1", int(gateway.address.rpartition(":")[2]))) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        until(lambda: gateway.stats["refused"] >= before + 1, "a refusal")
    close_raw(plain)
    until(lambda: gateway.stats["refused"] >= 4, "four refusals")
    gateway.coordinator.send("remote0", WorkItems(some_work(1)))
    take(friend, WorkItems)
    friend.close()
    monkeypatch.setattr(client, "JOIN_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused_with(f"tcp://127.0.0.1:{silent.getsockname()[1]}", gateway.key, "no answer for 0 s")


def test_another_protocol_is_refused_by_name_here_and_there(gateway, monkeypatch):
    worker = RemoteSocket(gateway.address, gateway.key, 0)
    worker._hello = msgspec.structs.replace(worker._hello, protocol=0)
    with pytest.raises(ConfigError, match="protocol 0, this run 2; install the run's version"):
        worker.join()
    worker.close()
    (warning,) = until(lambda: gateway.of(PeerWarning), "a warning")
    assert f"a worker on {socket.gethostname()} was refused: it speaks protocol 0" in warning.text
    learner = RemoteSocket(gateway.address, gateway.key, 0)
    learner._hello = msgspec.structs.replace(learner._hello, role="learner")
    with pytest.raises(ConfigError, match="a learner cannot be remote"):
        learner.join()
    learner.close()
    greedy = RemoteSocket(gateway.address, gateway.key, 1 << 30)
    with pytest.raises(ConfigError, match="no number of rollouts that one engine runs"):
        greedy.join()
    greedy.close()
    assert not gateway.engines()
    until(lambda: gateway.stats["refused"] == 3, "three refusals")  # an answer is sent before it is counted


def test_workers_beyond_the_most_are_refused_and_strangers_cannot_fill_the_log(gateway, monkeypatch):
    monkeypatch.setattr(gateway_module, "MAX_SESSIONS", 1)
    friend = joined(gateway)
    until(gateway.engines, "the engine's Hello")
    for number in range(gateway_module.MAX_WARNINGS_A_MINUTE + 2):
        refused_with(gateway.address, gateway.key, "1 workers are here already")
        until(lambda: gateway.stats["refused"] == number + 1, "a refusal")  # noqa: B023
    until(lambda: len(gateway.of(PeerWarning)) >= gateway_module.MAX_WARNINGS_A_MINUTE, "as many warnings")
    assert len(gateway.of(PeerWarning)) == gateway_module.MAX_WARNINGS_A_MINUTE
    until(lambda: gateway.stats["unsaid"] == 2, "two that are not said")
    enemy = raw(gateway)
    enemy.send(msgspec.msgpack.encode(Hello("engine", "", "x", 0, 1, protocol=0, host="\n" * 9000)))
    until(lambda: gateway.stats["unsaid"] == 3, "another one, with a long name")
    gateway.coordinator.send("remote0", WorkItems(some_work(1)))
    take(friend, WorkItems)
    friend.close()
    close_raw(enemy)


FRAMES = st.one_of(
    st.lists(st.binary(max_size=80), min_size=1, max_size=3),
    st.builds(
        lambda frame: [msgspec.msgpack.encode(frame)],
        st.one_of(
            st.builds(Pull, st.text(max_size=8), st.text(max_size=8), st.integers(-(1 << 63), (1 << 63) - 1)),
            st.builds(Resume, st.text(max_size=8), st.integers(-(1 << 40), 1 << 40)),
            st.builds(Up, st.text(max_size=8), st.integers(-5, 5), st.integers(-5, 5), st.just(Leave("x"))),
            st.just(StepDone(0, WeightsNotice(0, "", "", 0, "", b"", b""), {})),
        ),
    ),
)


@pytest.fixture(scope="module")
def besieged():
    """A gateway with one worker that minds its own business, and one connection for everything else."""
    gateway = GatewayThread()
    friend, enemy = joined(gateway), raw(gateway)
    until(gateway.engines, "the engine's Hello")
    gateway.coordinator.send("remote0", NewWeights(gateway.publish(0, 100)))
    yield gateway, friend, enemy
    friend.close()
    close_raw(enemy)
    gateway.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(FRAMES, min_size=1, max_size=5))
def test_whatever_a_holder_of_the_key_sends_nothing_else_is_affected(besieged, frames):
    gateway, friend, enemy = besieged
    for parts in frames:
        enemy.send_multipart(parts)
    attempt_id = len(gateway.of(Rollouts)) + 1
    gateway.coordinator.send("remote0", WorkItems(some_work(attempt_id)))
    take(friend, WorkItems)
    friend.send(Rollouts((rollout(attempt_id),)))
    until(lambda: len(gateway.of(Rollouts)) == attempt_id, "the result of the other worker")
    assert {name for name, _ in gateway.hear()} == {"gateway", "remote0"}
    assert not gateway.of(Unreadable)


def test_a_frame_that_is_too_large_costs_its_sender_the_connection(gateway):
    friend, enemy = joined(gateway), raw(gateway)
    enemy.send(b"\xc1")
    until(lambda: gateway.stats["rejected"] == 1, "the frame that is none of ours")
    ended = gateway.stats["ended"]
    enemy.send(bytes(MAX_FRAME_BYTES + 1))
    until(lambda: gateway.stats["ended"] > ended, "the end of the connection")
    until(gateway.engines, "the engine's Hello")
    gateway.coordinator.send("remote0", WorkItems(some_work(1)))
    take(friend, WorkItems)
    friend.close()
    close_raw(enemy)
