"""The engine's role process: `python -m pipeline.worker RUN_DIR --name engine-0`.

One loop polls the socket between two tokens: work, cancellations and weights take effect there, and finished rollouts
leave from there. With nothing in flight it sleeps on the socket.
"""

import argparse
import time
from pathlib import Path

import xxhash

from pipeline.channels import ENDPOINT, PeerSocket
from pipeline.config import Config
from pipeline.engines.base import Engine, Failure, LoadReport
from pipeline.engines.registry import make_engine
from pipeline.errors import EngineError, NguError, WeightError
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
    Work,
    WorkItems,
)
from pipeline.role import run_role
from pipeline.rundir import read_config

HEARTBEAT_S = 1.0
# Engine and learner add float32 in different orders; a wrong or stale tensor is off by far more.
CANARY_TOLERANCE = 1e-3


class Worker:
    """Joins one engine, made when the first weights arrive, to one socket."""

    def __init__(self, config: Config, name: str, socket: PeerSocket):
        self._config = config
        self._name = name
        self._socket = socket
        self._engine: Engine | None = None
        self._work: list[Work] = []  # received and not yet with the engine
        self._notice: WeightsNotice | None = None  # the newest that is not loaded yet
        self._stopping = False
        self._next_beat = 0.0

    def run(self) -> None:
        """Serve until told to stop; raises (after telling the coordinator) when the engine cannot go on."""
        try:
            self._socket.say_hello()
            while not self._stopping:
                idle = not self._num_in_flight()
                self._receive(max(0.0, self._next_beat - time.monotonic()) if idle else 0.0)
                self._load()
                self._step()
                self._beat()
        except Exception as e:
            reason = e.message if isinstance(e, NguError) else f"{type(e).__name__}: {e}"
            self._socket.send(PeerFailed(" ".join(reason.split())))
            raise
        finally:
            if self._engine is not None:
                self._engine.close()

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
                self._work += message.items
            case Cancel():
                cancelled = set(message.attempt_ids)
                self._work = [w for w in self._work if w.attempt_id not in cancelled]
                if self._engine is not None:
                    self._engine.cancel(message.attempt_ids)
            case NewWeights():
                self._notice = message.notice  # one that was overtaken is skipped: its file may be gone
            case Stop():
                self._stopping = True
            case _:
                raise EngineError(f"an engine got {type(message).__name__}, which it cannot handle", retryable=False)

    def _load(self) -> None:
        """Load the newest weights, if any; a failed load is tried once more, with newer ones if they came meanwhile."""
        if self._notice is None or self._stopping:
            return
        problem = self._try_load(self._notice)
        if problem:
            self._receive(0.0)
            problem = self._try_load(self._notice)
        if problem:
            raise WeightError(problem)
        self._notice = None

    def _try_load(self, notice: WeightsNotice) -> str:
        """Empty when the engine serves `notice` now, else what is wrong."""
        if self._engine is None:
            self._engine = self._make_engine(notice.model_dir)
        try:
            report = self._engine.load_weights(notice)
        except WeightError as e:
            return e.message
        if not report.canary_error <= CANARY_TOLERANCE:
            return (
                f"weights {notice.policy_version}: the engine's logprobs differ from the learner's by "
                f"{report.canary_error:.3g} (at most {CANARY_TOLERANCE:g} is rounding)"
            )
        self._report_load(report)
        return ""

    def _make_engine(self, model_dir: str) -> Engine:
        seed = xxhash.xxh3_64_intdigest(f"{self._config.seed}/{self._name}".encode()) >> 1
        return make_engine(self._config.engines, model_dir, seed, self._config.model.chat_template, self._name)

    def _report_load(self, report: LoadReport) -> None:
        loaded = WeightsLoaded(report.policy_version, report.stall_s, report.canary_error, self._num_in_flight())
        self._socket.send(loaded)

    def _step(self) -> None:
        if self._engine is None or self._stopping:
            return
        if self._work:
            self._engine.submit(self._work)
            self._work = []
        ended = self._engine.step()
        rollouts = tuple(e for e in ended if isinstance(e, Rollout))
        if rollouts:
            self._socket.send(Rollouts(rollouts))
        for failure in ended:
            if isinstance(failure, Failure):
                self._socket.send(AttemptFailed(failure.attempt_id, failure.reason, failure.retryable))

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + HEARTBEAT_S
            self._socket.send(Heartbeat(self._engine.stats() if self._engine is not None else {}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.worker", description="One inference engine of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", required=True, help="unique among the run's engines")
    arguments = parser.parse_args()
    config = read_config(arguments.run_dir)
    if config.engines.kind != "fake":
        _import_libraries()
    socket = PeerSocket(ENDPOINT, "engine", arguments.name, config.engines.slots)
    try:
        Worker(config, arguments.name, socket).run()
    finally:
        socket.close()


def _import_libraries() -> None:
    """Seconds that would else come after the first weights, while the learner needs as long to make them."""
    import torch
    import transformers  # noqa: F401

    # Two threads that spin for each other on busy cores are slower by orders of magnitude than one.
    torch.set_num_threads(1)


if __name__ == "__main__":
    run_role(main)
