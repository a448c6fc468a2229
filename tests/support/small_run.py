"""A run of processes that starts in a second: coordinator, gateway, fake engines. The test is learner and verifier.

Its weights are random bytes, and its learner takes a step whenever the test lets it.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from fakes import FakeVerifier

from pipeline import rundir
from pipeline.channels import PeerSocket, introduction
from pipeline.config import load_config
from pipeline.manifest import write_manifest
from pipeline.messages import Batch, BatchRequest, PublishAgain, Save, StepDone, Stop, VerifyJobs, WeightsNotice
from pipeline.model_path import resolve_model_path

WEIGHT_BYTES = 1 << 20


class SmallRun:
    def __init__(self, *settings: str, step_s: float = 0.1):
        self._top = Path(tempfile.mkdtemp(prefix="ngu"))  # short enough for a Unix socket
        usual = ["engines.kind=fake", "engines.slots=16", "eval.final_num_rollouts=1", "task.eval_per_level=1"]
        usual += [
            "daemon.ledger_keep_steps=100000",
            "eval.every_steps=0",
            "learner.batch_size=32",
            "staleness.min_ess=0.0",
            "staleness.max_lag=2",
        ]
        self.dir = rundir.create(self._top / "run", load_config(None, [*usual, *settings]))
        self.model_dir = str(resolve_model_path("builtin"))
        self.step_s = step_s
        self.version = 0
        self.trained: list[int] = []  # attempts, in the order of the batches
        self.by_engine: dict[str, int] = {}  # rollouts of them
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._batch: Batch | None = None
        self._due = 0.0
        self._is_stopped = False
        endpoint = f"ipc://{self.dir}/ipc/coordinator"
        self._learner = PeerSocket(endpoint, introduction("learner", "learner", 1))
        self._verifier = PeerSocket(endpoint, introduction("verifier", "verifier", 64))
        self._judge: Any = FakeVerifier()
        for peer in (self._learner, self._verifier):
            peer.say_hello()
        self._learner.send(StepDone(0, self._publish(), {}))
        self._learner.send(BatchRequest(0))
        self.start("coordinator", "pipeline.coordinator", str(self.dir))

    def start(self, name: str, module: str, *arguments: str, inside: Callable[..., list[str]] | None = None) -> None:
        """Start a process of the run, or (`inside` another machine) of a worker."""
        argv = [sys.executable, "-m", module, *arguments]
        env = os.environ | {"TMPDIR": str(self._top)}  # where one that is killed leaves its scratch files
        with (self.dir / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                inside(*argv) if inside else argv,
                cwd=self.dir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text()

    # --- learner and verifier ---

    def _publish(self) -> WeightsNotice:
        data = random.Random(self.version).randbytes(WEIGHT_BYTES)
        path = self.dir / f"{self.version}.safetensors"
        path.write_bytes(data)
        (self.dir / f"{self.version - 2}.safetensors").unlink(missing_ok=True)
        digest = xxhash.xxh3_64_hexdigest(data)
        return WeightsNotice(self.version, str(path), digest, len(data), self.model_dir, b"", b"")

    def pump(self) -> None:
        """Do what learner and verifier have to do now; waits a moment when that is nothing."""
        while (jobs := self._verifier.recv(0.005)) is not None:
            if isinstance(jobs, VerifyJobs):
                self._verifier.send(self._judge.judge(jobs))
        while (message := self._learner.recv(0)) is not None:
            match message:
                case Batch():
                    self._batch, self._due = message, time.monotonic() + self.step_s
                case PublishAgain():
                    self._learner.send(StepDone(self.version, self._publish(), {}))
                case Save() | Stop():
                    self._is_stopped = isinstance(message, Stop)
                    self._save(message)
        if self._batch is not None and time.monotonic() >= self._due:
            self._step(self._batch)

    def _step(self, batch: Batch) -> None:
        self._batch = None
        self.version += 1
        for group in batch.groups:
            for rollout in group.rollouts:
                self.trained.append(rollout.attempt_id)
                self.by_engine[rollout.engine_id] = self.by_engine.get(rollout.engine_id, 0) + 1
        self._learner.send(StepDone(self.version, self._publish(), {"loss": 0.0}))
        self._learner.send(BatchRequest(self.version))

    def _save(self, message: Save | Stop) -> None:
        if self._batch is not None:
            self._step(self._batch)
        if message.checkpoint is not None:
            part = self.dir / message.checkpoint
            part.mkdir(parents=True, exist_ok=True)
            write_manifest(part, [])
            notice = self._publish()
            self._learner.send(StepDone(self.version, notice, {}, checkpoint=message.checkpoint))

    # --- what the test waits for ---

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{self.logs()}"
            self.pump()
        return value

    def go_on(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump()

    def status(self) -> dict[str, Any]:
        return rundir.read_status(self.dir)

    @property
    def gateway(self) -> dict[str, float]:
        """The gateway's counts, as the coordinator last heard them."""
        return self.status().get("gateway") or {}

    def peers(self) -> dict[str, Any]:
        return self.status().get("peers", {})

    def address(self) -> str:
        return self.until(lambda: self.peers().get("gateway", {}).get("host"), "the gateway")

    def trained_by(self, engine: str, more_than: int) -> bool:
        return self.by_engine.get(engine, 0) > more_than

    def ngu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pipeline.cli", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def finish(self) -> None:
        """Let the run end by itself, and check that nothing was lost or doubled."""
        self.processes["coordinator"].send_signal(signal.SIGTERM)
        self.until(lambda: self.processes["coordinator"].poll() is not None, "the end of the run")
        assert self.processes["coordinator"].returncode == 0, self.logs()
        assert len(self.trained) == len(set(self.trained)), "an attempt was trained twice"
        done = self.ngu("ledger", str(self.dir), "--verify")
        assert done.returncode == 0, done.stdout
        rows = [json.loads(line) for line in self.ngu("ledger", str(self.dir), "--json").stdout.splitlines()]
        assert {r["attempt"] for r in rows if r["fate"] == "trained"} == set(self.trained)

    def logs(self) -> str:
        return "".join(f"\n--- {p.name}\n{p.read_text()}" for p in sorted(self.dir.glob("*.log")))

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._learner.close()
        self._verifier.close()
        shutil.rmtree(self._top)
