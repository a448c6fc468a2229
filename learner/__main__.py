"""A learner process: `python -m learner RUN_DIR [--name NAME] [--resume CHECKPOINT_DIR] [--rank R --rendezvous WHERE]`.

Asks for a batch, takes one optimizer step, publishes the weights, says so; see docs/ARCHITECTURE.md. With
learner.num_processes above 1 every rank does all of that at the same time, and only the first one is heard.
"""

import argparse
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.checkpoint import open_learner, save_checkpoint
from learner.model import export_model_dir, num_token_ids
from learner.ranks import Ranks, alone, join_ranks, leave_ranks, num_on_node
from learner.recording import Recorder, StepRecord, keep_refused
from learner.shared_prompts import shares_prompts
from pipeline import tracing
from pipeline.channels import ENDPOINT, PeerSocket, introduction
from pipeline.checkpoints import partial_dir
from pipeline.config import Config, parse_config
from pipeline.errors import NguError
from pipeline.messages import (
    Batch,
    BatchRequest,
    Heartbeat,
    PeerFailed,
    PeerWarning,
    PublishAgain,
    Save,
    SetLearningRate,
    StepDone,
    Stop,
    ToPeer,
    WeightsNotice,
)
from pipeline.role import run_role
from pipeline.weights import WeightPublisher

HEARTBEAT_S = 1.0
SHARED_MEMORY = Path("/dev/shm")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToPeer | None).decode


class GroupSocket:
    """The coordinator's socket for a whole group: every rank hears what the first one hears, and it alone speaks."""

    def __init__(self, socket: PeerSocket | None, ranks: Ranks):
        self._socket = socket
        self._ranks = ranks

    def send(self, message: Any) -> None:
        if self._socket is not None:
            self._socket.send(message)

    def recv(self, timeout_s: float) -> Any | None:
        """As `PeerSocket.recv`; the ranks wait for each other here, so one that is gone is noticed within a turn."""
        message = self._socket.recv(timeout_s) if self._socket is not None else None
        if self._ranks.size == 1:
            return message
        return _decode(self._ranks.share(_encode(message) if self._ranks.is_first else None))


