"""A real engine process on a real socket: weights arrive while it generates."""

import os
import secrets
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import kept_cache_logprobs, publish, save_model_dir, tiny_model, work

from pipeline.channels import ENDPOINT, RouterSocket
from pipeline.config import Config, EnginesConfig, dump_config
from pipeline.messages import (
    Cancel,
    Heartbeat,
    Hello,
    NewWeights,
    Rollouts,
    Stop,
    WeightsLoaded,
    WeightsRefused,
    WorkItems,
)
from pipeline.weights import WeightPublisher

torch.set_num_threads(1)
DEADLINE_S = 90.0


class Coordinator:
    """The test's end of the socket; keeps everything that arrives."""

    def __init__(self):
        self.socket = RouterSocket(ENDPOINT)
        self.received = []

    def wait_for(self, kind, count: int = 1):
        """The messages of `kind` so far, once there are `count`."""
        deadline = time.monotonic() + DEADLINE_S
        while len(found := [m for m in self.received if isinstance(m, kind)]) < count:
            assert time.monotonic() < deadline, f"{count} {kind.__name__} wanted, got {self.received}"
            self.received += [message for _, message in self.socket.receive(0.1)]
        return found

    def rollouts(self):
        return [r for m in self.received if isinstance(m, Rollouts) for r in m.rollouts]


@pytest.fixture
def coordinator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ipc").mkdir()
    made = Coordinator()
    yield made
    made.socket.close()


@pytest.fixture
def worker(coordinator, tmp_path):
    config = Config(engines=EnginesConfig(kind="embedded", slots=4))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(dump_config(config)))
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.worker", str(tmp_path), "--name", "engine-0"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


@pytest.fixture
def publisher(tmp_path):
    made = WeightPublisher(tmp_path / f"weights-{secrets.token_hex(4)}")
    yield made
    made.close()


def test_new_weights_take_effect_between_two_tokens_and_nothing_is_lost(coordinator, worker, publisher, tmp_path):
    model_dir = save_model_dir(tmp_path / "model", "qwen2", has_eos=False)
    versions = {v: tiny_model("qwen2", seed=v) for v in range(8)}
    (hello,) = coordinator.wait_for(Hello)
    assert (hello.role, hello.name, hello.slots, hello.pid) == ("engine", "engine-0", 4, worker.pid)

    def load(version: int) -> None:
        notice = publish(publisher, versions[version], version, model_dir)
        assert coordinator.socket.send("engine-0", NewWeights(notice))
        loaded = coordinator.wait_for(WeightsLoaded, version + 1)
        assert [m.policy_version for m in loaded] == list(range(version + 1))
        assert loaded[-1].canary_error < 1e-4

    load(0)
    items = tuple(work(i, "abcdefg"[: 1 + i % 7], max_new_tokens=50) for i in range(24))
    assert coordinator.socket.send("engine-0", WorkItems(items))
    assert coordinator.socket.send("engine-0", Cancel((23,)))
    for version in list(versions)[1:]:
        load(version)
    while len(coordinator.rollouts()) < 23:
        coordinator.wait_for(Rollouts, 1 + sum(isinstance(m, Rollouts) for m in coordinator.received))
    rollouts = coordinator.rollouts()
    assert sorted(r.attempt_id for r in rollouts) == list(range(23))
    spanning = [r for r in rollouts if len(r.version_spans) >= 2]
    assert spanning
    for rollout in spanning[:6]:
        rollout.check()
        np.testing.assert_allclose(
            rollout.logprob_array(), kept_cache_logprobs(versions, rollout, 1.0), atol=1e-4, rtol=0
        )
    coordinator.wait_for(Heartbeat)
    assert coordinator.socket.send("engine-0", Stop())
    assert worker.wait(DEADLINE_S) == 0


def test_torn_weights_are_refused_and_the_version_before_serves_until_they_come_whole(
    coordinator, worker, publisher, tmp_path
):
    model_dir = save_model_dir(tmp_path / "model", "qwen2", has_eos=False)
    versions = {v: tiny_model("qwen2", seed=v) for v in range(2)}
    coordinator.wait_for(Hello)
    assert coordinator.socket.send("engine-0", NewWeights(publish(publisher, versions[0], 0, model_dir)))
    coordinator.wait_for(WeightsLoaded)
    torn = publish(publisher, versions[1], 1, model_dir)
    os.truncate(torn.path, torn.num_bytes // 2)
    assert coordinator.socket.send("engine-0", WorkItems((work(0, "ab", max_new_tokens=50),)))
    assert coordinator.socket.send("engine-0", NewWeights(torn))
    (refused,) = coordinator.wait_for(WeightsRefused)
    assert refused.policy_version == 1 and torn.path in refused.reason
    assert coordinator.socket.send("engine-0", WorkItems((work(1, "abc", max_new_tokens=50),)))
    coordinator.wait_for(Rollouts, 2)
    for rollout in coordinator.rollouts():
        assert {span.policy_version for span in rollout.version_spans} == {0}
        np.testing.assert_allclose(rollout.logprob_array(), kept_cache_logprobs(versions, rollout, 1.0), atol=1e-4)
    assert coordinator.socket.send("engine-0", NewWeights(publish(publisher, versions[1], 1, model_dir)))
    assert [m.policy_version for m in coordinator.wait_for(WeightsLoaded, 2)] == [0, 1]
    assert coordinator.socket.send("engine-0", Stop())
    _, stderr = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 0
    assert stderr.strip().splitlines() == [f"engine-0 refused weights: {refused.reason}"]
