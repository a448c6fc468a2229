"""The verifier role as the supervisor starts it: jobs in, verdicts out, heartbeats, a clean stop."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.channels import ENDPOINT, RouterSocket
from pipeline.config import Config, VerifierConfig, dump_config
from pipeline.messages import Heartbeat, Hello, Identify, Judgements, Stop, VerifyJob, VerifyJobs
from samplers.base import Problem


@pytest.fixture
def router(tmp_path: Path, monkeypatch) -> Iterator[RouterSocket]:
    monkeypatch.chdir(tmp_path)  # the endpoint is relative to the run directory
    (tmp_path / "ipc").mkdir()
    socket = RouterSocket(ENDPOINT)
    yield socket
    socket.close()


@pytest.fixture
def role(router: RouterSocket, tmp_path: Path) -> Iterator[subprocess.Popen]:
    config = Config(verifier=VerifierConfig(deadline_s=30.0, extract="boxed"))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(dump_config(config)))
    argv = [sys.executable, "-m", "pipeline.verifiers", str(tmp_path), "--name", "verifier"]
    with subprocess.Popen(argv, cwd=tmp_path) as process:
        yield process
        process.kill()


def receive(router: RouterSocket, kind: type, num: int = 1) -> list[Any]:
    """The first `num` messages of one kind; others are passed over."""
    found: list[Any] = []
    end = time.monotonic() + 90
    while len(found) < num:
        assert time.monotonic() < end, f"no {kind.__name__} came"
        found += [message for _, message in router.receive(0.2) if isinstance(message, kind)]
    return found


def test_a_verifier_serves_until_it_is_stopped(router: RouterSocket, role: subprocess.Popen):
    hello = receive(router, Hello)[0]
    assert (hello.role, hello.name) == ("verifier", "verifier") and hello.slots > 1
    gold = Problem("p", "jsonl", "", "x+1")
    texts = {1: r"\boxed{x+1}", 2: r"\boxed{1+x}", 3: "Answer: x+1", 4: r"\boxed{x}"}
    router.send("verifier", VerifyJobs(tuple(VerifyJob(i, gold, text, False) for i, text in texts.items())))
    outcomes: dict[int, str] = {}
    while len(outcomes) < 4:
        for judgements in receive(router, Judgements):
            outcomes |= {j.attempt_id: j.verdict.outcome for j in judgements.judgements}
    assert outcomes == {1: "correct", 2: "correct", 3: "incorrect", 4: "incorrect"}
    while True:
        stats = receive(router, Heartbeat)[0].stats
        if stats["num_correct"] == 2:
            break
    assert (stats["num_incorrect"], stats["num_unknown"], stats["fast_frac"]) == (2, 0, 0.5)

    router.send("verifier", Identify())
    assert receive(router, Hello)[0].boot_id == hello.boot_id
    router.send("verifier", Stop())
    assert role.wait(60) == 0
