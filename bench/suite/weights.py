"""From new weights at the learner to an engine that has them: how long it takes and for how long it stalls.

Published and loaded in one process, so that the seconds of both add up without a socket between them; in a run they
are two processes. The engine has requests in flight, as in a run.

"Loaded" is when the engine's own copy is whole and checked against the announced bytes. Then a canary is scored, which
is arithmetic and no transfer: its time is a row of its own, and part of an embedded engine's stall.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.sglang import start_sglang
from learner.evaluation.generate import SHARED_MEMORY
from learner.model import canary_batch, completion_logprobs, export_model_dir, load_model
from pipeline.config import EnginesConfig
from pipeline.engines.base import Engine
from pipeline.engines.registry import make_engine
from pipeline.messages import Rollout, SamplingParams, WeightsNotice, Work
from pipeline.sections import PositiveInt
from pipeline.tokenization import PromptCodec
from pipeline.weights import NUM_FILES, WeightPublisher
from samplers.base import Problem

SLOTS = 64
STEPS_BETWEEN = 8  # decode steps before and after a load; their median is what a stall is compared with
MEMCPYS = 3.0  # publish to load, at most so many times memcpy of the same bytes, where bytes are what counts
MEMCPY = "memcpy"


class WeightsBench(Benchmark, frozen=True):
    """The built-in model, and one of `large_mb` megabytes in float32 with the same vocabulary."""

    large_mb: PositiveInt = 200
    repeats: PositiveInt = 9

    def run(self, say: Say) -> list[Row]:
        torch.set_num_threads(1)
        builtin, tokenizer = load_model("builtin")
        rows = []
        large = Qwen2ForCausalLM(_large(builtin.config, self.large_mb)).eval()
        for model, is_large in ((builtin, False), (large, True)):
            with tempfile.TemporaryDirectory(prefix="ngu-bench-", dir=SHARED_MEMORY) as scratch, ExitStack() as stack:
                export_model_dir(model, tokenizer, Path(scratch) / "model")
                source = _Source(model, Path(scratch), stack)
                config = EnginesConfig(kind="embedded", slots=SLOTS)
                sides = {}
                for name, publisher in (("shared memory", source.shared), ("disk", source.disk)):
                    # An engine of its own, which keeps the files of one publisher mapped, as in a run.
                    engine = stack.enter_context(closing(make_engine(config, str(source.model_dir), 0, "auto")))
                    sides[name] = _Side(source, publisher, engine)
                rows += _measure(sides, self.repeats, is_embedded=True, is_large=is_large)
                server = start_sglang(source.model_dir, SLOTS, say)
                if server is None:
                    continue
                stack.callback(server.close)
                for push in ("gloo", "disk"):
                    with server.engine(PromptCodec(source.model_dir), push) as engine:
                        sides = {f"SGLang by {push}": _Side(source, source.shared, engine)}
                        rows += _measure(sides, self.repeats, is_embedded=False, is_large=is_large)
        return rows


def _large(like: PretrainedConfig, megabytes: int) -> Qwen2Config:
    """A Qwen2 model of that many megabytes: 12 layers, as wide as it takes."""
    layers = 12
    # Queries and outputs 2h², keys and values h²/2 with a quarter of the heads, feed-forward 12h².
    hidden = max(64, round((megabytes * 1e6 / 4 / layers / 14.5) ** 0.5 / 64) * 64)
    heads = hidden // 64
    return Qwen2Config(**like.to_dict() | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": math.gcd(heads, max(1, heads // 4)),
        "head_dim": 64,
        "layer_types": None,
    })  # fmt: skip


class _Source:
    """A model's weights, and the ways in which they get to an engine."""

    def __init__(self, model: PreTrainedModel, scratch: Path, stack: ExitStack):
        self.model_dir = scratch / "model"
        self._state = model.state_dict()
        ids, batch = canary_batch(model)
        with torch.no_grad():
            logprobs, _ = completion_logprobs(model, batch, temperature=1.0)
        self._canary = ids.numpy(), logprobs.numpy()
        self._num_published = 0
        disk = Path(tempfile.mkdtemp(prefix="ngu-bench-"))
        stack.callback(shutil.rmtree, disk, ignore_errors=True)
        self.shared = WeightPublisher(scratch / "weights")
        self.disk = WeightPublisher(disk / "weights")
        for publisher in (self.shared, self.disk):
            stack.callback(publisher.close)

    def publish(self, publisher: WeightPublisher) -> WeightsNotice:
        self._num_published += 1
        return publisher.publish(self._state, self._num_published, self.model_dir, *self._canary)


