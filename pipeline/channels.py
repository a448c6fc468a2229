"""Typed ZeroMQ sockets: one ROUTER at the coordinator, one DEALER in every other role.

A socket belongs to the thread that made it. Back-pressure is by credit (a peer never holds more than its `slots`), so
the high-water marks are off and nothing is ever dropped by a full queue.
"""

import os
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from pipeline.errors import WireError
from pipeline.messages import FromPeer, Hello, Identify, Leave, PeerFailed, Role, ToPeer

ENDPOINT = "ipc://ipc/coordinator"  # relative to the run directory: a Unix socket path must stay under 108 bytes
MAX_MESSAGE_BYTES = 1 << 30
LINGER_MS = 2000
# A drain stops at whichever comes first, so that one loud peer cannot keep the loop from its other work.
DRAIN_MESSAGES = 256
DRAIN_BYTES = 2 << 20
# After a turn's work, so many times as long (and no longer than `GATHER_S`) goes by before the next drain, so that what
# a turn costs whatever it brings, a commit above all, is shared by many messages. A loop with little to do never waits.
GATHER_TURNS = 3
GATHER_S = 0.0025

_encoder = msgspec.msgpack.Encoder()
_encode, _encode_into = _encoder.encode, _encoder.encode_into
_decode_from_peer = msgspec.msgpack.Decoder(FromPeer).decode
_decode_to_peer = msgspec.msgpack.Decoder(ToPeer).decode
_NO_MESSAGE = (msgspec.DecodeError, RecursionError)  # what decoding other bytes raises


def _bare_send(socket: zmq.Socket) -> Callable[..., Any]:
    """`send` without what the Python class adds, options that we have not, which takes as long again."""
    return super(zmq.Socket, socket).send


def introduction(role: Role, name: str, slots: int, host: str = "") -> Hello:
    """The Hello of this process."""
    return Hello(role, name, uuid.uuid4().hex, os.getpid(), slots, host=host)


class PeerSocket:
    """A role's only connection; it introduces itself with `say_hello` and again whenever the coordinator asks.

    Whoever speaks for many peers gives them one `context`, and with it one thread for all their connections.
    """

    def __init__(self, endpoint: str, hello: Hello, context: zmq.Context | None = None):
        self._hello = hello
        self._is_shared, self._context = context is not None, context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, hello.name.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(endpoint)
        self._send = _bare_send(self._socket)

    def say_hello(self) -> None:
        self.send(self._hello)

    def rejoin(self) -> None:
        """Say Hello as if just started: the coordinator takes back all that was given to this peer."""
        self._hello = msgspec.structs.replace(self._hello, boot_id=uuid.uuid4().hex)
        self.say_hello()

    def leave(self) -> None:
        """Give back what is held; the last word of a peer that ends before the run does."""
        self.send(Leave(self._hello.boot_id))

    def send(self, message: Any) -> None:
        self._send(_encode(message))

    def recv(self, timeout_s: float) -> Any | None:
        """The next message, or None after `timeout_s` (0 polls). Raises WireError on bytes that are no message."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                payload = self._socket.recv(zmq.NOBLOCK)  # first: to ask whether there is one costs more
            except zmq.Again:
                left_ms = round(1000 * (deadline - time.monotonic()))
                if left_ms <= 0 or not self._socket.poll(left_ms):
                    return None
                continue
            try:
                message = _decode_to_peer(payload)
            except _NO_MESSAGE as e:
                sent = f"the coordinator sent {len(payload)} bytes"
                raise WireError(f"{sent} that are not a message: {e}") from None
            if not isinstance(message, Identify):
                return message
            self.say_hello()

    @property
    def fd(self) -> zmq.Socket:
        """The socket itself, for a `zmq.Poller` that also watches file descriptors."""
        return self._socket

    def close(self) -> None:
        """What was sent still leaves, if the coordinator is there to take it."""
        if self._is_shared:
            self._socket.close(linger=LINGER_MS)
        else:
            self._context.destroy(linger=LINGER_MS)


def report_failure(hello: Hello, reason: str) -> None:
    """All that a role says which cannot begin: the run fails with the reason, unless others can do without it."""
    socket = PeerSocket(ENDPOINT, hello)
    socket.say_hello()
    socket.send(PeerFailed(reason))
    socket.close()


class Unreadable(msgspec.Struct, frozen=True):
    """In the place of a message: what a peer sent is none, and `reason` says why."""

    reason: str


class Transport(Protocol):
    """`RouterSocket`, or a fake that drives the coordinator's loop on a virtual clock."""

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]: ...

    def send(self, name: str, message: Any) -> bool: ...


class RouterSocket:
    """The coordinator's end: messages come with their sender's name."""

    def __init__(self, endpoint: str):
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 4096)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(endpoint)
        self._send = _bare_send(self._socket)
        self._turn_began = time.monotonic()
        self._is_behind = False  # the last drain stopped at a bound
        self._buffer = bytearray()  # keeps the size of the largest message: to let one grow copies it several times

    def receive(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Everything that has arrived, up to the drain bounds; waits at most `timeout_s` for the first message.

        Bytes that are not a message come as `Unreadable`.
        """
        now = time.monotonic()
        gather_until = now + min(GATHER_TURNS * (now - self._turn_began), GATHER_S)
        is_here = self._socket.poll(round(1000 * timeout_s))
        if is_here and not self._is_behind:
            time.sleep(max(0.0, gather_until - time.monotonic()))
        self._turn_began = time.monotonic()
        return self._drain() if is_here else []

    def _drain(self) -> list[tuple[str, Any]]:
        received: list[tuple[str, Any]] = []
        recv, num_bytes = self._socket.recv, 0
        self._is_behind = False
        while len(received) < DRAIN_MESSAGES and num_bytes < DRAIN_BYTES:
            try:
                sender = recv(zmq.NOBLOCK)
            except zmq.Again:
                return received
            # A frame knows whether another follows; to ask the socket takes longer than to receive. What it holds is
            # decoded where it lies, or a long rollout would be copied twice.
            frame = recv(0, False)
            payload = frame.buffer
            while frame.more:  # a message of ours has one frame; the rest would be misread
                payload, frame = b"", recv(0, False)
            num_bytes += len(payload)
            name = sender.decode("utf-8", "replace")  # by position: names of arguments take as long as the decoding
            try:
                received.append((name, _decode_from_peer(payload)))
            except _NO_MESSAGE as e:
                received.append((name, Unreadable(f"it sent {len(payload)} bytes that are not a message: {e}")))
        self._is_behind = True
        return received

    def send(self, name: str, message: Any) -> bool:
        """False when no peer of that name is connected."""
        try:
            self._send(name.encode(), zmq.SNDMORE)
            _encode_into(message, self._buffer)
            self._send(self._buffer)
        except zmq.ZMQError as e:
            if e.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
