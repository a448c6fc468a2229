"""A verifier at work, on the run's machine or on another."""

import math
import time
from typing import Any, Protocol

import zmq

from pipeline import tracing
from pipeline.errors import WireError
from pipeline.messages import Heartbeat, Judgement, Judgements, Stop, VerifyJobs
from pipeline.verifiers.pool import VerifierPool

# Jobs held at once: enough that the fast path never waits for the coordinator, few enough that a pile of hanging
# answers ahead of a job is bounded.
SLOTS = 256
HEARTBEAT_S = 1.0


class JobSocket(Protocol):
    """`PeerSocket`, or the one of a worker on another machine."""

    @property
    def fd(self) -> zmq.Socket: ...

    def send(self, message: Any) -> None: ...

    def recv(self, timeout_s: float) -> Any: ...


def serve(socket: JobSocket, pool: VerifierPool) -> None:
    """Jobs in, verdicts out, a heartbeat each second; returns when told to stop."""
    next_beat = time.monotonic()
    while True:
        while (message := socket.recv(0)) is not None:
            if isinstance(message, Stop):
                return
            if not isinstance(message, VerifyJobs):
                raise WireError(f"a verifier does not take {type(message).__name__}")
            with tracing.span("submit", jobs=len(message.jobs)):
                for job in message.jobs:
                    pool.submit(job)
        if done := pool.poll(0):
            socket.send(Judgements(tuple(Judgement(attempt_id, verdict) for attempt_id, verdict in done)))
        now = time.monotonic()
        if now >= next_beat:
            socket.send(Heartbeat(pool.stats()))
            next_beat = now + HEARTBEAT_S
        _wait(socket, pool, next_beat - now)


def _wait(socket: JobSocket, pool: VerifierPool, timeout_s: float) -> None:
    poller = zmq.Poller()
    poller.register(socket.fd, zmq.POLLIN)
    for fd in pool.filenos():
        poller.register(fd, zmq.POLLIN)
    poller.poll(math.ceil(1000 * max(0.0, min(timeout_s, pool.wait_s()))))