class _Side:
    """One way to an engine, and what each transfer cost, once its files are there and mapped."""

    def __init__(self, source: _Source, publisher: WeightPublisher, engine: Engine):
        self._source, self._publisher = source, publisher
        notice = source.publish(publisher)
        engine.load_weights(notice)
        self.num_bytes = notice.num_bytes
        self.busy = _Busy(engine)
        self.publish_s: list[float] = []
        self.stall_s: list[float] = []
        self.canary_s: list[float] = []
        self.step_s: list[float] = []
        for _ in range(NUM_FILES):
            self.transfer()

    def transfer(self) -> float:
        """Seconds from publish to loaded."""
        started = time.perf_counter()
        notice = self._source.publish(self._publisher)
        published = time.perf_counter()
        report = self.busy.engine.load_weights(notice)
        ended = time.perf_counter()
        assert report.is_right
        self.publish_s.append(published - started)
        self.stall_s.append(report.stall_s)
        self.canary_s.append(report.canary_s)
        self.step_s.append(self.busy.step_s())
        return ended - started - report.canary_s


def _measure(sides: dict[str, _Side], repeats: int, *, is_embedded: bool, is_large: bool) -> list[Row]:
    num_bytes = next(iter(sides.values())).num_bytes
    transfers = {name: side.transfer for name, side in sides.items()}
    found = interleaved(transfers | {MEMCPY: _memcpy(num_bytes)}, repeats)
    at = f"{num_bytes / 1e6:.1f} MB"
    rows = [figure(f"{at}, {MEMCPY}", "ms", [1e3 * s for s in found[MEMCPY]])] if is_embedded else []
    for name, side in sides.items():
        aim = MEMCPYS if is_large and name == "shared memory" else None
        rows += _rows(f"{at}, {name}", side, found[name], found[MEMCPY], aim, is_embedded)
    num_lost = sum(side.busy.num_lost() for side in sides.values())
    whose = at if is_embedded else f"{at}, {', '.join(sides)}"
    return [*rows, figure(f"{whose}: requests lost over all loads", "requests", [num_lost], at_most=0.0)]


def _rows(
    what: str, side: _Side, loaded_s: list[float], memcpy_s: list[float], aim: float | None, is_embedded: bool
) -> list[Row]:
    # Those before have warmed up, and are in no figure.
    publish_s, stall_s, canary_s, step_s = (
        s[-len(loaded_s) :] for s in (side.publish_s, side.stall_s, side.canary_s, side.step_s)
    )
    rows = [
        figure(f"{what}: publish", "ms", [1e3 * s for s in publish_s]),
        figure(f"{what}: publish to loaded", "ms", [1e3 * s for s in loaded_s]),
        figure(f"{what}: canary", "ms", [1e3 * s for s in canary_s]),
        figure(f"{what}: engine stalls", "ms", [1e3 * s for s in stall_s]),
        ratio(f"{what}: publish to loaded, against {MEMCPY}", loaded_s, memcpy_s, at_most=aim),
    ]
    if is_embedded:  # the steps of a server are not seen from here
        rows.append(ratio(f"{what}: stall, against a decode step of {SLOTS}", stall_s, step_s, at_most=1.0))
    return rows


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
    """Keeps every slot of an engine that has weights busy, and counts what comes back."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._num_submitted = self._num_ended = 0
        self._fill()
        self.step_s()

    def step_s(self) -> float:
        """The median of some decode steps."""
        seconds = []
        for _ in range(STEPS_BETWEEN):
            self._fill()
            started = time.perf_counter()
            ended = self.engine.step()
            seconds.append(time.perf_counter() - started)
            self._num_ended += sum(isinstance(e, Rollout) for e in ended)
        return median(seconds)

    def num_lost(self) -> int:
        """Requests that never came back, once all have had the time."""
        while self.engine.num_in_flight:
            self._num_ended += sum(isinstance(e, Rollout) for e in self.engine.step())
        return self._num_submitted - self._num_ended

    def _fill(self) -> None:
        new = range(self._num_submitted, self._num_submitted + SLOTS - self.engine.num_in_flight)
        prompts = (f"Compute {100 + i % 900}+{200 + i % 700}.\n" for i in new)
        sampling = SamplingParams(1.0, 70)
        self.engine.submit([Work(i, i, 0, Problem("", "", p, ""), sampling) for i, p in zip(new, prompts, strict=True)])
        self._num_submitted += len(new)
