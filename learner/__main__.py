"""The learner process: `python -m learner RUN_DIR [--name NAME] [--resume CHECKPOINT_DIR]`.

Asks for a batch, takes one optimizer step, publishes the weights, says so; see docs/ARCHITECTURE.md.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch

from learner.checkpoint import open_learner, save_checkpoint
from learner.model import export_model_dir
from learner.recording import Recorder, StepRecord
from pipeline.channels import ENDPOINT, PeerSocket
from pipeline.checkpoints import partial_dir
from pipeline.config import Config, parse_config
from pipeline.errors import NguError
from pipeline.messages import (
    Batch,
    BatchRequest,
    Heartbeat,
    PeerFailed,
    Save,
    SetLearningRate,
    StepDone,
    Stop,
    WeightsNotice,
)
from pipeline.role import run_role
from pipeline.weights import WeightPublisher

HEARTBEAT_S = 1.0
SHARED_MEMORY = Path("/dev/shm")


class LearnerRole:
    """Joins a `Learner` to its socket and its files; `run` is the process's main loop."""

    def __init__(self, run_dir: Path, config: Config, socket: PeerSocket, resume: Path | None):
        self.run_dir = run_dir
        self.socket = socket
        self.learner, self.tokenizer = open_learner(config, resume)
        self.model_dir = run_dir / "model"
        export_model_dir(self.learner.model, self.tokenizer, self.model_dir)
        self.publisher = WeightPublisher(weights_dir(run_dir))
        self.recorder = Recorder(run_dir, config.daemon.replay_gib, self.learner.policy_version)
        self._heartbeat_due = 0.0

    def run(self) -> None:
        """Serve batches until told to stop; the weights go with the process."""
        try:
            self.socket.send(StepDone(self.learner.policy_version, notice := self._publish(), metrics={}))
            while not isinstance(message := self._next_message(), Stop):
                if isinstance(message, Batch):
                    notice = self._train(message)
                else:
                    self._save_now(message.checkpoint, notice)
            if message.checkpoint is not None:
                self._save_now(message.checkpoint, notice)
        finally:
            self.publisher.close()

    def _next_message(self) -> Batch | Save | Stop:
        self.socket.send(BatchRequest(self.learner.policy_version))
        while True:
            message = self.socket.recv(HEARTBEAT_S)
            if isinstance(message, Batch | Save | Stop):
                return message
            if isinstance(message, SetLearningRate):
                self.learner.config = msgspec.structs.replace(self.learner.config, lr=message.lr)
            self._heartbeat()

    def _train(self, batch: Batch) -> WeightsNotice:
        report = self.learner.step(batch.groups, batch.num_attempts, self._heartbeat)
        if report.warning:
            self._keep_refused(batch, report.warning)
        publish_started = time.perf_counter()
        notice = self._publish()
        report.metrics["publish_s"] = time.perf_counter() - publish_started
        self.recorder.write(StepRecord(report.policy_version, batch, self.learner.config, notice.checksum))
        checkpoint = partial_dir(self.run_dir, report.policy_version) if batch.checkpoint else None
        if checkpoint is not None:
            self._save(checkpoint)
        where = None if checkpoint is None else str(checkpoint)
        warning = report.warning or report.alarm
        self.socket.send(StepDone(report.policy_version, notice, report.metrics, where, warning))
        return notice

    def _publish(self) -> WeightsNotice:
        ids, logprobs = self.learner.canary()
        version, weights = self.learner.policy_version, self.learner.model.state_dict()
        return self.publisher.publish(weights, version, self.model_dir, ids.numpy(), logprobs.numpy())

    def _save_now(self, checkpoint: str, notice: WeightsNotice) -> None:
        self._save(Path(checkpoint))
        self.socket.send(StepDone(self.learner.policy_version, notice, metrics={}, checkpoint=checkpoint))

    def _save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_checkpoint(directory, self.learner, self.tokenizer)

    def _keep_refused(self, batch: Batch, warning: str) -> None:
        """A batch that could not be trained on is evidence: keep it as it came over the wire."""
        path = self.run_dir / "refused" / f"batch_{self.learner.policy_version:06d}.msgpack"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.msgpack.encode(batch))
        print(f"{warning}; its batch is kept at {path}", file=sys.stderr, flush=True)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_S
            self.socket.send(Heartbeat({"policy_version": float(self.learner.policy_version)}))


def weights_dir(run_dir: Path) -> Path:
    """Where versions are published: shared memory, named by the run, or the run directory where there is none."""
    if os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY / f"ngu-{(run_dir / 'run_id').read_text().strip()}"
    return run_dir / "weights"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m learner", description="The learner process of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", default="learner")
    parser.add_argument("--resume", type=Path, help="a checkpoint directory of this run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # with two, the engines and the learner of a small machine stall each other
    run_dir = args.run_dir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that shared memory is given back
    socket = PeerSocket(ENDPOINT, "learner", args.name, slots=1)
    try:
        socket.say_hello()
        config = parse_config(msgspec.json.decode((run_dir / "config.json").read_bytes()), "config.json")
        LearnerRole(run_dir, config, socket, args.resume).run()
    except Exception as e:
        lines = e.message.splitlines() if isinstance(e, NguError) else f"{type(e).__name__}: {e}".splitlines()
        socket.send(PeerFailed(lines[0]))
        raise
    finally:
        socket.close()


if __name__ == "__main__":
    run_role(main)
