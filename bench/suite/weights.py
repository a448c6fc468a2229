"""From new weights at the learner to an engine that has them: how long it takes and for how long it stalls.

Published and loaded in one process, so that the seconds of both add up without a socket between them; in a run they
are two processes. The engine has requests in flight, as in a run.

What an update costs in tokens are two things: those that an engine computes twice or for nothing, which none should,
and those that it could have decoded while it stalled.

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

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.busy import SLOTS, Busy, own_count, server_count
from bench.suite.sglang import METRICS, start_sglang
from learner.evaluation.generate import SHARED_MEMORY
from learner.model import canary_batch, completion_logprobs, export_model_dir, load_model
from pipeline.config import EnginesConfig
from pipeline.engines.registry import make_engine
from pipeline.messages import WeightsNotice
from pipeline.sections import PositiveInt
from pipeline.tokenization import PromptCodec
from pipeline.weights import NUM_FILES, WeightPublisher

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
                    sides[name] = _Side(source, publisher, Busy(engine, source.publish(publisher), own_count(engine)))
                rows += _measure(sides, self.repeats, is_embedded=True, is_large=is_large)
                server = start_sglang(source.model_dir, SLOTS, say, METRICS)
                if server is None:
                    continue
                stack.callback(server.close)
                for push in ("gloo", "disk"):
                    with server.engine(PromptCodec(source.model_dir), push) as engine:
                        busy = Busy(engine, source.publish(source.shared), server_count(server))
                        sides = {f"SGLang by {push}": _Side(source, source.shared, busy)}
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

    def __init__(self, source: _Source, publisher: WeightPublisher, busy: Busy):
        self._source, self._publisher = source, publisher
        self.busy = busy
        self.publish_s: list[float] = []
        self.stall_s: list[float] = []
        self.canary_s: list[float] = []
        self.step_s: list[float] = []
        self.tokens_per_s: list[float] = []
        for _ in range(NUM_FILES):
            self.transfer()

    def transfer(self) -> float:
        """Seconds from publish to loaded."""
        step_s, tokens_per_s = self.busy.pace()
        started = time.perf_counter()
        notice = self._source.publish(self._publisher)
        published = time.perf_counter()
        report = self.busy.load(notice)
        ended = time.perf_counter()
        self.publish_s.append(published - started)
        self.stall_s.append(report.stall_s)
        self.canary_s.append(report.canary_s)
        self.step_s.append(step_s)
        self.tokens_per_s.append(tokens_per_s)
        return ended - started - report.canary_s


def _measure(sides: dict[str, _Side], repeats: int, *, is_embedded: bool, is_large: bool) -> list[Row]:
    num_bytes = next(iter(sides.values())).busy.num_bytes
    transfers = {name: side.transfer for name, side in sides.items()}
    found = interleaved(transfers | {MEMCPY: _memcpy(num_bytes)}, repeats)
    at = f"{num_bytes / 1e6:.1f} MB"
    rows = [figure(f"{at}, {MEMCPY}", "ms", [1e3 * s for s in found[MEMCPY]])] if is_embedded else []
    for name, side in sides.items():
        aim = MEMCPYS if is_large and name == "shared memory" else None
        rows += _rows(f"{at}, {name}", side, found[name], found[MEMCPY], aim, is_embedded)
    whose = at if is_embedded else f"{at}, {', '.join(sides)}"
    losses = [side.busy.losses() for side in sides.values()]
    wasted = "thrown away" if is_embedded else "thrown away or read again"
    return [
        *rows,
        figure(f"{whose}: requests lost over all loads", "requests", [sum(x.requests for x in losses)], at_most=0.0),
        figure(f"{whose}: tokens {wasted} over all loads", "tokens", [sum(x.tokens for x in losses)], at_most=0.0),
    ]


def _rows(
    what: str, side: _Side, loaded_s: list[float], memcpy_s: list[float], aim: float | None, is_embedded: bool
) -> list[Row]:
    # Those before have warmed up, and are in no figure.
    publish_s, stall_s, canary_s, step_s, tokens_per_s = (
        s[-len(loaded_s) :] for s in (side.publish_s, side.stall_s, side.canary_s, side.step_s, side.tokens_per_s)
    )
    not_decoded = [stall * rate for stall, rate in zip(stall_s, tokens_per_s, strict=True)]
    rows = [
        figure(f"{what}: publish", "ms", [1e3 * s for s in publish_s]),
        figure(f"{what}: publish to loaded", "ms", [1e3 * s for s in loaded_s]),
        figure(f"{what}: canary", "ms", [1e3 * s for s in canary_s]),
        figure(f"{what}: engine stalls", "ms", [1e3 * s for s in stall_s]),
        figure(f"{what}: decoded before the stall", "tokens/s", tokens_per_s),
        figure(f"{what}: not decoded for the stall", "tokens", not_decoded),
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
