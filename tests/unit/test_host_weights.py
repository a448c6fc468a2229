"""Weights reach each host once: what its workers share, who fetches, who goes on when that one is gone."""

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from gateways import GatewayThread, until

from pipeline.errors import WeightError
from pipeline.messages import NewWeights, WeightsLoaded, WeightsNotice
from pipeline.remote.client import RemoteSocket
from pipeline.remote.fetcher import STALLED_S, Fetcher
from pipeline.remote.host import Host, Ware
from pipeline.remote.parcels import Content, Parcels
from pipeline.remote.store import HostStore
from pipeline.remote.tree import FAN_OUT, Tree
from pipeline.remote.wire import PIECE_BYTES, Offer, Parcel

# --- what a host is given ---


def ware(version: int) -> Ware:
    notice = WeightsNotice(version, "", f"sum{version}", 4, "", b"", b"")
    return Ware(Offer(notice, Parcel("model", 1)), Content(b"data", f"sum{version}"))


def given(host: Host, session: str) -> tuple[int, str] | None:
    """Version and source."""
    ware = host.give(session)
    return ware and (ware.version, ware.offer.source)


def test_a_host_has_one_version_under_way_and_the_newest_follows():
    host = Host(Tree(lambda: 0.0))
    host.announce(ware(1))
    assert given(host, "a") == given(host, "b") == (1, "")
    for version in (2, 4, 3, 0):
        host.announce(ware(version))
    assert given(host, "c") == (1, ""), "who joins shares what is under way"
    host.loaded("a", 1, "")
    assert given(host, "a") == (4, ""), "one has it: so the others of the host have, too"
    host.loaded("b", 1, "")
    assert host.current is not None and host.current.version == 4, "b was late with version 1"
    host.announce(ware(5))
    host.leave("a")
    assert given(host, "a") == (5, ""), "nobody wanted 4 any more"
    host.announce(ware(4))
    assert host.current.version == 5


def test_a_version_spreads_from_host_to_host_a_few_at_a_time():
    now = 0.0
    tree = Tree(lambda: now)
    hosts = [Host(tree) for _ in range(60)]
    waiting, rounds = dict(enumerate(hosts)), []
    for host in hosts:
        host.announce(ware(1))
    while waiting:
        got = {i: found for i, host in waiting.items() if (found := given(host, f"s{i}"))}
        sources = Counter(source for _, source in got.values())
        assert max(sources.values()) <= FAN_OUT
        rounds.append(len(got))
        for i in got:
            waiting.pop(i).loaded(f"s{i}", 1, f"relay{i}")
    assert rounds == [3, 12, 45], "those who have it times FAN_OUT"
    for host in hosts:
        host.announce(ware(2))
    assert [given(host, "s") for host in hosts[:4]] == [(2, ""), (2, ""), (2, ""), None]
    now = 100.0
    assert [given(host, "s") for host in hosts[3:6]] == 3 * [(2, "")], "three that are stuck do not stop the others"
    hosts[0].loaded("s", 2, "relay0")
    assert [given(host, "s") for host in hosts[6:10]] == [*3 * [(2, "relay0")], None]
    hosts[7].leave("s")
    hosts[0].end("s")
    assert given(hosts[9], "s") is None, "who could pass it on has left"
    for version in range(2, 5):
        hosts[9].relay_failed(version)
    assert given(hosts[9], "s") == (2, ""), "no relay could be reached from there"


# --- the store ---

FETCHES = """
import os, sys, time
from pipeline.remote.store import HostStore
from pipeline.remote.wire import PIECE_BYTES, Parcel
store, parcel = HostStore("run"), Parcel(sys.argv[1], int(sys.argv[2]))
held = store.claim(parcel)
os.pwrite(held.fd, b"x" * (PIECE_BYTES + 5), 0)
print(store.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Call it to be on another host from here on, as far as scratch directories say."""

    def move(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))

    move("here")
    return move


class Pulls(list):
    """What a fetcher has asked for, and the gateway that would answer."""

    def __init__(self, *contents: Content):
        self.contents = {content.parcel.checksum: content for content in contents}

    def __call__(self, checksum: str, offset: int) -> None:
        self.append((checksum, offset))

    def answer(self, fetcher: Fetcher) -> WeightsNotice | None:
        ready = None
        while self and ready is None:
            checksum, offset = self.pop(0)
            ready = fetcher.on_piece(self.contents[checksum].piece(offset))
        return ready


def offered(tmp_path: Path, num_bytes: int) -> tuple[Offer, Content, Content]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = os.urandom(num_bytes)
    (tmp_path / "weights").write_bytes(data)
    checksum = xxhash.xxh3_64_hexdigest(data)
    parcels = Parcels()
    notice = WeightsNotice(0, str(tmp_path / "weights"), checksum, num_bytes, str(tmp_path / "model"), b"", b"")
    offer, weights = parcels.offer(notice)
    model = parcels.find(offer.model.checksum)
    assert model is not None
    return offer, weights, model


