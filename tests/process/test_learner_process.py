"""The learner as a process behind a real socket."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_samples import random_groups, tiny_model_dir

from learner.__main__ import main
from learner.checkpoint import MODEL
from learner.learner import Learner
from learner.model import load_model
from pipeline.channels import ENDPOINT, RouterSocket
from pipeline.config import dump_config, parse_config
from pipeline.errors import ConfigError, WeightError
from pipeline.manifest import verify_manifest
from pipeline.messages import (
    Batch,
    BatchRequest,
    Heartbeat,
    Hello,
    PeerFailed,
    PeerWarning,
    PublishAgain,
    StepDone,
    Stop,
)
from pipeline.role import EXIT_CRASH
from pipeline.weights import read_weights

DEADLINE_S = 90.0


class Run:
    """A run directory, the coordinator's socket and at most one learner, which may have several processes."""

    def __init__(self, run_dir: Path, model_path: str, num_processes: int = 1):
        self.run_dir = run_dir
        self.weights_dir = Path(f"/dev/shm/ngu-{(run_id := secrets.token_hex(6))}")
        (run_dir / "ipc").mkdir(parents=True)
        (run_dir / "run_id").write_text(run_id)
        config = {
            "model": {"path": model_path},
            "learner": {"lr": 1e-2, "warmup_steps": 0, "num_processes": num_processes},
        }
        resolved = dump_config(parse_config(config, "test"))
        (run_dir / "config.json").write_bytes(msgspec.json.encode(resolved))
        self.router = RouterSocket(ENDPOINT)
        self.process: subprocess.Popen | None = None
        self.others: list[subprocess.Popen] = []
        self._inbox = []

    def start(self, *arguments: str) -> None:
        self.process = self._spawn(*arguments)

    def start_ranks(self, num_processes: int) -> None:
        meet = ["--rendezvous", str(self.run_dir / "ipc" / "meet")]
        self.start(*meet)
        self.others = [self._spawn(*meet, "--rank", str(rank)) for rank in range(1, num_processes)]

    def _spawn(self, *arguments: str) -> subprocess.Popen:
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        root = Path(__file__).parents[2]
        env["PYTHONPATH"] = str(root)
        argv = [sys.executable, "-m", "learner", str(self.run_dir), *arguments]
        return subprocess.Popen(argv, cwd=self.run_dir, env=env, stderr=subprocess.PIPE, text=True)

    def expect(self, kind):
        """The next message of `kind`; only greetings and heartbeats may come before it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._inbox += [message for _, message in self.router.receive(0.1)]
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
                assert isinstance(message, Hello | Heartbeat), message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S:.0f} s")

    def send(self, message) -> None:
        assert self.router.send("learner", message)

    def wait(self) -> tuple[int, str]:
        assert self.process is not None
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        for process in [*self.others, *([self.process] if self.process else [])]:
            process.kill()
            process.communicate()  # also closes the pipe
        self.router.close()
        with contextlib.suppress(FileNotFoundError):
            for path in self.weights_dir.iterdir():
                path.unlink()
            self.weights_dir.rmdir()


@pytest.fixture
def start_run(tmp_path, monkeypatch):
    runs = []

    def make(model_path: str, num_processes: int = 1) -> Run:
        (run_dir := tmp_path / "run").mkdir()
        monkeypatch.chdir(run_dir)
        runs.append(Run(run_dir, model_path, num_processes))
        return runs[-1]

    handler = signal.getsignal(signal.SIGTERM)
    yield make
    signal.signal(signal.SIGTERM, handler)  # `main` in this process sets its own
    for run in runs:
        run.close()


def check_notice(notice, learner, atol=0.0):
    """The announced weights and canary are those of `learner`."""
    published = read_weights(notice)
    own = learner.model.state_dict()
    assert all(torch.allclose(tensor, own[name], rtol=0.0, atol=atol) for name, tensor in published.items())
    canary = np.frombuffer(notice.canary_logprobs, dtype="<f4")
    np.testing.assert_allclose(canary, learner.canary()[1].numpy(), atol=max(1e-6, 10 * atol))
    assert (Path(notice.model_dir) / "config.json").is_file()


def test_steps_checkpoint_stop_resume_and_crash(start_run, tmp_path):
    path = str(tiny_model_dir(tmp_path / "start"))
    run = start_run(path)
    run.start()
    model, _ = load_model(path)
    config = parse_config(msgspec.json.decode((run.run_dir / "config.json").read_bytes()), "test")
    mirror = Learner(model, config.learner, config.sampling.temperature)

    assert run.expect(Heartbeat).cpu_s > 0, "what it took to start is known before the first weights are"
    started = run.expect(StepDone)
    assert started.policy_version == 0 and started.metrics == {}
    check_notice(started.weights, mirror)
    assert run.expect(BatchRequest).policy_version == 0
    run.expect(Heartbeat)

    Path(started.weights.path).write_bytes(b"torn")
    run.send(PublishAgain(7))  # not what it serves
    run.send(PublishAgain(0))
    again = run.expect(StepDone)
    assert (again.policy_version, again.metrics) == (0, {})
    assert again.weights == started.weights, "the same bytes, and the same canary"
    assert again.weights.vocab_size == model.get_input_embeddings().weight.shape[0]
    check_notice(again.weights, mirror)

    groups = random_groups(model, seed=0, drift=0.1)
    run.send(Batch(tuple(groups), num_attempts=16, checkpoint=True))
    done = run.expect(StepDone)
    expected = mirror.step(groups)
    assert done.policy_version == 1 and done.warning == "" and done.checkpoint is None
    assert done.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-6)
    check_notice(done.weights, mirror)
    saved = run.expect(StepDone)  # after the weights, for which engines wait
    assert (saved.policy_version, saved.metrics, saved.weights) == (1, {}, done.weights)
    assert saved.checkpoint == str(run.run_dir / "checkpoints" / ".step_000001.partial")
    verify_manifest(Path(saved.checkpoint))

    assert run.expect(BatchRequest).policy_version == 1
    closing = tmp_path / "closing"
    run.send(Stop(checkpoint=str(closing)))
    last = run.expect(StepDone)
    assert (last.policy_version, last.checkpoint, last.metrics) == (1, str(closing), {})
    status, errors = run.wait()
    assert status == 0, errors
    assert not run.weights_dir.exists()

    run.start("--resume", str(closing))
    again = run.expect(StepDone)
    assert again.policy_version == 1
    check_notice(again.weights, mirror)
    assert run.expect(BatchRequest).policy_version == 1
    assert load_model(str(closing / MODEL))[0].config.model_type == "qwen2"

    # What nobody foresaw is said in one line, with the traceback in the log, leaves no weights behind, and is worth a
    # restart: it is not said to be the end of the run.
    broken = msgspec.structs.replace(groups[0], draw_indices=(99,) * 4)
    run.send(Batch((broken,), num_attempts=4, checkpoint=False))
    assert run.expect(PeerWarning).text.startswith("the learner fell over: IndexError")
    status, errors = run.wait()
    assert status == EXIT_CRASH and "Traceback" in errors
    assert not run.weights_dir.exists()


def test_two_ranks_publish_the_weights_of_one(start_run, tmp_path):
    path = str(tiny_model_dir(tmp_path / "start"))
    run = start_run(path, num_processes=2)
    run.start_ranks(2)
    model, _ = load_model(path)
    config = parse_config(msgspec.json.decode((run.run_dir / "config.json").read_bytes()), "test")
    mirror = Learner(model, config.learner, config.sampling.temperature)
    run.expect(StepDone)
    for seed in range(2):
        run.expect(BatchRequest)
        heartbeat = run.expect(Heartbeat)
        assert heartbeat.stats["ranks"] == 2 and heartbeat.stats["startup_s"] > 0
        groups = random_groups(model, seed, drift=0.1)
        run.send(Batch(tuple(groups), num_attempts=16, checkpoint=False))
        done, expected = run.expect(StepDone), mirror.step(groups)
        assert done.metrics["ess"] == pytest.approx(expected.metrics["ess"], abs=1e-6)
        # Adam divides by the root of the second moment: rounding of a gradient near 0 shows in full.
        check_notice(done.weights, mirror, atol=1e-5)
    run.send(Stop())
    status, errors = run.wait()
    assert (status, run.others[0].wait(DEADLINE_S)) == (0, 0), errors
    assert not run.weights_dir.exists()


def test_terminated_while_waiting_gives_shared_memory_back(start_run, tmp_path):
    run = start_run(str(tiny_model_dir(tmp_path / "start")))
    run.start()
    run.expect(StepDone)
    run.expect(BatchRequest)
    assert run.process is not None
    run.process.terminate()
    run.wait()
    assert not run.weights_dir.exists()


def test_a_model_that_is_not_there_is_told_in_one_line(start_run, tmp_path):
    run = start_run(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        main([str(run.run_dir)])
    reason = run.expect(PeerFailed).reason
    assert "nowhere" in reason and "\n" not in reason


def test_a_torn_checkpoint_fails_before_anything_is_published(start_run, tmp_path):
    run = start_run(str(tiny_model_dir(tmp_path / "start")))
    (tmp_path / "torn").mkdir()
    with pytest.raises(WeightError, match="unfinished"):
        main([str(run.run_dir), "--resume", str(tmp_path / "torn")])
    assert "unfinished" in run.expect(PeerFailed).reason
    assert not run.weights_dir.exists()
