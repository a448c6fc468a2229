"""A worker's end of the link: to `pipeline.worker` it is the coordinator's socket, wherever the run is."""

import contextlib
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pipeline.channels import introduction
from pipeline.errors import ConfigError, WireError
from pipeline.messages import (
    AttemptFailed,
    Cancel,
    Heartbeat,
    Hello,
    Judgements,
    Leave,
    NewWeights,
    Role,
    Rollouts,
    ToPeer,
    VerifyJobs,
    WeightsRefused,
    WorkItems,
)
from pipeline.remote.door import SILENT_S, keep_alive
from pipeline.remote.fetcher import LOOK_S, Fetcher
from pipeline.remote.keys import WorkerKeys, read_keys
from pipeline.remote.link import Link
from pipeline.remote.relay import Relay, Supply
from pipeline.remote.store import HostStore
from pipeline.remote.wire import (
    Down,
    FromGateway,
    FromWorker,
    Offer,
    Over,
    Piece,
    Pull,
    Received,
    Refused,
    Resume,
    Up,
    Welcome,
)

JOIN_TIMEOUT_S = 60.0
# A run may be resumed on another machine of the same address; after that long a worker no longer waits for it.
GIVE_UP_S = 600.0
LEAVE_TIMEOUT_S = 3.0
_CONNECT_TIMEOUT_MS = 2000  # the kernel would try for minutes, at ever longer intervals
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
# As far as rollouts can be split: a frame that takes long delays the signs of life behind it.
_FRAME_BYTES = 1 << 20
# A gateway of another key can only close the connection; once or twice that is also one that starts or ends.
_MAX_CLOSED = 3

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromGateway).decode


