"""From host to host: a worker passes on what it has fetched, so that the run's own machine need not send it to each."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from pipeline.errors import ConfigError
from pipeline.remote.door import SILENT_S, Door, keep_alive
from pipeline.remote.keys import GatewayKeys, WorkerKeys
from pipeline.remote.store import Held
from pipeline.remote.wire import PIECE_BYTES, FromGateway, Over, Piece, Pull

# Without a piece for so long a relay is given up for the gateway.
FAILS_S = 5.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromGateway).decode


class Relay:
    """A door of the worker's own, in a thread of its own: pieces do not wait for an engine's step, nor it for them.

    It admits who has the run's worker key, as the gateway does, and takes nothing but requests for pieces.
    """

    def __init__(self, host: str, keys: WorkerKeys):
        """`host`: this machine's address on the way to the run; without one nothing is passed on."""
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()
        self._ends, self._end = os.pipe()
        self.address = ""
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(host, keys), name="relay", daemon=True)
        if host:
            self._thread.start()
            self._is_open.wait()

    def give(self, held: Sequence[Held]) -> None:
        """What others may have from now on; nothing else may be closed before this returns."""
        with self._lock:
            self._held = {h.parcel.checksum: h for h in held}

    def _serve(self, host: str, keys: WorkerKeys) -> None:
        try:
            door = Door(f"tcp://{host}:*", GatewayKeys(keys.public, keys.secret, worker_public=keys.public), SILENT_S)
            self.address = door.address
        except ConfigError:  # no port is free, or it is no address: others will fetch from elsewhere
            return
        finally:
            self._is_open.set()
        poller = zmq.Poller()
        for socket in (*door.sockets, self._ends):
            poller.register(socket, zmq.POLLIN)
        while self._ends not in dict(poller.poll()):
            for routing_id, frame in door.receive():
                if isinstance(frame, Pull):
                    door.send(routing_id, self._piece(frame) or Over(frame.session))
        door.close()

    def _piece(self, pull: Pull) -> Piece | None:
        with self._lock:
            held = self._held.get(pull.checksum)
            if held is None or not 0 <= pull.offset < held.parcel.num_bytes:
                return None
            return Piece(pull.checksum, pull.offset, os.pread(held.fd, PIECE_BYTES, pull.offset))

    def close(self) -> None:
        os.write(self._end, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (self._ends, self._end):
            os.close(fd)


class Supply:
    """Where this worker's pieces come from: the relay that the run has named, until it fails, else the gateway."""

    def __init__(
        self,
        context: zmq.Context,
        keys: WorkerKeys,
        poller: zmq.Poller,
        ask_gateway: Callable[[Pull], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._context, self._keys, self._poller = context, keys, poller
        self._ask_gateway = ask_gateway
        self._clock = clock
        self._source = self._checksum = ""
        self._socket: zmq.Socket | None = None  # to the relay, once something was asked of it
        self._heard = 0.0

    def use(self, source: str, checksum: str) -> None:
        """Ask this relay for that parcel from here on; an empty one, the gateway."""
        self.close()
        self._source, self._checksum = source, checksum

    def pull(self, pull: Pull) -> None:
        if not self._source or pull.checksum != self._checksum:
            self._ask_gateway(pull)
            return
        if self._socket is None:
            self._socket = self._connect()
        self._socket.send(_encode(pull))

    def _connect(self) -> zmq.Socket:
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        made.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public.encode())  # all workers of a run have the same
        made.setsockopt(zmq.LINGER, 0)
        keep_alive(made, SILENT_S)
        with contextlib.suppress(zmq.ZMQError):  # no address: it will not be heard
            made.connect(self._source)
        self._poller.register(made, zmq.POLLIN)
        self._heard = self._clock()
        return made

    def receive(self) -> Sequence[Piece]:
        """The pieces that a relay has sent."""
        pieces: list[Piece] = []
        while self._socket is not None and self._socket.poll(0):
            frame = _frame(self._socket.recv())
            if not isinstance(frame, Piece):  # it has what it was asked for no more
                self._heard = float("-inf")
                break
            self._heard = self._clock()
            pieces.append(frame)
        return pieces

    def has_failed(self) -> bool:
        """Whether the relay is given up, now: what was asked of it must be asked of the gateway."""
        if self._socket is None or self._clock() - self._heard < FAILS_S:
            return False
        self.close()
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
        self._socket, self._source = None, ""


def _frame(data: bytes) -> Any:
    try:
        return _decode(data)
    except msgspec.DecodeError:
        return None
