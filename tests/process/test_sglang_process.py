"""Processes that the SGLang engine starts and ends; a fake server stands in for SGLang itself."""

import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

import fake_sglang
import pytest
import torch
from fake_sglang import LOGPROB, segments_of
from sglang_bench import servers_of
from tiny_models import save_model_dir, tiny_model, work

from pipeline.config import EnginesConfig
from pipeline.engines.sglang import engine as engine_module
from pipeline.engines.sglang.engine import SGLangEngine
from pipeline.engines.sglang.server import OwnedServer
from pipeline.errors import EngineError
from pipeline.messages import Rollout
from pipeline.tokenization import PromptCodec
from pipeline.weights import WeightPublisher

torch.set_num_threads(1)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where the engine makes its temporary directories."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(engine_module, "BACKOFF_S", (0.0,))
    return directory


class World:
    def __init__(self, directory: Path):
        self.model_dir = save_model_dir(directory / "model", "qwen2")
        self.publisher = WeightPublisher(directory / "weights")
        python = directory / "python"  # called with the launcher and the server's flags
        python.write_text(f'#!/bin/sh\nshift\nexec {shlex.join([sys.executable, fake_sglang.__file__])} "$@"\n')
        python.chmod(0o755)
        config = EnginesConfig(kind="sglang", slots=4, push="disk", hang_s=6.0, python=str(python))
        server = OwnedServer(config, str(self.model_dir), 0, seed=1)
        self.engine = SGLangEngine(config, PromptCodec(self.model_dir), server, "engine-0")

    def load(self, version):
        state = tiny_model("qwen2", version).state_dict()
        notice = self.publisher.publish(state, version, self.model_dir, [3, 4, 5], [LOGPROB, LOGPROB])
        assert self.engine.load_weights(notice).is_right

    def rollouts(self, first):
        self.engine.submit([work(first + i, "ab") for i in range(6)])
        ended = []
        while len(ended) < 6:
            ended += self.engine.step()
        assert all(isinstance(e, Rollout) for e in ended)
        return sorted(e.attempt_id for e in ended)


@pytest.fixture
def world(tmp_path, scratch):
    made = World(tmp_path)
    yield made
    made.engine.close()
    made.publisher.close()
    assert servers_of(made.model_dir) == []
    assert list(scratch.iterdir()) == []
    assert segments_of(made.model_dir) == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_is_replaced(world, signum):
    world.load(0)
    assert world.rollouts(0) == list(range(6))
    (before,) = servers_of(world.model_dir)
    os.kill(before, signum)
    world.engine.submit([work(10 + i, "ab") for i in range(6)])
    with pytest.raises(EngineError) as raised:
        while True:
            assert world.engine.step() == []
    assert raised.value.retryable
    assert world.engine.num_in_flight == 0
    world.load(1)
    assert world.rollouts(20) == list(range(20, 26))
    (after,) = servers_of(world.model_dir)
    assert after != before


def test_a_server_that_cannot_start_ends_the_engine_with_its_last_words(world, monkeypatch):
    monkeypatch.setattr(engine_module, "MAX_STARTS", 2)
    (world.model_dir / "faults.json").write_text(json.dumps({"exit": "no memory"}))
    with pytest.raises(EngineError, match=r"2 starts in a row .* exited with 3 .RuntimeError: no memory") as raised:
        world.load(0)
    assert not raised.value.retryable
