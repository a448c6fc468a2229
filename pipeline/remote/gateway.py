"""The gateway's role process: `python -m pipeline.remote.gateway RUN_DIR`, with `daemon.listen`.

It stands between the coordinator, to which every remote worker is one more engine on the local socket, and links that
may be slow, cut, or held by strangers: neither they nor the transfer of weights ever touch the coordinator's loop.
"""

import argparse
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline import tracing
from pipeline.channels import ENDPOINT, PeerSocket, introduction, report_failure
from pipeline.config import Config
from pipeline.errors import NguError, WireError
from pipeline.messages import PROTOCOL_VERSION, Heartbeat, Hello, PeerFailed, PeerWarning, Stop
from pipeline.remote.door import SILENT_S, Door
from pipeline.remote.host import Host
from pipeline.remote.keys import run_keys
from pipeline.remote.parcels import Parcels
from pipeline.remote.session import Session
from pipeline.remote.tree import Tree
from pipeline.remote.wire import Over, Refused, Welcome
from pipeline.role import run_role
from pipeline.rundir import read_config
from pipeline.soundness import check_slots, one_line

NAME = "gateway"
HEARTBEAT_S = 1.0
_TABLES = {"engine": ("seed", "model", "engines"), "verifier": ("task", "verifier")}  # of the config, by role
_NAMES = {"engine": "remote", "verifier": "remote-verifier"}  # before their numbers
STOP_GRACE_S = 3.0  # for workers to hear that the run has ended
MAX_SESSIONS = 1000
MAX_WARNINGS_A_MINUTE = 10  # whoever has the key could else fill the disk with them


