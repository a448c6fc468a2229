"""Servers that the engine starts itself: from nothing to rollouts, and again after a kill."""

import os
import signal

import numpy as np
import pytest
from sglang_bench import SGLangBench, own_logprobs, servers_of
from tiny_models import save_model_dir, tiny_model, work

from pipeline.config import EnginesConfig
from pipeline.engines.sglang.server import shared_memory_of
from pipeline.errors import EngineError

# One process of pytest-xdist for all tests of the real server; it starts within half a minute on a quiet machine.
pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]


@pytest.fixture
def owned(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    model_dir = save_model_dir(tmp_path / "model", "qwen3", max_positions=128)
    made = SGLangBench(tmp_path, model_dir, "qwen3", EnginesConfig(kind="sglang", slots=8, hang_s=100.0))
    yield made
    made.close()


def check_rollouts(bench: SGLangBench, version: int) -> None:
    bench.load(version)
    bench.engine.submit([work(100 * version + i, "abcd"[: 1 + i % 4], max_new_tokens=40) for i in range(12)])
    ended = bench.step_until(12)
    assert "stop" in {r.finish_reason for r in ended}
    for rollout in ended:
        rollout.check()
        ids = rollout.completion_array().tolist()
        assert 1 not in ids[:-1]
        assert (ids[-1] == 1) == (rollout.finish_reason == "stop")
        assert "<eos>" not in rollout.text
        np.testing.assert_allclose(
            rollout.logprob_array(), own_logprobs(tiny_model("qwen3", version), rollout), atol=1e-4
        )


def test_a_killed_server_is_started_again_and_leaves_nothing_behind(owned, tmp_path):
    check_rollouts(owned, 0)
    owned.engine.submit([work(i, "ab", max_new_tokens=100) for i in range(8)])
    (pid,) = servers_of(owned.model_dir)
    segments = shared_memory_of(pid)
    assert segments
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="killed by signal 9") as raised:
        while True:
            owned.engine.step()
    assert raised.value.retryable
    assert owned.engine.num_in_flight == 0
    check_rollouts(owned, 1)
    (pid,) = servers_of(owned.model_dir)
    segments |= shared_memory_of(pid)
    owned.engine.close()
    assert servers_of(owned.model_dir) == []
    assert not any(segment.exists() for segment in segments)  # other tests have servers too
    assert (tmp_path / "logs" / "engine-0-server.log").stat().st_size