def test_the_next_goes_on_where_one_was_killed_and_the_memory_goes_with_the_last(elsewhere, tmp_path):
    parcel = Parcel("abc", 3 * PIECE_BYTES)
    argv = [sys.executable, "-c", FETCHES, parcel.checksum, str(parcel.num_bytes)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        name = first.stdout.readline().strip()
        store = HostStore("run")
        assert store.name == name, "one host"
        assert store.claim(parcel) is None and store.num_here(parcel) == PIECE_BYTES + 5
        first.send_signal(signal.SIGKILL)
    held = store.claim(parcel)
    assert held is not None and held.num_bytes == PIECE_BYTES + 5
    elsewhere("there")
    other = HostStore("run")
    assert other.name != name and other.find(parcel) is None and other.num_here(parcel) == 0
    other.close()
    store.done(held)
    held.close()
    store.close()
    assert [list(path.iterdir()) for path in (tmp_path / "here", tmp_path / "there")] == [[], []]


def test_who_stands_still_is_replaced_and_takes_what_the_other_has_fetched(elsewhere, tmp_path):
    offer, *contents = offered(tmp_path, 40 * PIECE_BYTES + 3)
    now = 0.0
    pulls = [Pulls(*contents), Pulls(*contents)]
    first, second = (Fetcher(HostStore("run"), p, clock=lambda: now) for p in pulls)
    assert first.on_offer(offer) is None and second.on_offer(offer) is None
    assert second.is_waiting and not pulls[1]

    def next_piece() -> None:
        checksum, offset = pulls[0].pop(0)
        first.on_piece(pulls[0].contents[checksum].piece(offset))

    for _ in range(10):  # the model, and some of the weights
        next_piece()
    second.look()
    now += STALLED_S - 1
    second.look()
    next_piece()
    now += STALLED_S - 1
    second.look()
    assert second.is_waiting, "something had come"
    now += STALLED_S + 1
    second.look()
    second.look()
    assert pulls[1][0] == (offer.notice.checksum, 10 * PIECE_BYTES), "goes on after what has come"
    next_piece()
    assert first.is_waiting, "nor do both fetch"
    ready = pulls[1].answer(second)
    assert ready is not None and Path(ready.path).read_bytes() == (tmp_path / "weights").read_bytes()
    late = first.look()
    assert late is not None and Path(late.path).stat().st_ino == Path(ready.path).stat().st_ino
    assert late.model_dir == ready.model_dir
    with pytest.raises(WeightError, match="no checksum"):
        second.on_offer(msgspec.structs.replace(offer, model=Parcel("../../abcdefghij", 1)))
    second.forget()
    second.on_offer(offer)
    assert pulls[1][-1] == (offer.notice.checksum, 31 * PIECE_BYTES), "what was refused is not found any more"
    first.close()
    second.close()
    assert list((tmp_path / "here").iterdir()) == []


# --- through a gateway ---


class Workers:
    """Workers of a run, one after the other in this thread, and the coordinator that tells all of them of weights."""

    def __init__(self):
        self.gateway = GatewayThread()
        self.sockets: list[RemoteSocket] = []

    def join(self) -> None:
        worker = RemoteSocket(self.gateway.address, self.gateway.key, 2)
        worker.join()
        self.sockets.append(worker)
        until(lambda: len(self.gateway.engines()) == len(self.sockets), "its Hello")

    def pass_on(self, notice: WeightsNotice) -> list[str]:
        """Where each of them has it, once everyone has loaded it."""
        got: dict[int, str] = {}

        def turn() -> bool:
            for i, worker in enumerate(self.sockets):
                if isinstance(message := worker.recv(0.0), NewWeights):
                    got[i] = message.notice.path
                    assert xxhash.xxh3_64_hexdigest(Path(got[i]).read_bytes()) == notice.checksum
                    worker.send(WeightsLoaded(message.notice.policy_version, 0.0, 0.0, 0))
            return len(got) == len(self.sockets)

        for i in range(len(self.sockets)):
            self.gateway.coordinator.send(f"remote{i}", NewWeights(notice))
        until(turn, "everyone to have it")
        return [got[i] for i in range(len(self.sockets))]

    def sent(self) -> float:
        """Megabytes of weights."""
        return round(self.gateway.stats["sent_bytes"] / 1e6, 2)

    def close(self) -> None:
        for worker in self.sockets:
            worker.close()
        self.gateway.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def test_each_host_is_sent_a_version_once_and_who_joins_it_finds_it_there(elsewhere, workers):
    for host in ("here", "here", "there", "there"):
        elsewhere(host)
        workers.join()
    notices = [workers.gateway.publish(version, 3_000_000) for version in range(2)]
    for notice in notices:
        inodes = [Path(path).stat().st_ino for path in workers.pass_on(notice)]
        assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    assert workers.sent() == 12, "two versions to two hosts"
    stats = workers.gateway.stats
    assert (stats["copies"], stats["hosts"]) == (1.0, 2)
    workers.join()
    assert len(workers.pass_on(notices[1])) == 5
    assert workers.sent() == 12


def test_hosts_that_find_the_gateway_busy_fetch_from_another_or_from_the_gateway_after_all(
    elsewhere, workers, monkeypatch
):
    monkeypatch.setattr("pipeline.remote.tree.FAN_OUT", 1)
    for host in ("here", "there", "yonder"):
        elsewhere(host)
        workers.join()
    workers.pass_on(workers.gateway.publish(0, 5_000_000))
    assert workers.sent() == 10, "the third from the first, while the second is sent it"
    for worker in workers.sockets:
        worker._relay.give(())
        worker._fetcher._give = lambda held: None  # so that they have nothing to pass on
    workers.pass_on(workers.gateway.publish(1, 5_000_000))
    assert workers.sent() == 25
    monkeypatch.setattr("pipeline.remote.relay.FAILS_S", 0.05)
    for worker in workers.sockets:
        worker._relay._lock.acquire()  # so that they never answer
    workers.pass_on(workers.gateway.publish(2, 5_000_000))
    assert workers.sent() == 40
    for worker in workers.sockets:
        worker._relay._lock.release()
