"""`ngu worker`: lends this machine to a run on another."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from pipeline import lifeline
from pipeline.config import Config, parse_config
from pipeline.engines.sglang.environment import find_python
from pipeline.errors import ConfigError, VerifierError
from pipeline.messages import PeerFailed
from pipeline.remote.client import RemoteSocket
from pipeline.remote.wire import Welcome
from pipeline.role import ROLE_ENV
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.preflight import resolve_verifier
from pipeline.verifiers.serving import SLOTS, serve
from pipeline.worker import Worker, import_libraries


def worker(
    *,
    connect: Annotated[str, Parameter(help="Where the run listens (its daemon.listen), as tcp://HOST:5555.")],
    key: Annotated[Path, Parameter(help="A copy of RUN/keys/worker.key.")],
    slots: Annotated[int, Parameter(help="Rollouts at once. Default: engines.slots of the run.")] = 0,
    place: Annotated[int, Parameter(help="A number of its own: an earlier one of this role and number is dead.")] = -1,
    role: Annotated[Literal["engine", "verifier"], Parameter(help="What to do for the run.")] = "engine",
) -> int:
    """Lend this machine's engine, or its judgement, to a run on another one, until the run ends.

    It needs nothing of the run but the key: config, tokenizer and weights come over the encrypted connection.
    Ctrl-C or SIGTERM gives the work back.
    """
    if not connect.startswith("tcp://"):
        raise ConfigError(f"--connect {connect}: write tcp://HOST:PORT")
    if slots < 0:
        raise ConfigError("--slots must be above 0")
    lifeline.hold()  # of the process that has started this one, if that one holds a lifeline
    if role == "verifier":
        if slots:
            raise ConfigError("--slots is for engines; verifier.num_workers of the run says how many judge at once")
        return _verify(connect, key, place)
    os.environ |= ROLE_ENV  # before torch is imported
    socket = RemoteSocket(connect, key, slots, place)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # until there is work to give back
    with _joined(socket, connect) as welcome:
        config = _config(welcome)
        if config.engines.kind != "fake":
            import_libraries(config.engines)
        running = Worker(config, welcome.name, socket)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: running.stop())
        running.run()
    return 0


@contextlib.contextmanager
def _joined(socket: RemoteSocket, address: str) -> Iterator[Welcome]:
    """Inside, it is a worker of the run at `address`; whoever exits leaves."""
    try:
        welcome = socket.join()
        print(f"joined {address} as {welcome.name}", file=sys.stderr, flush=True)
        yield welcome
    except SystemExit:
        socket.leave()
        raise
    finally:
        socket.close()


def _verify(connect: str, key: Path, place: int) -> int:
    socket = RemoteSocket(connect, key, SLOTS, place, "verifier")
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: sys.exit(0))
    with _joined(socket, connect) as welcome:
        try:
            config = resolve_verifier(parse_config(welcome.config, "the run's config"))
            with VerifierPool.of_run(config) as pool:
                serve(socket, pool)
        except (ConfigError, VerifierError) as e:
            socket.send(PeerFailed(e.message))
            raise
    return 0


def _config(welcome: Welcome) -> Config:
    """The run's config, as far as an engine needs it, with the programs of this machine."""
    config = parse_config(welcome.config, "the run's config")
    if config.engines.kind != "sglang":
        return config
    python, gpus = find_python(config.engines), given_gpus(config.engines.tp)
    return msgspec.structs.replace(config, engines=msgspec.structs.replace(config.engines, python=python, gpus=gpus))


def given_gpus(num: int) -> tuple[int, ...]:
    """Of the GPUs that a scheduler has set aside for this process `num`; empty where none has: the first ones.

    Raises ConfigError when there are fewer.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not re.fullmatch(r"\d+(,\d+)*", given):
        return ()
    gpus = tuple(map(int, given.split(",")))
    if len(gpus) < num:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={given}, but engines.tp = {num} GPUs serve one engine; set them alike")
    return gpus[:num]
