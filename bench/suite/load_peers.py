"""Engines, a verifier and a learner without a model, in one process, for measurements of a coordinator:
`python -m bench.suite.load_peers` with a `Load` on stdin.

They answer at once, or give rollouts back at a rate. Told to stop, they print a `Report` as JSON. What they are sent is
read no further than they need it: a load that takes as long as what it loads would measure itself.
"""

import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline.messages import (
    BatchRequest,
    FromPeer,
    Hello,
    Identify,
    Judgement,
    Judgements,
    NewWeights,
    Role,
    Rollout,
    Rollouts,
    Save,
    StepDone,
    Stop,
    Verdict,
    VersionSpan,
    WeightsLoaded,
    WeightsNotice,
    pack_ids,
    pack_logprobs,
)
from pipeline.role import few_collections, keep_freed_memory

MAX_TIMES = 200_000
IDLE_MS = 500  # without a rollout to give back
VERIFIER_SLOTS = 4096
# Rollouts of one message, as an engine's step ends a few at once.
PER_MESSAGE = 4


class Work(msgspec.Struct, array_like=True, gc=False):
    """The first fields of `messages.Work`; those that follow are passed over."""

    attempt_id: int
    chain_id: int
    round: int


class WorkItems(msgspec.Struct, array_like=True, gc=False, tag="work"):
    items: list[Work]


class VerifyJob(msgspec.Struct, array_like=True, gc=False):
    attempt_id: int


class VerifyJobs(msgspec.Struct, array_like=True, gc=False, tag="verify"):
    jobs: list[VerifyJob]


class Batch(msgspec.Struct, array_like=True, gc=False, tag="batch"):
    groups: msgspec.Raw
    num_attempts: int
    checkpoint: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkItems | VerifyJobs | Batch | NewWeights | Identify | Save | Stop).decode
_RIGHT, _WRONG = Verdict("correct", 1.0), Verdict("incorrect", 0.0)


class Load(msgspec.Struct):
    """`workers` engines of `slots` each give rollouts of `num_tokens` back, together `per_s` a second (0: at once)."""

    endpoint: str
    workers: int
    slots: int
    num_tokens: int
    per_s: float


class Report(msgspec.Struct):
    """Seconds between a rollout and the work that took its place, of the newest ones, and the share of a core that the
    load took: near 1, it is the load that is measured.
    """

    round_trip_s: list[float]
    core_share: float


class Peers:
    def __init__(self, load: Load):
        self._load = load
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAX_SOCKETS, 4096)
        self._poller = zmq.Poller()
        self._sockets: dict[zmq.Socket, tuple[str, Hello]] = {}
        self._by_name: dict[str, zmq.Socket] = {}
        for i in range(load.workers):
            self._join("engine", f"engine-{i}", load.slots)
        self._join("verifier", "verifier", VERIFIER_SLOTS)
        self._join("learner", "learner", 1)
        self._ready: deque[tuple[str, Work]] = deque()
        self._given_back: dict[str, deque[float]] = {f"engine-{i}": deque() for i in range(load.workers)}
        self._times: deque[float] = deque(maxlen=MAX_TIMES)
        self._version = 0  # the learner's
        self._spans = {name: (VersionSpan(0, 0),) for name in self._given_back}  # of the weights that each serves
        self._coin = random.Random(0).random
        self._ids, self._logprobs = pack_ids([7] * load.num_tokens), pack_logprobs([-1.0] * load.num_tokens)
        self._text = "abc" * load.num_tokens

    def _join(self, role: Role, name: str, slots: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self._load.endpoint)
        self._poller.register(socket, zmq.POLLIN)
        hello = Hello(role, name, name, 0, slots)
        self._sockets[socket], self._by_name[name] = (name, hello), socket
        self._send(name, hello)

    def _send(self, name: str, message: FromPeer) -> None:
        self._by_name[name].send(_encode(message), copy=self._load.num_tokens < 8192)

    def serve(self) -> Report:
        """Until told to stop."""
        self._send("learner", StepDone(0, self._notice(), {}))
        self._send("learner", BatchRequest(0))
        began, cpu = time.monotonic(), time.process_time()
        started, num_sent = began, 0
        while self._serve_messages():
            allowed = len(self._ready)
            if self._load.per_s:
                due = int(self._load.per_s * (time.monotonic() - started)) - num_sent
                if due > allowed:  # nothing is made up for: a rate, not a debt
                    started, num_sent = time.monotonic(), 0
                allowed = min(allowed, due)
            num_sent += allowed
            self._give_back(allowed)
        return Report(list(self._times), (time.process_time() - cpu) / (time.monotonic() - began))

    def _serve_messages(self) -> bool:
        """Answer what has come; False if told to stop."""
        for socket, _ in self._poller.poll(self._patience_ms()):
            name, hello = self._sockets[socket]
            while True:
                try:
                    message = _decode(socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                if isinstance(message, Stop):
                    return False
                self._handle(name, hello, message)
        return True

    def _patience_ms(self) -> int:
        if not self._ready:
            return IDLE_MS
        return 1 if self._load.per_s else 0

    def _give_back(self, num: int) -> None:
        by_engine: dict[str, list[Rollout]] = {}
        for _ in range(num):
            name, work = self._ready.popleft()
            by_engine.setdefault(name, []).append(self._rollout(name, work))
        for name, rollouts in by_engine.items():
            for i in range(0, len(rollouts), PER_MESSAGE):
                self._send(name, Rollouts(tuple(rollouts[i : i + PER_MESSAGE])))
            self._given_back[name].extend([time.monotonic()] * len(rollouts))

    def _rollout(self, name: str, work: Work) -> Rollout:
        return Rollout(
            work.attempt_id,
            work.chain_id,
            work.round,
            b"\1\0\0\0",
            self._ids,
            self._logprobs,
            self._spans[name],
            "stop",
            self._text,
            name,
            0,
            0,
        )

    def _handle(self, name: str, hello: Hello, message: Any) -> None:
        match message:
            case WorkItems():
                self._ready.extend([(name, work) for work in message.items])
                given_back, now = self._given_back[name], time.monotonic()
                for _ in range(min(len(message.items), len(given_back))):
                    self._times.append(now - given_back.popleft())
            case VerifyJobs():
                coin = self._coin
                judged = [Judgement(job.attempt_id, _RIGHT if coin() < 0.5 else _WRONG) for job in message.jobs]
                self._send(name, Judgements(tuple(judged)))
            case NewWeights():
                self._spans[name] = (VersionSpan(0, message.notice.policy_version),)
                self._send(name, WeightsLoaded(message.notice.policy_version, 0.0, 0.0, 0))
            case Batch():
                self._version += 1
                checkpoint = f"checkpoints/.step_{self._version:06d}.partial" if message.checkpoint else None
                self._step_done(checkpoint)
                self._send(name, BatchRequest(self._version))
            case Save():
                self._step_done(message.checkpoint)
                self._send(name, BatchRequest(self._version))
            case Identify():
                self._send(name, hello)

    def _step_done(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # the learner's part of it: nobody reads it, and to sync it would hold the others up
            Path(checkpoint).mkdir(parents=True, exist_ok=True)
        self._send("learner", StepDone(self._version, self._notice(), {"loss": 0.0, "ess": 1.0}, checkpoint))

    def _notice(self) -> WeightsNotice:
        return WeightsNotice(self._version, "", "", 0, "", b"", b"")


if __name__ == "__main__":
    keep_freed_memory()
    peers = Peers(msgspec.json.decode(sys.stdin.buffer.read(), type=Load))
    with few_collections():
        print(msgspec.json.encode(peers.serve()).decode())
