"""`ngu worker`: lends this machine to a run on another."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from pipeline.config import Config, parse_config
from pipeline.daemon import ROLE_ENV
from pipeline.engines.sglang.environment import find_python
from pipeline.errors import ConfigError
from pipeline.remote.client import RemoteSocket
from pipeline.remote.wire import Welcome
from pipeline.worker import Worker, import_libraries


def worker(
    *,
    connect: Annotated[str, Parameter(help="Where the run listens (its daemon.listen), as tcp://HOST:5555.")],
    key: Annotated[Path, Parameter(help="A copy of RUN/keys/worker.key.")],
    slots: Annotated[int, Parameter(help="Rollouts at once. Default: engines.slots of the run.")] = 0,
) -> int:
    """Generate rollouts for a run on another machine, until it ends; Ctrl-C or SIGTERM gives the work back.

    It needs nothing of the run but the key: config, tokenizer and weights come over the encrypted connection.
    """
    if not connect.startswith("tcp://"):
        raise ConfigError(f"--connect {connect}: write tcp://HOST:PORT")
    if slots < 0:
        raise ConfigError("--slots must be above 0")
    os.environ |= ROLE_ENV  # before torch is imported
    socket = RemoteSocket(connect, key, slots)
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))  # until there is work to give back
    try:
        welcome = socket.join()
        print(f"joined {connect} as {welcome.name}", file=sys.stderr, flush=True)
        config = _config(welcome)
        if config.engines.kind != "fake":
            import_libraries()
        running = Worker(config, welcome.name, socket)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: running.stop())
        running.run()
    except SystemExit:
        socket.leave()
        raise
    finally:
        socket.close()
    return 0


def _config(welcome: Welcome) -> Config:
    """The run's config, as far as an engine needs it, with the programs of this machine."""
    config = parse_config(welcome.config, "the run's config")
    if config.engines.kind != "sglang":
        return config
    engines = msgspec.structs.replace(config.engines, python=find_python(config.engines))
    return msgspec.structs.replace(config, engines=engines)
