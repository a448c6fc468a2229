"""A gateway without a run: in a thread, between the door that workers come to and a coordinator that is a list."""

import contextlib
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from fakes import VOCAB_SIZE

from pipeline.channels import RouterSocket
from pipeline.config import Config, DaemonConfig, EnginesConfig
from pipeline.messages import (
    Hello,
    Rollout,
    SamplingParams,
    VersionSpan,
    WeightsNotice,
    Work,
    pack_ids,
    pack_logprobs,
)
from pipeline.remote.door import Door
from pipeline.remote.gateway import Gateway
from pipeline.remote.keys import run_keys
from samplers.base import Problem


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`; a failed test when it stays false."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.005)
    return value


class GatewayThread:
    """Sockets belong to the thread that made them, so the gateway lives in its own and is looked at from here."""

    def __init__(self, hang_s: float = 60.0):
        self.run_dir = Path(tempfile.mkdtemp(prefix="ngu"))  # short enough for a Unix socket
        self.keys = run_keys(self.run_dir)
        self.key = self.run_dir / "keys" / "worker.key"
        endpoint = f"ipc://{self.run_dir}/c"
        self.coordinator = RouterSocket(endpoint)
        config = Config(
            engines=EnginesConfig(kind="fake", slots=4), daemon=DaemonConfig(listen="tcp://127.0.0.1:0", hang_s=hang_s)
        )
        self.heard: list[tuple[str, Any]] = []
        self.stats: dict[str, float] = {}
        self.address = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config, endpoint))
        self._thread.start()
        until(lambda: self.address, "the gateway")

    def _run(self, config: Config, endpoint: str) -> None:
        door = Door(config.daemon.listen, self.keys, silent_s=2.0)
        gateway = Gateway(config, door, endpoint)
        self.address = door.address
        try:
            while not self._ends.is_set():
                gateway.turn(0.01)
                self.stats = gateway.stats()
        finally:
            gateway.close()

    def publish(self, version: int, num_bytes: int = 1000) -> WeightsNotice:
        """A file that a learner might have written, and its notice."""
        data = random.Random(version).randbytes(num_bytes)
        path = self.run_dir / f"{version}.safetensors"
        path.write_bytes(data)
        model = self.run_dir / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        digest = xxhash.xxh3_64_hexdigest(data)
        return WeightsNotice(version, str(path), digest, num_bytes, str(model), b"", b"", VOCAB_SIZE)

    def hear(self) -> list[tuple[str, Any]]:
        """Everything that has reached the coordinator so far."""
        self.heard += self.coordinator.receive(0.0)
        return self.heard

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.hear() if isinstance(message, kind)]

    def engines(self) -> list[Hello]:
        return [hello for hello in self.of(Hello) if hello.role == "engine"]

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self.coordinator.close()
        shutil.rmtree(self.run_dir)


def some_work(*attempt_ids: int) -> tuple[Work, ...]:
    problem, sampling = Problem("p", "list", "1?", "1", "easy"), SamplingParams(1.0, 8)
    return tuple(Work(attempt_id, 0, 0, problem, sampling) for attempt_id in attempt_ids)


def rollout(attempt_id: int, num_tokens: int = 3) -> Rollout:
    ids, logprobs = pack_ids(range(num_tokens)), pack_logprobs([-1.0] * num_tokens)
    return Rollout(attempt_id, 0, 0, pack_ids([1]), ids, logprobs, (VersionSpan(0, 0),), "stop", "1", "e", 1, 2)


class Proxy:
    """A TCP hop whose connections can be cut, or (half-open) swallowed without a word to either side."""

    def __init__(self, address: str):
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_swallowing = False
        self.num_connections = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            far = socket.create_connection(self._target)
            self._ends += (near, far)
            for a, b in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(a, b)))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_swallowing:
                    target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End every connection in the middle of whatever it carries."""
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()
