"""Engines, a verifier and a learner without a model, in one process, for measurements of a coordinator:
`python -m bench.suite.load_peers` with a `Load` on stdin.

They answer at once, or give rollouts back at a rate. Told to stop, they print the times between a rollout and the work
that took its place, as JSON.
"""

import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pipeline.manifest import write_manifest
from pipeline.messages import (
    Batch,
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
    ToPeer,
    Verdict,
    VerifyJobs,
    VersionSpan,
    WeightsLoaded,
    WeightsNotice,
    Work,
    WorkItems,
    pack_ids,
    pack_logprobs,
)
from pipeline.role import keep_freed_memory

MAX_TIMES = 200_000
IDLE_MS = 500  # without a rollout to give back
VERIFIER_SLOTS = 4096
# Rollouts of one message, as an engine's step ends a few at once.
PER_MESSAGE = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToPeer).decode


class Load(msgspec.Struct):
    """`workers` engines of `slots` each give rollouts of `num_tokens` back, together `per_s` a second (0: at once)."""

    endpoint: str
    workers: int
    slots: int
    num_tokens: int
    per_s: float


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
        self._serving = dict.fromkeys(self._given_back, 0)
        self._coin = random.Random(0)
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

    def serve(self) -> list[float]:
        """Until told to stop; the times between a rollout and new work, in seconds."""
        self._send("learner", StepDone(0, self._notice(), {}))
        self._send("learner", BatchRequest(0))
        started, num_sent = time.monotonic(), 0
        while True:
            for socket, _ in self._poller.poll(self._patience_ms()):
                name, hello = self._sockets[socket]
                while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    message = _decode(socket.recv())
                    if isinstance(message, Stop):
                        return list(self._times)
                    self._handle(name, hello, message)
            allowed = len(self._ready)
            if self._load.per_s:
                due = int(self._load.per_s * (time.monotonic() - started)) - num_sent
                if due > allowed:  # nothing is made up for: a rate, not a debt
                    started, num_sent = time.monotonic(), 0
                allowed = min(allowed, due)
            num_sent += allowed
            self._give_back(allowed)

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
            (VersionSpan(0, self._serving[name]),),
            "stop",
            self._text,
            name,
            0,
            0,
        )

    def _handle(self, name: str, hello: Hello, message: Any) -> None:
        match message:
            case WorkItems():
                self._ready.extend((name, work) for work in message.items)
                given_back, now = self._given_back[name], time.monotonic()
                for _ in range(min(len(message.items), len(given_back))):
                    self._times.append(now - given_back.popleft())
            case VerifyJobs():
                self._send(name, Judgements(tuple(Judgement(j.attempt_id, self._verdict()) for j in message.jobs)))
            case NewWeights():
                self._serving[name] = message.notice.policy_version
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

    def _verdict(self) -> Verdict:
        is_correct = self._coin.random() < 0.5
        return Verdict("correct" if is_correct else "incorrect", float(is_correct))

    def _step_done(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            Path(checkpoint).mkdir(parents=True, exist_ok=True)
            write_manifest(Path(checkpoint), [])
        self._send("learner", StepDone(self._version, self._notice(), {"loss": 0.0, "ess": 1.0}, checkpoint))

    def _notice(self) -> WeightsNotice:
        return WeightsNotice(self._version, "", "", 0, "", b"", b"")


if __name__ == "__main__":
    keep_freed_memory()
    print(msgspec.json.encode(Peers(msgspec.json.decode(sys.stdin.buffer.read(), type=Load)).serve()).decode())
