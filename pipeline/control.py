"""Live commands to a run: a REP socket, served by the coordinator between two turns of its loop (and one like it by the
supervisor, for `engines`).

The sockets lie in `RUN/ipc`, which only its owner may enter. A command is a `Request`, its answer a `Reply` that says
what happened; both are also a line of `RUN/control.jsonl`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from pipeline.config import Config, dump_config, override_config
from pipeline.errors import ConfigError, NguError
from pipeline.room import check_room

COORDINATOR, SUPERVISOR = "control", "supervisor"
ENDPOINT = f"ipc://ipc/{COORDINATOR}"  # relative to the run directory, as channels.ENDPOINT is
ANSWER_TIMEOUT_S = 10.0  # the loop answers within a turn, unless it is writing a checkpoint

Verb = Literal["pause", "resume", "drain", "checkpoint", "eval", "set", "engines", "shutdown"]

# What may change while a run goes on. Everything else is baked into a model, a queue or a process when it starts.
LIVE_FIELDS = (
    "max_steps",
    "max_rollouts",
    "sampler.p_ngu",
    "sampler.max_retry_frac",
    "sampler.max_waiting",
    "sampler.seq_multiplier",
    "learner.lr",
    "staleness.max_lag",
    "staleness.policy",
    "staleness.min_ess",
    "verifier.max_unknown_frac",
    "guards.starvation",
    "guards.memory",
    "eval.every_steps",
    "eval.num_rollouts",
    "daemon.checkpoint_every_steps",
)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`setting` is the `key=value` of the verb `set`, what `engines` is to do, empty for the others."""

    verb: Verb
    setting: str = ""


class Reply(msgspec.Struct, frozen=True):
    """`text` is one line: what happened, or why nothing did."""

    ok: bool
    text: str


class ControlSocket:
    """The coordinator's end; belongs to the thread of its loop."""

    def __init__(self, endpoint: str, log: Path):
        self._log = log
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 16)
        self._socket.bind(endpoint)

    def serve(self, handle: Callable[[Request], Reply]) -> None:
        """Answer every request that has arrived; returns at once when there is none."""
        while self._socket.poll(0):
            # All frames of it: with one left unread the socket would refuse to answer, and the run would end for that.
            frames = self._socket.recv_multipart()
            try:
                request = msgspec.json.decode(b"".join(frames), type=Request)
            except (msgspec.DecodeError, RecursionError) as e:
                self._socket.send(msgspec.json.encode(Reply(False, f"not a command: {e}")))
                continue
            reply = handle(request)
            with self._log.open("ab") as log:
                entry = {"time": time.time(), "verb": request.verb, "setting": request.setting}
                log.write(msgspec.json.encode(entry | {"ok": reply.ok, "text": reply.text}) + b"\n")
            self._socket.send(msgspec.json.encode(reply))

    def close(self) -> None:
        self._context.destroy(linger=1000)


def ask(run_dir: Path, request: Request, timeout_s: float = ANSWER_TIMEOUT_S) -> Reply:
    """Send a command to a running run and wait for its answer; raises NguError when none comes."""
    socket_name = SUPERVISOR if request.verb == "engines" else COORDINATOR
    try:
        fd = os.open(run_dir / "ipc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise NguError(f"{run_dir}: no process of the run answers; see `ngu status {run_dir}`") from None
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        # A Unix socket path must stay under 108 bytes, wherever the run lives.
        socket.connect(f"ipc:///proc/self/fd/{fd}/{socket_name}")
        socket.send(msgspec.json.encode(request))
        if not socket.poll(round(1000 * timeout_s)):
            raise NguError(f"{run_dir}: no answer within {timeout_s:.0f} s; see `ngu status {run_dir}`")
        return msgspec.json.decode(socket.recv(), type=Reply)
    finally:
        context.destroy(linger=0)
        os.close(fd)


def changed_live(config: Config, setting: str) -> tuple[Config, str]:
    """`config` with one live field changed, and `key: old -> new`; raises ConfigError for any other field or value."""
    key = setting.partition("=")[0].strip()
    if "=" in setting and key not in LIVE_FIELDS:
        raise ConfigError(f"{key!r} cannot change while the run goes on; live are {', '.join(LIVE_FIELDS)}")
    new = override_config(config, setting)
    if key in ("sampler.seq_multiplier", "guards.starvation"):
        check_room(new)
    return new, f"{key}: {_field(config, key)} -> {_field(new, key)}"


def _field(config: Config, key: str) -> object:
    value = dump_config(config)
    for name in key.split("."):
        value = value[name]
    return value