class Gateway:
    """Sessions between a door and the coordinator; `turn` by `turn`, in one thread."""

    def __init__(self, config: Config, door: Door, endpoint: str, clock: Callable[[], float] = time.monotonic):
        self._config = config
        self._door = door
        self._endpoint = endpoint
        self._clock = clock
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 4 * MAX_SESSIONS)
        self._hello = introduction("gateway", NAME, 0, door.address)
        self._peer = PeerSocket(endpoint, self._hello, self._context)
        self._peer.say_hello()
        self._parcels = Parcels()
        self._counts: Counter[str] = Counter(joined=0, cut_off=0, late=0, refused=0, rejected=0, sent_bytes=0)
        self._hosts: dict[str, Host] = {}  # by what their workers share
        self._tree = Tree(clock)
        self._copies = 0.0  # that a host was sent of one version at most, by bytes
        self._warned: deque[float] = deque(maxlen=MAX_WARNINGS_A_MINUTE)
        self._next_beat = 0.0
        self._deadline: float | None = None  # once the run has ended
        self.sessions: dict[str, Session] = {}
        self._poller = zmq.Poller()
        for socket in (*door.sockets, self._peer.fd):
            self._poller.register(socket, zmq.POLLIN)

    @property
    def is_done(self) -> bool:
        """The run has ended, and every worker knows, or had its time to hear it."""
        if self._deadline is None:
            return False
        return all(session.is_done for session in self.sessions.values()) or self._clock() > self._deadline

    def turn(self, timeout_s: float) -> None:
        """Wait at most `timeout_s`, then pass on everything that has arrived on either side."""
        self._poller.poll(round(1000 * timeout_s))
        with tracing.span("turn", workers=len(self.sessions)):
            self._pass_on()
        self._beat()

    def _pass_on(self) -> None:
        for routing_id, frame in self._door.receive():
            self._on_frame(routing_id, frame)
        while (message := self._peer.recv(0)) is not None:
            if isinstance(message, Stop) and self._deadline is None:
                self._deadline = self._clock() + STOP_GRACE_S
        for session in list(self.sessions.values()):
            session.forward()
            if not session.end_reason and session.is_cut_off(self._config.daemon.hang_s):
                self._counts["cut_off"] += 1
                session.end_reason = f"not heard for {session.silent_s():.0f} s; its attempts are launched again"
            if session.end_reason:
                self._end(session)

    def _on_frame(self, routing_id: bytes, frame: Any) -> None:
        if isinstance(frame, Hello):
            self._on_hello(routing_id, frame)
            return
        session = self.sessions.get(frame.session)
        if session is None or session.routing_id != routing_id or session.end_reason:
            self._door.send(routing_id, Over(frame.session))
        else:
            session.on_frame(frame)

    # --- who is there ---

    def _on_hello(self, routing_id: bytes, hello: Hello) -> None:
        if refusal := self._refusal(hello):
            self._door.send(routing_id, Refused(refusal))
            self._counts["refused"] += 1
            self._warn(f"a worker on {one_line(hello.host) or 'another machine'} was refused: {refusal}")
            return
        session = self.sessions.get(hello.boot_id)
        if session is None:
            for earlier in [s for s in self.sessions.values() if s.routing_id == routing_id]:
                earlier.end_reason = "left"  # it lost its engine's server, and begins anew
                self._end(earlier)
            same = [s for s in self.sessions.values() if s.role == hello.role and s.place == hello.place >= 0]
            for earlier in same:
                earlier.end_reason = "was started again; its attempts are launched again"
                self._end(earlier)
            session = self._begin(routing_id, hello)
        self._door.send(routing_id, Welcome(session.id, session.name, self._config_for(hello)))

    def _refusal(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.protocol}, this run {PROTOCOL_VERSION}; install the run's version there"
        if hello.role not in _TABLES:
            return f"a {hello.role} cannot be remote, only an engine or a verifier"
        try:
            check_slots(hello.slots)
        except WireError as e:
            return e.message
        if self._deadline is not None:
            return "the run has ended"
        if len(self.sessions) >= MAX_SESSIONS and hello.boot_id not in self.sessions:
            return f"{MAX_SESSIONS} workers are here already"
        return ""

    def _begin(self, routing_id: bytes, hello: Hello) -> Session:
        taken, stem = {session.name for session in self.sessions.values()}, _NAMES[hello.role]
        free = [name for i in range(len(taken) + 1) if (name := f"{stem}{i}") not in taken]
        # One that comes back keeps its name, so that its figures stay in one curve.
        wanted = hello.name or f"{stem}{hello.place}"
        name = wanted if re.fullmatch(rf"{stem}\d{{1,4}}", wanted) and wanted not in taken else free[0]
        slots = hello.slots or self._config.engines.slots
        host = one_line(hello.host)
        known = msgspec.structs.replace(hello, name=name, pid=0, slots=slots, host=host, via=self._hello.boot_id)
        peer = PeerSocket(self._endpoint, known, self._context)
        self._poller.register(peer.fd, zmq.POLLIN)
        shared = self._hosts.setdefault(hello.store or hello.boot_id, Host(self._tree))
        session = Session(known, routing_id, peer, shared, self._parcels, self._door.send, self._clock)
        self.sessions[session.id] = session
        self._counts["joined"] += 1
        print(f"{name} joined from {host} with {slots} slots", file=sys.stderr, flush=True)
        return session

    def _config_for(self, hello: Hello) -> dict[str, Any]:
        """The tables that a worker needs. Programs, devices and servers of this machine are not those of another."""
        config = self._config
        engines = msgspec.structs.replace(
            config.engines, count=1, slots=hello.slots or config.engines.slots, gpus=(), urls=(), python=""
        )
        known = {
            "seed": config.seed,
            "model": {"chat_template": config.model.chat_template},
            "engines": engines,
            "task": config.task,
            "verifier": config.verifier,
        }
        return msgspec.to_builtins({name: known[name] for name in _TABLES[hello.role]})

    def _end(self, session: Session) -> None:
        print(f"{session.name}: {session.end_reason or 'the run has ended'}", file=sys.stderr, flush=True)
        self._counts.update(session.counts)
        if session.end_reason not in ("", "left"):
            self._warn(f"{session.name} ({session.host}): {session.end_reason}")
        self._poller.unregister(session.peer.fd)
        session.close()
        del self.sessions[session.id]
        if session.store not in {s.store for s in self.sessions.values()}:
            gone = self._hosts.pop(session.store)
            self._copies = max(self._copies, gone.copies)
            self._tree.forget(gone)

    # --- the coordinator ---

    def _warn(self, text: str) -> None:
        """A line for the user, unless there were many in the last minute: then it is only counted."""
        now = self._clock()
        if len(self._warned) == MAX_WARNINGS_A_MINUTE and now - self._warned[0] < 60.0:
            self._counts["unsaid"] += 1
            return
        self._warned.append(now)
        self._peer.send(PeerWarning(text))

    def _beat(self) -> None:
        if self._clock() >= self._next_beat:
            self._next_beat = self._clock() + HEARTBEAT_S
            self._peer.send(Heartbeat(self.stats()))

    def stats(self) -> dict[str, float]:
        """Workers and hosts now, and since the start: joins, cut-offs, late results, Hellos and connections refused,
        bytes of weights and how often a host was sent one version at most, ...
        """
        counts = Counter(self._counts)
        counts.update(self._door.counts)
        for session in self.sessions.values():
            counts.update(session.counts)
        now = {"workers": float(len(self.sessions)), "hosts": float(len(self._hosts))}
        copies = max([self._copies, *(host.copies for host in self._hosts.values())])
        return {**now, "copies": copies, **{name: float(n) for name, n in sorted(counts.items())}}

    def fail(self, reason: str) -> None:
        self._peer.send(PeerFailed(reason))

    def close(self) -> None:
        for session in list(self.sessions.values()):
            self._end(session)
        self._peer.close()
        self._context.destroy()
        self._door.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.remote.gateway")
    parser.add_argument("run_dir", type=Path)
    run_dir: Path = parser.parse_args().run_dir
    config = read_config(run_dir)
    if config.telemetry.profile:
        tracing.start(run_dir, NAME)
    try:
        # A broken connection is to be replaced before its worker is given up.
        door = Door(config.daemon.listen, run_keys(run_dir), min(SILENT_S, config.daemon.hang_s / 2))
    except NguError as e:
        report_failure(introduction("gateway", NAME, 0), e.message)
        raise
    gateway = Gateway(config, door, ENDPOINT)
    print(f"workers may join at {door.address}", file=sys.stderr, flush=True)
    try:
        while not gateway.is_done:
            gateway.turn(HEARTBEAT_S / 4)
    finally:
        gateway.close()


if __name__ == "__main__":
    run_role(main)
