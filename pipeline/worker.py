"""The engine's role process: `python -m pipeline.worker RUN_DIR --name engine-0`.

One loop polls the socket between two tokens: work, cancellations and weights take effect there, and finished rollouts
leave from there. With nothing in flight it sleeps on the socket.
"""

import argparse
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import xxhash

from pipeline import tracing
from pipeline.channels import ENDPOINT, PeerSocket, introduction
from pipeline.config import Config, EnginesConfig
from pipeline.engines.base import Engine, Failure, LoadReport
from pipeline.engines.registry import make_engine, may_be_embedded
from pipeline.errors import EngineError, NguError, WeightError, WrongWeights
from pipeline.messages import (
    AttemptFailed,
    Cancel,
    Heartbeat,
    NewWeights,
    PeerFailed,
    Rollout,
    Rollouts,
    Stop,
    ToPeer,
    WeightsLoaded,
    WeightsNotice,
    WeightsRefused,
    Work,
    WorkItems,
)
from pipeline.role import LEAVE_SIGNAL, keep_freed_memory, run_role
from pipeline.rundir import read_config

HEARTBEAT_S = 1.0
# Rollouts go out at most this often, together: what a message costs each process that it passes is then shared by many,
# where a small model ends some at every token.
SEND_EVERY_S = 0.02
STARTING_S = 0.05  # between two looks at an engine whose server starts
# An engine is given an attempt more for every so many slots, which waits in it: a slot that gets free is filled at the
# next token, where a rollout's way to the coordinator and that of new work back take several tokens of a small model.
SLOTS_PER_SPARE = 4


class CoordinatorSocket(Protocol):
    """`PeerSocket`, or the one of a worker on another machine."""

    def say_hello(self) -> None: ...

    def rejoin(self) -> None: ...

    def leave(self) -> None: ...

    def send(self, message: Any) -> None: ...

    def recv(self, timeout_s: float) -> ToPeer | None: ...


