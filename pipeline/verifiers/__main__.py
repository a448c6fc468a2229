"""The verifier role: `python -m pipeline.verifiers RUN_DIR --name verifier`, in the run directory."""

import argparse
import math
import time
from pathlib import Path

import zmq

from pipeline import tracing
from pipeline.channels import ENDPOINT, PeerSocket, introduction
from pipeline.errors import VerifierError, WireError
from pipeline.messages import Heartbeat, Judgement, Judgements, PeerFailed, Stop, VerifyJobs
from pipeline.role import run_role
from pipeline.rundir import read_config
from pipeline.verifiers.pool import VerifierPool

# Jobs held at once: enough that the fast path never waits for the coordinator, few enough that a pile of hanging
# answers ahead of a job is bounded.
SLOTS = 256
HEARTBEAT_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.verifiers")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", default="verifier")
    args = parser.parse_args()
    config = read_config(args.run_dir)
    if config.telemetry.profile:
        tracing.start(args.run_dir, args.name)
    socket = PeerSocket(ENDPOINT, introduction("verifier", args.name, SLOTS))
    try:
        with VerifierPool.of_run(config) as pool:
            socket.say_hello()
            serve(socket, pool)
    except VerifierError as e:
        socket.send(PeerFailed(e.message))
        raise
    finally:
        socket.close()
    return 0


def serve(socket: PeerSocket, pool: VerifierPool) -> None:
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


def _wait(socket: PeerSocket, pool: VerifierPool, timeout_s: float) -> None:
    poller = zmq.Poller()
    poller.register(socket.fd, zmq.POLLIN)
    for fd in pool.filenos():
        poller.register(fd, zmq.POLLIN)
    poller.poll(math.ceil(1000 * max(0.0, min(timeout_s, pool.wait_s()))))


if __name__ == "__main__":
    run_role(main)
