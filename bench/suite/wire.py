"""This system's own sockets, and what needs no installation, as sides of the transport benchmark.

`python -m bench.suite.wire typed` measures on demand; each producer is a process `python -m bench.suite.wire typed
ENDPOINT TOKENS`. All have the environment and the allocator's settings that a run gives its roles, and consumers the
garbage collector's of its coordinator.
"""

import contextlib
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench.peers.serving import PATIENCE_S, Side, on_way, rollout, serve
from pipeline.channels import PeerSocket, RouterSocket, introduction
from pipeline.messages import Cancel, Rollout, Rollouts, VersionSpan, pack_ids, pack_logprobs
from pipeline.role import few_collections, keep_freed_memory

NAME = "engine-0"
TOGETHER = 8  # a worker sends what has ended every 20 ms, so short rollouts come several at a time


def message(tokens: int, num: int = 1) -> Rollouts:
    """What a worker sends when so many attempts have ended."""
    plain = rollout(tokens)
    packed = {"prompt_ids": pack_ids, "completion_ids": pack_ids, "engine_logprobs": pack_logprobs}
    fields = {name: packed[name](value) if name in packed else value for name, value in plain.items()}
    fields["version_spans"] = tuple(VersionSpan(*span) for span in plain["version_spans"])
    return Rollouts((Rollout(**fields),) * num)


def encoded(tokens: int) -> bytes:
    return msgspec.msgpack.encode(message(tokens))


class _Socketed:
    """A side whose producer is a child that connects to a Unix socket."""

    kind: str

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ngu-wire-"))
        self._producer: subprocess.Popen | None = None
        self._num_started = 0

    def _start(self, tokens: int) -> str:
        self._num_started += 1
        endpoint = f"ipc://{self._directory}/{self._num_started}"
        argv = [sys.executable, "-m", "bench.suite.wire", self.kind, endpoint, str(tokens)]
        self._producer = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        return endpoint

    def stop(self) -> None:
        if self._producer is not None:
            self._producer.kill()
            self._producer.wait()

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class TypedSide(_Socketed):
    """`PeerSocket` to `RouterSocket`, one rollout a message; a message back gives credit for those received."""

    kind = "typed"

    def start(self, tokens: int) -> None:
        self._router = RouterSocket(self._start(tokens))

    def take(self) -> int:
        count = 0
        for _, received in self._router.receive(1.0):
            count += len(received.rollouts) if isinstance(received, Rollouts) else 0
        if count:
            self._router.send(NAME, Cancel((count,)))
        return count

    def stop(self) -> None:
        super().stop()
        self._router.close()


class TogetherSide(TypedSide):
    """The same with `TOGETHER` rollouts a message."""

    kind = "together"


def _produce_typed(endpoint: str, tokens: int, num: int = 1) -> None:
    socket, sent = PeerSocket(endpoint, introduction("engine", NAME, 0)), message(tokens, num)
    socket.say_hello()
    credit = on_way(tokens)
    while True:
        while credit >= num:
            socket.send(sent)
            credit -= num
        while (received := socket.recv(0.0 if credit >= num else 1.0)) is not None:
            credit += received.attempt_ids[0]


class RawSide(_Socketed):
    """PUSH to PULL with the same bytes, which nobody makes and nobody reads."""

    kind = "raw"

    def start(self, tokens: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, on_way(tokens))
        self._socket.bind(self._start(tokens))

    def take(self) -> int:
        if not self._socket.poll(1000):
            return 0
        count = 0
        with contextlib.suppress(zmq.Again):
            for count in range(256):  # noqa: B007
                self._socket.recv(zmq.NOBLOCK)
            count += 1
        return count

    def stop(self) -> None:
        super().stop()
        self._context.destroy(linger=0)


def _produce_raw(endpoint: str, tokens: int) -> None:
    socket, sent = zmq.Context().socket(zmq.PUSH), encoded(tokens)
    socket.setsockopt(zmq.SNDHWM, on_way(tokens))
    socket.connect(endpoint)
    while True:
        socket.send(sent)


class QueueSide:
    """`multiprocessing.Queue`, which pickles."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")

    def start(self, tokens: int) -> None:
        self._queue = self._context.Queue(maxsize=on_way(tokens))
        self._producer = self._context.Process(target=_fill_queue, args=(self._queue, tokens))
        self._producer.start()

    def take(self) -> int:
        self._queue.get(timeout=PATIENCE_S)
        return 1

    def stop(self) -> None:
        self._producer.kill()
        self._producer.join()
        self._queue.close()

    def close(self) -> None:
        """Nothing is left once the producer is gone."""


def _fill_queue(queue: Any, tokens: int) -> None:
    sent = rollout(tokens)
    while True:
        queue.put(sent)


SIDES: dict[str, type[Side]] = {"typed": TypedSide, "together": TogetherSide, "raw": RawSide, "queue": QueueSide}
PRODUCERS = {"typed": _produce_typed, "together": partial(_produce_typed, num=TOGETHER), "raw": _produce_raw}


def main(kind: str, *of_producer: str) -> None:
    keep_freed_memory()
    if of_producer:
        endpoint, tokens = of_producer
        PRODUCERS[kind](endpoint, int(tokens))
    with few_collections():
        serve(SIDES[kind]())


if __name__ == "__main__":
    main(*sys.argv[1:])