class Worker:
    """Joins one engine, made when the first weights arrive, to one socket."""

    def __init__(self, config: Config, name: str, socket: CoordinatorSocket):
        self._config = config
        self._name = name
        self._socket = socket
        self._engine: Engine | None = None
        self._work: list[Work] = []  # received and not yet with the engine
        self._ended: list[Rollout] = []  # not yet sent
        self._next_send = 0.0
        self._notice: WeightsNotice | None = None  # the newest that is not loaded yet
        self._stopping = self._is_leaving = False
        self._outside = False  # left the rotation; work that was sent before the coordinator knew is not taken
        self._left_at: float | None = None
        self._next_beat = 0.0
        self._busy_s, self._busy_since = 0.0, math.inf  # with attempts in the engine

    def run(self) -> None:
        """Serve until told to stop; raises (after telling the coordinator) when the engine cannot go on."""
        try:
            self._socket.say_hello()
            while not self._stopping:
                self._receive(self._patience())
                try:
                    self._load()
                    self._step()
                except EngineError as e:
                    if not e.retryable:
                        raise
                    self._leave(e)
                self._count_busy()
                self._beat()
            if self._is_leaving:
                self._send_rollouts()
                self._socket.leave()
        except Exception as e:
            reason = e.message if isinstance(e, NguError) else f"{type(e).__name__}: {e}"
            self._socket.send(PeerFailed(" ".join(reason.split())))
            raise
        finally:
            if self._engine is not None:
                self._engine.close()

    def stop(self) -> None:
        """Give the work back and return from `run`, after the present turn; may be called by a signal handler."""
        self._stopping = self._is_leaving = True

    def _patience(self) -> float:
        """Seconds to wait for a message."""
        if self._num_in_flight():
            return 0.0
        if self._engine is not None and self._notice is not None:
            return STARTING_S
        return max(0.0, self._next_beat - time.monotonic())

    def _leave(self, error: EngineError) -> None:
        """Out of rotation: the coordinator gives our attempts to others and sends the weights, as to a new engine."""
        print(f"{self._name}: {error.message}", file=sys.stderr, flush=True)
        self._left_at = self._left_at or time.monotonic()
        self._work, self._notice, self._outside = [], None, True
        self._send_rollouts()  # once we have joined again they would be somebody else's
        self._socket.rejoin()

    def _num_in_flight(self) -> int:
        return self._engine.num_in_flight if self._engine is not None else 0

    def _receive(self, timeout_s: float) -> None:
        """Handle every message that is there, after waiting up to `timeout_s` for the first."""
        message = self._socket.recv(timeout_s)
        while message is not None:
            self._handle(message)
            message = self._socket.recv(0)

    def _handle(self, message: ToPeer) -> None:
        match message:
            case WorkItems():
                self._work += () if self._outside else message.items
            case Cancel():
                cancelled = set(message.attempt_ids)
                self._work = [w for w in self._work if w.attempt_id not in cancelled]
                if self._engine is not None:
                    self._engine.cancel(message.attempt_ids)
            case NewWeights():
                self._notice = message.notice  # one that was overtaken is skipped: its file may be gone
                self._outside = False
            case Stop():
                self._stopping = True
            case _:
                raise EngineError(f"an engine got {type(message).__name__}, which it cannot handle", retryable=False)

    def _load(self) -> None:
        """Load the newest weights, if any; a failed load is tried once more, with newer ones if they came meanwhile.

        Weights whose bytes are not those announced are refused, and what was served before goes on.
        """
        if self._notice is None or self._stopping:
            return
        if self._engine is None:
            self._engine = self._make_engine(self._notice.model_dir)
        if not self._engine.ready:
            return
        with tracing.span("load weights", version=self._notice.policy_version, rows=self._num_in_flight()):
            problem = self._try_load(self._notice)
        if problem is not None:
            self._receive(0.0)
            problem = self._try_load(self._notice)
        if isinstance(problem, WrongWeights):
            raise problem
        if problem is not None:
            print(f"{self._name} refused weights: {problem.message}", file=sys.stderr, flush=True)
            self._socket.send(WeightsRefused(self._notice.policy_version, problem.message))
        self._notice = None

    def _try_load(self, notice: WeightsNotice) -> WeightError | None:
        """None when the engine serves `notice` now, else what is wrong."""
        assert self._engine is not None
        try:
            report = self._engine.load_weights(notice)
        except WeightError as e:
            return e
        if not report.is_right:
            return WrongWeights(
                f"weights {notice.policy_version}: the engine's logprobs differ from the learner's by "
                f"{report.canary_error:.3g} (at most {report.tolerance:g} is rounding)"
            )
        self._report_load(report)
        return None

    def _make_engine(self, model_dir: str) -> Engine:
        seed = xxhash.xxh3_64_intdigest(f"{self._config.seed}/{self._name}".encode()) >> 1
        return make_engine(self._config.engines, model_dir, seed, self._config.model.chat_template, self._name)

    def _report_load(self, report: LoadReport) -> None:
        assert self._engine is not None
        stall_s, error, in_flight = report.stall_s, report.canary_error, self._engine.num_in_flight
        credit = self._engine.slots + self._engine.slots // SLOTS_PER_SPARE
        self._socket.send(WeightsLoaded(report.policy_version, stall_s, error, in_flight, credit))
        if self._left_at is not None:
            away_s, self._left_at = time.monotonic() - self._left_at, None
            print(f"{self._name}: serves again after {away_s:.1f} s", file=sys.stderr, flush=True)

    def _step(self) -> None:
        if self._engine is None or self._stopping:
            return
        if self._work:
            self._engine.submit(self._work)
            self._work = []
        if num_rows := self._engine.num_in_flight:
            with tracing.span("step", rows=num_rows):
                ended = self._engine.step()
        else:
            ended = self._engine.step()
        for outcome in ended:
            if isinstance(outcome, Failure):
                self._socket.send(AttemptFailed(outcome.attempt_id, outcome.reason, outcome.retryable))
            else:
                self._ended.append(outcome)
        if not self._engine.num_in_flight or time.monotonic() >= self._next_send:
            self._send_rollouts()

    def _send_rollouts(self) -> None:
        if self._ended:
            self._socket.send(Rollouts(tuple(self._ended)))
            self._ended, self._next_send = [], time.monotonic() + SEND_EVERY_S

    def _count_busy(self) -> None:
        """From the end of one turn to that of the next, whatever the turn does, weights and messages included."""
        now = time.monotonic()
        self._busy_s += max(0.0, now - self._busy_since)
        self._busy_since = now if self._num_in_flight() else math.inf

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + HEARTBEAT_S
            stats = self._engine.stats() | {"busy_s": self._busy_s} if self._engine is not None else {}
            self._socket.send(Heartbeat(stats))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.worker", description="One inference engine of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True, help="unique among the run's engines")
    parser.add_argument("--evaluator", action="store_true", help="evaluates only, each time at one version")
    arguments = parser.parse_args()
    config = read_config(arguments.run_dir)
    if config.telemetry.profile:
        tracing.start(arguments.run_dir, arguments.name)
    if config.engines.kind != "fake":
        import_libraries(config.engines)
    keep_freed_memory()
    role = "evaluator" if arguments.evaluator else "engine"
    socket = PeerSocket(ENDPOINT, introduction(role, arguments.name, config.engines.slots))
    worker = Worker(config, arguments.name, socket)
    signal.signal(LEAVE_SIGNAL, lambda *_: worker.stop())
    try:
        worker.run()
    finally:
        socket.close()


def import_libraries(config: EnginesConfig) -> None:
    """Seconds that would else come after the first weights, while the learner needs as long to make them; and after the
    first word, from which on a silence is a hang: many engines that compile at once on a busy machine are silent long.
    """
    import torch
    import transformers  # noqa: F401

    if may_be_embedded(config):
        import pipeline.engines.embedded.kernels  # noqa: F401

    # Two threads that spin for each other on busy cores are slower by orders of magnitude than one.
    torch.set_num_threads(1)


if __name__ == "__main__":
    run_role(main)
