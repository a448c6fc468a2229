"""The socket that a run opens to other machines: encrypted, for holders of the run's worker key, for no one else."""

from collections import Counter
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pipeline.errors import ConfigError
from pipeline.remote.keys import GatewayKeys
from pipeline.remote.wire import MAX_FRAME_BYTES, ToGateway

SILENT_S = 15.0  # a connection over which nothing comes for so long is given up
_HEARTBEAT_MS = 1000
# A connection that has not proved its key by then is closed.
_HANDSHAKE_MS = 5000
_DRAIN_FRAMES = 256
_MAX_CONNECTIONS = 4096
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks whether a client's key is admitted (RFC 27)
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToGateway).decode


def keep_alive(socket: zmq.Socket, silent_s: float) -> None:
    """Notice when nothing has come over a connection for `silent_s`, and never wait long for a new one."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * silent_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.SNDHWM, 0)  # bounded by credit: slots, and pieces asked for
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)


class Door:
    """A ROUTER: frames come with the routing id of their connection.

    `counts`: connections `admitted`; `refused` (those that have not proved the key: plain, of another key, or bytes
    that are no ZeroMQ at all); `ended` (of both kinds, one that announces too large a frame among them); frames
    `rejected`, because they are none of ours.
    """

    def __init__(self, address: str, keys: GatewayKeys, silent_s: float = SILENT_S):
        self.counts: Counter[str] = Counter(admitted=0, refused=0, ended=0, rejected=0)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, _MAX_CONNECTIONS)
        self._worker_key = keys.worker_public.encode()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP_ENDPOINT)  # before the door, or whoever comes first would not be asked for a key
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"ngu")
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keep_alive(self._socket, silent_s)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as e:
            self.close()
            raise ConfigError(f"daemon.listen = {address}: {e.strerror}; choose another") from None
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> tuple[zmq.Socket, ...]:
        """What a poller must watch."""
        return self._socket, self._zap, self._monitor

    def receive(self) -> list[tuple[bytes, Any]]:
        """The frames that have arrived, at most `_DRAIN_FRAMES`; answers questions about keys on the way."""
        while self._zap.poll(0):
            self._zap.send_multipart(self._admission(self._zap.recv_multipart()))
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            is_admitted, is_end = event == zmq.EVENT_HANDSHAKE_SUCCEEDED, event == zmq.EVENT_DISCONNECTED
            self.counts["admitted"] += is_admitted
            self.counts["refused"] += (event == zmq.EVENT_ACCEPTED) - is_admitted
            self.counts["ended"] += is_end
        received = []
        for _ in range(_DRAIN_FRAMES):
            try:
                sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append((sender, _decode(parts[0] if len(parts) == 1 else b"")))
            except (msgspec.DecodeError, RecursionError):
                self.counts["rejected"] += 1
        return received

    def send(self, routing_id: bytes, frame: Any) -> None:
        """A frame to someone who is not there is dropped: what matters is sent again to a worker that comes back."""
        try:
            self._socket.send_multipart((routing_id, _encode(frame)))
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _admission(self, question: list[bytes]) -> list[bytes]:
        """The answer to a ZAP request: version, request id, status, text, user id, metadata."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = question
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
        status = (b"200", b"OK") if key == self._worker_key else (b"400", b"not the worker key of this run")
        return [version, request_id, *status, b"", b""]

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=1000)
