"""The CURVE keys of a run: made at the first start of its gateway, kept over its restarts, readable by the owner alone.

One pair is the gateway's, one is every worker's. `RUN/keys/worker.key` is what a worker needs and is copied to its
machine; whoever holds it may lend engines to the run, and sees its prompts, weights and tokenizer.
"""

import re
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from pipeline.errors import ConfigError

DIRECTORY, GATEWAY_FILE, WORKER_FILE = "keys", "gateway.key", "worker.key"


class GatewayKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Z85, 40 characters each, as ZeroMQ takes them."""

    public: str
    secret: str
    worker_public: str


class WorkerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public: str
    secret: str
    gateway_public: str


Keys = TypeVar("Keys", GatewayKeys, WorkerKeys)


def run_keys(run_dir: Path) -> GatewayKeys:
    """The keys of the run, made if it has none; raises ConfigError when they cannot be read."""
    directory = run_dir / DIRECTORY
    path = directory / GATEWAY_FILE
    if not path.exists():
        directory.mkdir(mode=0o700, exist_ok=True)
        gateway, worker = (tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(2))
        _write_private(directory / WORKER_FILE, WorkerKeys(*worker, gateway_public=gateway[0]))
        _write_private(path, GatewayKeys(*gateway, worker_public=worker[0]))  # last: while it is missing, both are made
    return read_keys(path, GatewayKeys)


def read_keys(path: Path, kind: type[Keys]) -> Keys:
    """Raises ConfigError for a file that is missing, damaged, of the other kind, or readable by others."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path}: others can read this key; `chmod 600 {path}`, and make sure that no one has")
        keys = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as e:
        raise ConfigError(f"{path}: cannot read the key: {e.strerror}; copy RUN/keys/worker.key of the run") from None
    except msgspec.DecodeError:
        raise ConfigError(f"{path}: not a {_NAMES[kind]} of a run; copy RUN/keys/worker.key of the run") from None
    if not all(_Z85.fullmatch(key) for key in msgspec.structs.astuple(keys)):
        raise ConfigError(f"{path}: damaged; copy RUN/keys/worker.key of the run again")
    return keys


_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()[\]{}@%$#-]{40}")
_NAMES = {GatewayKeys: "gateway key", WorkerKeys: "worker key"}


def _write_private(path: Path, keys: GatewayKeys | WorkerKeys) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(0o600, exist_ok=False)
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
    partial.rename(path)
