"""An SGLang engine with the publisher that feeds it, for tests of the real server."""

import time
from pathlib import Path

import numpy as np
from tiny_models import publish, teacher_forced, tiny_model
from transformers import PreTrainedModel

from pipeline.config import EnginesConfig
from pipeline.engines.base import Engine, LoadReport
from pipeline.engines.registry import make_engine
from pipeline.messages import Rollout, WeightsNotice
from pipeline.weights import WeightPublisher

SLOTS = 16
MAX_POSITIONS = 512
DEADLINE_S = 300


class SGLangBench:
    def __init__(self, directory: Path, model_dir: Path, kind: str, config: EnginesConfig):
        self.kind, self.model_dir = kind, model_dir
        self.publisher = WeightPublisher(directory / "weights")
        self.engine: Engine = make_engine(config, str(model_dir), 7, "auto", "engine-0")

    def notice(self, version: int, seed: int | None = None) -> WeightsNotice:
        """The weights of `tiny_model(kind, seed)`, by default one seed a version."""
        model = tiny_model(self.kind, version if seed is None else seed)
        return publish(self.publisher, model, version, self.model_dir)

    def load(self, version: int, seed: int | None = None) -> LoadReport:
        report = self.engine.load_weights(self.notice(version, seed))
        assert report.policy_version == version
        assert report.canary_error < 1e-4
        return report

    def step_until(self, count: int) -> list[Rollout]:
        """Step until `count` attempts have ended, which are all rollouts."""
        ended = []
        deadline = time.monotonic() + DEADLINE_S
        while len(ended) < count:
            assert time.monotonic() < deadline, f"{len(ended)} of {count}"
            ended += self.engine.step()
        assert all(isinstance(e, Rollout) for e in ended), ended
        return ended

    def close(self) -> None:
        self.engine.close()
        self.publisher.close()


def own_logprobs(model: PreTrainedModel, rollout: Rollout, temperature: float = 1.0) -> np.ndarray:
    """The completion's logprobs under one version throughout, shape [T]."""
    prompt, completion = rollout.prompt_array().tolist(), rollout.completion_array().tolist()
    return teacher_forced(model, prompt + completion, temperature)[len(prompt) - 1 :]


def servers_of(model_dir: Path) -> list[int]:
    """Process ids of servers that were started for a model: of each the first process, whose command names it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"--model-path {model_dir} " in command:
            found.append(int(entry.name))
    return found
