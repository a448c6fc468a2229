"""From new weights at the learner to an engine that samples from them: how long it takes and for how long it stalls.

Published and loaded in one process, so that the seconds of both add up without a socket between them; in a run they
are two processes. The engine has requests in flight, as in a run.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from learner.evaluation.generate import SHARED_MEMORY
from learner.model import canary_batch, completion_logprobs, export_model_dir, load_model
from pipeline.config import EnginesConfig
from pipeline.engines.base import Engine
from pipeline.engines.registry import make_engine
from pipeline.messages import Rollout, SamplingParams, Work
from pipeline.sections import PositiveInt
from pipeline.weights import WeightPublisher
from samplers.base import Problem

SLOTS = 64
STEPS_BETWEEN = 8  # decode steps before and after a load; their median is what a stall is compared with
MEMCPYS = 3.0  # publish to load, at most so many times memcpy of the same bytes, where bytes are what counts


class WeightsBench(Benchmark, frozen=True):
    """The built-in model, and one of `large_mb` megabytes in float32 with the same vocabulary."""

    large_mb: PositiveInt = 200
    repeats: PositiveInt = 9

    def run(self, say: Say) -> list[Row]:
        torch.set_num_threads(1)
        builtin, tokenizer = load_model("builtin")
        rows = []
        for model, is_large in ((builtin, False), (_large(builtin, self.large_mb), True)):
            with tempfile.TemporaryDirectory(prefix="ngu-bench-", dir=SHARED_MEMORY) as scratch:
                export_model_dir(model, tokenizer, Path(scratch) / "model")
                rows += _measure(model, Path(scratch), is_large, self.repeats)
        return rows


def _large(like: PreTrainedModel, megabytes: int) -> PreTrainedModel:
    """A Qwen2 model of that many megabytes: 12 layers, as wide as it takes."""
    layers = 12
    # Queries and outputs 2h², keys and values h²/2 with a quarter of the heads, feed-forward 12h².
    hidden = max(64, round((megabytes * 1e6 / 4 / layers / 14.5) ** 0.5 / 64) * 64)
    config = Qwen2Config(**like.config.to_dict() | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": 64,
        "layer_types": None,
    })  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def _measure(model: PreTrainedModel, scratch: Path, is_large: bool, repeats: int) -> list[Row]:
    state = model.state_dict()
    ids, batch = canary_batch(model)
    with torch.no_grad():
        logprobs, _ = completion_logprobs(model, batch, temperature=1.0)
    disk = Path(tempfile.mkdtemp(prefix="ngu-bench-"))
    publishers = {"shared memory": WeightPublisher(scratch / "weights"), "disk": WeightPublisher(disk / "weights")}
    config = EnginesConfig(kind="embedded", slots=SLOTS)
    versions = iter(range(1 << 30))

    def publish(publisher: WeightPublisher):
        return publisher.publish(state, next(versions), scratch / "model", ids.numpy(), logprobs.numpy())

    try:
        with closing(make_engine(config, str(scratch / "model"), 0, "auto")) as engine:
            notice = publish(publishers["shared memory"])
            engine.load_weights(notice)
            busy = _Busy(engine)
            parts: dict[str, list[tuple[float, float, float]]] = {name: [] for name in publishers}

            def transfer(name: str) -> Callable[[], float]:
                def once() -> float:
                    started = time.perf_counter()
                    told = publish(publishers[name])
                    published = time.perf_counter()
                    stall_s = engine.load_weights(told).stall_s
                    ended = time.perf_counter()
                    parts[name].append((published - started, stall_s, busy.step_s()))
                    return ended - started

                return once

            sides = {name: transfer(name) for name in publishers} | {"memcpy": _memcpy(notice.num_bytes)}
            found = interleaved(sides, repeats)
            lost = busy.num_lost()
    finally:
        for publisher in publishers.values():
            publisher.close()
        shutil.rmtree(disk, ignore_errors=True)
    return _rows(notice.num_bytes, found, {n: p[1:] for n, p in parts.items()}, lost, is_large)


def _rows(num_bytes: int, found: dict[str, list[float]], parts: dict[str, Any], lost: int, is_large: bool) -> list[Row]:
    at = f"{num_bytes / 1e6:.1f} MB"
    rows = [figure(f"{at}, memcpy", "ms", [1e3 * s for s in found["memcpy"]])]
    for name, timed in parts.items():
        publish_s, stall_s, step_s = zip(*timed, strict=True)
        aim = MEMCPYS if is_large and name == "shared memory" else None
        rows += [
            figure(f"{at}, {name}: publish", "ms", [1e3 * s for s in publish_s]),
            figure(f"{at}, {name}: engine stalls", "ms", [1e3 * s for s in stall_s]),
            figure(f"{at}, {name}: publish to loaded", "ms", [1e3 * s for s in found[name]]),
            ratio(f"{at}, {name}: publish to loaded, against memcpy", found[name], found["memcpy"], at_most=aim),
            ratio(f"{at}, {name}: stall, against a decode step of {SLOTS}", stall_s, step_s, at_most=1.0),
        ]
    return [*rows, figure(f"{at}: requests lost over all loads", "requests", [lost], at_most=0.0)]


def _memcpy(num_bytes: int) -> Callable[[], float]:
    """Between two buffers that are there already, in one thread."""
    source = np.ones(num_bytes, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)

    def once() -> float:
        started = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started

    return once


class _Busy:
    """Keeps every slot of an engine busy, and counts what comes back."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._num_submitted = self._num_ended = 0
        self._fill()
        self.step_s()

    def step_s(self) -> float:
        """The median of some decode steps."""
        seconds = []
        for _ in range(STEPS_BETWEEN):
            self._fill()
            started = time.perf_counter()
            ended = self._engine.step()
            seconds.append(time.perf_counter() - started)
            self._num_ended += sum(isinstance(e, Rollout) for e in ended)
        return float(np.median(seconds))

    def num_lost(self) -> int:
        """Requests that never came back, once all have had the time."""
        while self._engine.num_in_flight:
            self._num_ended += sum(isinstance(e, Rollout) for e in self._engine.step())
        return self._num_submitted - self._num_ended

    def _fill(self) -> None:
        new = range(self._num_submitted, self._num_submitted + SLOTS - self._engine.num_in_flight)
        prompts = (f"Compute {100 + i % 900}+{200 + i % 700}.\n" for i in new)
        sampling = SamplingParams(1.0, 70)
        self._engine.submit(
            [Work(i, i, 0, Problem("", "", p, ""), sampling) for i, p in zip(new, prompts, strict=True)]
        )
        self._num_submitted += len(new)