class LearnerRole:
    """Joins a `Learner` to its socket and its files; `run` is the process's main loop."""

    def __init__(self, run_dir: Path, config: Config, socket: GroupSocket, resume: Path | None, ranks: Ranks):
        self.run_dir = run_dir
        self.socket = socket
        self.ranks = ranks
        self.learner, self.tokenizer = open_learner(config, resume, ranks)
        self.model_dir = run_dir / "model"
        self.publisher = self.recorder = None
        if ranks.is_first:
            way = "share the tokens of their prompt" if shares_prompts(self.learner.model) else "have padded rows"
            print(f"learner: in a pass rollouts {way}", file=sys.stderr, flush=True)
            export_model_dir(self.learner.model, self.tokenizer, self.model_dir)
            self.publisher = WeightPublisher(weights_dir(run_dir))
            self.recorder = Recorder(run_dir, config.daemon.replay_gib, self.learner.policy_version)
        self._heartbeat_due = 0.0
        self._num_micro_batches = 0  # that the step in training has behind it
        self._startup_s = process_age_s()

    def run(self) -> None:
        """Serve batches until told to stop; the weights go with the process."""
        try:
            notice = self._publish()
            self._heartbeat()  # or the CPU time that starting took would count as that of training
            self.socket.send(StepDone(self.learner.policy_version, notice, metrics={}))
            while not isinstance(message := self._next_message(), Stop):
                if isinstance(message, Batch):
                    notice = self._train(message)
                else:
                    self._save_now(message.checkpoint, notice)
            if message.checkpoint is not None:
                self._save_now(message.checkpoint, notice)
        finally:
            if self.publisher is not None:
                self.publisher.close()

    def _next_message(self) -> Batch | Save | Stop:
        self.socket.send(BatchRequest(self.learner.policy_version))
        while True:
            message = self.socket.recv(HEARTBEAT_S)
            if isinstance(message, Batch | Save | Stop):
                return message
            if isinstance(message, SetLearningRate):
                self.learner.config = msgspec.structs.replace(self.learner.config, lr=message.lr)
            if isinstance(message, PublishAgain) and message.policy_version == self.learner.policy_version:
                self.socket.send(StepDone(message.policy_version, self._publish(), metrics={}))
            self._heartbeat()

    def _train(self, batch: Batch) -> WeightsNotice:
        self._num_micro_batches = 0
        with tracing.span("step", version=self.learner.policy_version + 1, groups=len(batch.groups)):
            report = self.learner.step(batch.groups, batch.num_attempts, self._on_progress)
        if report.warning and self.ranks.is_first:
            kept = keep_refused(self.run_dir, report.policy_version, batch)
            print(f"{report.warning}; its batch is kept at {kept}", file=sys.stderr, flush=True)
        publish_started = time.perf_counter()
        notice = self._publish()
        report.metrics["publish_s"] = time.perf_counter() - publish_started
        if self.recorder is not None:
            with tracing.span("record"):
                self.recorder.write(StepRecord(report.policy_version, batch, self.learner.config, notice.checksum))
        warning = report.warning or report.alarm
        self.socket.send(StepDone(report.policy_version, notice, report.metrics, warning=warning))
        if batch.checkpoint:  # after that, for which engines wait
            self._save_now(str(partial_dir(self.run_dir, report.policy_version)), notice)
        return notice

    def _on_progress(self) -> None:
        self._num_micro_batches += 1
        self._heartbeat()

    def _publish(self) -> WeightsNotice:
        with tracing.span("publish", version=self.learner.policy_version):
            ids, logprobs = self.learner.canary()
            version, weights = self.learner.policy_version, self.learner.state_dict()
            if self.publisher is None:  # what this rank would say is not heard
                return WeightsNotice(version, "", "", 0, "", b"", b"")
            notice = self.publisher.publish(weights, version, self.model_dir, ids.numpy(), logprobs.numpy())
            return msgspec.structs.replace(notice, vocab_size=num_token_ids(self.learner.model))

    def _save_now(self, checkpoint: str, notice: WeightsNotice) -> None:
        self._save(Path(checkpoint))
        self.socket.send(StepDone(self.learner.policy_version, notice, metrics={}, checkpoint=checkpoint))

    def _save(self, directory: Path) -> None:
        with tracing.span("checkpoint"):
            save_checkpoint(directory, self.learner, self.tokenizer)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._heartbeat_due:
            self._heartbeat_due = now + HEARTBEAT_S
            stats = {
                "policy_version": self.learner.policy_version,
                "ranks": self.ranks.size,
                "startup_s": self._startup_s,
                "micro_batches": self._num_micro_batches,
                "peak_gib": peak_gib(),
            }
            self.socket.send(Heartbeat({name: float(value) for name, value in stats.items()}))


def process_age_s() -> float:
    """Seconds since this process was started, its imports included (0 where there is no /proc)."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_gib() -> float:
    """The most memory that this process has held: of the GPU where there is one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / (1 << 30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


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
    parser.add_argument("--rank", type=int, default=0, help="of learner.num_processes")
    parser.add_argument("--rendezvous", help="where every rank meets the others: a new file, or tcp://HOST:PORT")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # with two, the engines and the learner of a small machine stall each other
    run_dir = args.run_dir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that shared memory is given back
    socket = PeerSocket(ENDPOINT, introduction("learner", args.name, slots=1)) if args.rank == 0 else None
    try:
        if socket is not None:
            socket.say_hello()
        config = parse_config(msgspec.json.decode((run_dir / "config.json").read_bytes()), "config.json")
        if config.telemetry.profile:
            tracing.start(run_dir, f"{args.name}-{args.rank}" if args.rank else args.name)
        size = config.learner.num_processes
        ranks = alone()
        if size > 1:
            ranks = join_ranks(args.rank, size, args.rendezvous, config.daemon.hang_s, num_on_node(config))
        LearnerRole(run_dir, config, GroupSocket(socket, ranks), args.resume, ranks).run()
        leave_ranks(ranks)
    except Exception as e:
        # What is expected would happen again; after anything else the supervisor starts another, within its budget.
        if socket is not None and isinstance(e, NguError):
            socket.send(PeerFailed(e.message.splitlines()[0]))
        elif socket is not None:
            socket.send(PeerWarning(f"the learner fell over: {type(e).__name__}: {e}".splitlines()[0]))
        raise
    finally:
        if socket is not None:
            socket.close()


if __name__ == "__main__":
    run_role(main)