class RemoteSocket:
    """`join` first, then used like a `PeerSocket`.

    While the connection is down the engine goes on with what it has; results are kept and sent when it is back. If it
    comes back too late, its work is with others: it is cancelled here, and the worker joins as if just started.
    """

    def __init__(
        self,
        address: str,
        key: Path,
        slots: int,
        place: int = -1,
        role: Literal["engine", "verifier"] = "engine",
    ):
        keys = read_keys(key, WorkerKeys)
        self._address, self._key, self._slots = address, key, slots
        self._role: Role = role
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._store = HostStore(keys.gateway_public)
        self._relay = Relay(_address_towards(address) if role == "engine" else "", keys)
        self._hello = self._introduction("", place)
        self._socket.setsockopt(zmq.ROUTING_ID, self._hello.boot_id.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.gateway_public.encode())
        # What is sent while there is no connection is in the link, not in a queue that would come before `Resume`.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        keep_alive(self._socket, SILENT_S)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._supply = Supply(self._context, keys, self._poller, self._transmit)
        self._fetcher = Fetcher(self._store, self._pull, self._relay.give)
        self._link: Link[FromWorker] = Link()
        self._inbox: deque[ToPeer] = deque()
        self._held: set[int] = set()
        self._welcome: Welcome | None = None  # of the present session, once there is one
        self._is_leaving = False
        self._heard = time.monotonic()
        self._num_closed = 0  # attempts to connect, in a row, that were closed without a word
        try:
            self._socket.connect(address)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"--connect {address}: {e.strerror}; write tcp://HOST:PORT") from None

    def _introduction(self, name: str, place: int) -> Hello:
        hello = introduction(self._role, name, self._slots, socket.gethostname())
        return msgspec.structs.replace(hello, store=self._store.name, relay=self._relay.address, place=place)

    # --- joining ---

    def join(self) -> Welcome:
        """Wait to be admitted; raises ConfigError if key or version are refused, WireError if no one answers."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while self._welcome is None:
            if time.monotonic() > deadline:
                raise WireError(
                    f"{self._address}: no answer for {JOIN_TIMEOUT_S:.0f} s; is a run with daemon.listen up?"
                )
            if self._num_closed >= _MAX_CLOSED:
                raise ConfigError(f"{self._address} closes the connection: {self._key} is the key of another run")
            self._wait(1.0)
        return self._welcome

    def say_hello(self) -> None:
        """`join` has done it."""

    def rejoin(self) -> None:
        """Begin a session as if just started: what was given to the one before goes to others."""
        self._hello = self._introduction(self._hello.name, self._hello.place)
        self._link, self._welcome = Link(), None
        self._fetcher.abandon()
        self._inbox.clear()
        self._held.clear()
        self._transmit(self._hello)

    @property
    def fd(self) -> zmq.Socket:
        """For a `zmq.Poller` that watches other things, too; `recv` at least once a second all the same."""
        return self._socket

    # --- messages ---

    def send(self, message: FromWorker) -> None:
        match message:
            case Heartbeat():
                if any(isinstance(kept, Heartbeat) for _, kept in self._link.unacknowledged):
                    return  # the connection is down or slow; one that arrives late says nothing
            case Rollouts():
                self._held.difference_update(rollout.attempt_id for rollout in message.rollouts)
                for part in _in_frames(message):
                    self._send(part)
                return
            case AttemptFailed():
                self._held.discard(message.attempt_id)
            case Judgements():
                self._held.difference_update(j.attempt_id for j in message.judgements)
            case WeightsRefused():
                self._fetcher.forget()
        self._send(message)

    def _send(self, message: FromWorker) -> None:
        number = self._link.send(message)
        self._transmit(Up(self._hello.boot_id, number, self._link.received, message))

    def recv(self, timeout_s: float) -> ToPeer | None:
        """The next message, or None after `timeout_s` (0 polls); raises WireError when nothing was heard for long."""
        deadline = time.monotonic() + timeout_s
        while not self._inbox:
            if not self._wait(deadline - time.monotonic()):
                if time.monotonic() - self._heard > GIVE_UP_S:
                    raise WireError(f"{self._address}: no word from the run for {GIVE_UP_S:.0f} s")
                return None
        return self._inbox.popleft()

    def _wait(self, timeout_s: float) -> bool:
        """Take in a frame or an event of the connection; False when none came."""
        if self._fetcher.is_waiting:
            timeout_s = min(timeout_s, LOOK_S)
            self._deliver(self._fetcher.look())
        ready = dict(self._poller.poll(max(0, round(1000 * timeout_s))))
        if self._monitor in ready:
            self._on_event(recv_monitor_message(self._monitor)["event"])
        if self._socket in ready:
            try:
                frame = _decode(self._socket.recv())
            except msgspec.DecodeError as e:
                raise WireError(f"{self._address} sent what is not a frame: {e}") from None
            self._heard = time.monotonic()
            self._on_frame(frame)
        for piece in self._supply.receive():
            self._deliver(self._fetcher.on_piece(piece))
        if self._supply.has_failed():
            self._fetcher.ask_again()
        return bool(ready or self._inbox)

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ConfigError(f"{self._address} refuses {self._key}: it is the key of another run")
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._num_closed += 1
            return
        self._num_closed = 0
        is_known = self._welcome is not None
        self._transmit(Resume(self._hello.boot_id, self._link.received) if is_known else self._hello)
        for number, body in self._link.unacknowledged:
            self._transmit(Up(self._hello.boot_id, number, self._link.received, body))
        self._fetcher.ask_again()

    def _on_frame(self, frame: Any) -> None:
        match frame:
            case Refused():
                raise ConfigError(f"{self._address} refuses this worker: {frame.reason}")
            case Welcome() if frame.session == self._hello.boot_id:
                self._welcome = frame
                self._hello = msgspec.structs.replace(self._hello, name=frame.name)
            case Over() if self._is_leaving:
                self._welcome = None
            case Over() if frame.session == self._hello.boot_id and self._welcome is not None:
                lost = tuple(self._held)
                # While it was out of reach, another may have been started in its place: that one has the better claim.
                self._hello = msgspec.structs.replace(self._hello, place=-1)
                self.rejoin()
                if self._role == "engine":  # a verifier judges to the end, and nobody listens
                    self._inbox.append(Cancel(lost))
            case Received() if frame.session == self._hello.boot_id:
                self._link.acknowledged(frame.received)
            case Piece():
                self._deliver(self._fetcher.on_piece(frame))
            case Down() if frame.session == self._hello.boot_id:
                self._link.acknowledged(frame.received)
                if self._link.accept(frame.seq):
                    self._on_message(frame.body)

    def _on_message(self, message: Any) -> None:
        match message:
            case Offer():
                self._supply.use(message.source, message.notice.checksum)
                self._deliver(self._fetcher.on_offer(message))
                return
            case VerifyJobs():
                self._held.update(job.attempt_id for job in message.jobs)
            case WorkItems():
                self._held.update(work.attempt_id for work in message.items)
            case Cancel():
                self._held.difference_update(message.attempt_ids)
        self._inbox.append(message)

    def _deliver(self, notice: Any) -> None:
        if notice is not None:
            self._supply.close()
            self._inbox.append(NewWeights(notice))

    def _pull(self, checksum: str, offset: int) -> None:
        self._supply.pull(Pull(self._hello.boot_id, checksum, offset))

    def _transmit(self, frame: Any) -> None:
        with contextlib.suppress(zmq.Again):  # no connection: `_on_event` sends again what matters
            self._socket.send(_encode(frame), zmq.NOBLOCK)

    # --- the end ---

    def leave(self) -> None:
        """Give back what is not finished, and wait a moment until the run knows; the last word but `close`."""
        if self._welcome is None:
            return
        self._is_leaving = True
        self._send(Leave(self._hello.boot_id))
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while self._welcome is not None and any(self._link.unacknowledged) and time.monotonic() < deadline:
            self._wait(0.1)

    def close(self) -> None:
        if self._welcome is not None:  # so that the end of the run counts as heard
            self._transmit(Received(self._hello.boot_id, self._link.received))
        self._relay.close()
        self._supply.close()
        self._fetcher.close()
        self._socket.disable_monitor()
        self._context.destroy(linger=1000)


def _address_towards(address: str) -> str:
    """This machine's own address on the way to `address`; empty if there is none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return probe.getsockname()[0]
    return ""


def _in_frames(message: Rollouts) -> list[Rollouts]:
    """The rollouts in messages of about `_FRAME_BYTES`."""
    parts, size = [[]], 0
    for rollout in message.rollouts:
        num_bytes = 8 * rollout.num_tokens + len(rollout.prompt_ids) + 4 * len(rollout.text) + 1024
        if parts[-1] and size + num_bytes > _FRAME_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(rollout)
        size += num_bytes
    return [Rollouts(tuple(part)) for part in parts]
