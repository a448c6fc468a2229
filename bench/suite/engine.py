"""Tokens a second of the engines, and how far that is from what the core can multiply.

The built-in model answers the built-in job's prompts with exactly `length` tokens each: an end token is only a token
here, so that nobody waits for a straggler. All sides have one thread and are measured in processor seconds, which other
processes do not take (of SGLang those of all its processes); `generate` gets no logprobs to compute and may choose its
batch.
"""

import itertools
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.sglang import family_cpu_s, start_sglang
from learner.model import canary_batch, completion_logprobs, export_model_dir, load_model
from pipeline.config import Config
from pipeline.engines.base import Engine
from pipeline.engines.batching import BatchingEngine
from pipeline.engines.embedded.decoder import EmbeddedDecoder
from pipeline.engines.embedded.shape import ModelShape
from pipeline.engines.transformers_engine import TransformersDecoder
from pipeline.errors import ConfigError
from pipeline.messages import SamplingParams, WeightsNotice, Work
from pipeline.sections import PositiveInt
from pipeline.tasks.registry import make_task
from pipeline.tokenization import PromptCodec
from pipeline.weights import WeightPublisher
from samplers.base import Problem

AGAINST_GENERATE = 1.5
OF_THE_BOUND = 0.3
SLOTS = 64  # those that the targets are about, and of what is measured at one size only
GEMM, STREAM, PRODUCTS = "large products", "memory", "products of a step"
SGLANG = f"SGLang on the CPU, {SLOTS} slots"
UNIT = "tokens/CPU s"
GEMM_SIZE = 1024
STREAM_MB = 64
STEPS = 20  # whose products are timed together
PROMPT_ROOM = 32  # tokens, more than any prompt of the job has

Side = Callable[[], float]


class EngineBench(Benchmark, frozen=True):
    """`slots`: of the embedded engine. `batches`: of `generate`, of which the best counts at each length."""

    slots: tuple[PositiveInt, ...] = (1, 16, 64, 256)
    lengths: tuple[PositiveInt, ...] = (64, 256)
    batches: tuple[PositiveInt, ...] = (32, 64, 128, 256)
    repeats: PositiveInt = 5

    def run(self, say: Say) -> list[Row]:
        torch.set_num_threads(1)
        model, tokenizer = load_model("builtin")
        assert model.generation_config is not None
        model.generation_config.eos_token_id = None  # `generate` fills up what its own settings leave as None
        shape = ModelShape.of(model.config)
        if max(self.lengths) + 32 > shape.max_tokens:
            raise ConfigError(
                f"engine: the model has {shape.max_tokens} positions; give lengths to {shape.max_tokens - 32}"
            )
        rows = []
        with tempfile.TemporaryDirectory(prefix="ngu-bench-") as scratch, ExitStack() as stack:
            export_model_dir(model, tokenizer, Path(scratch) / "model")
            publisher = WeightPublisher(Path(scratch) / "weights")
            stack.callback(publisher.close)
            served = _Served(model, Path(scratch) / "model", _notice(model, publisher, Path(scratch) / "model"))
            sglang = _sglang(served, stack, say)
            for length in self.lengths:
                rows += self._at(length, served, shape, sglang, say)
        return rows

    def _at(self, length: int, served: "_Served", shape: ModelShape, sglang: Engine | None, say: Say) -> list[Row]:
        embedded = {_embedded(n): _engine(served, EmbeddedDecoder, n, length) for n in self.slots}
        waves = {f"transformers engine, {SLOTS} slots": _engine(served, _transformers, SLOTS, length)}
        generated = {
            cache: {f"generate, {cache} cache, batch {n}": _generate(served, cache, n, length) for n in self.batches}
            for cache in ("dynamic", "static")
        }
        others = waves | _library_batching(served, length, say)
        if sglang is not None:
            others[SGLANG] = _rounds(sglang, served, SLOTS, length, family_cpu_s)
        sides = embedded | others | generated["dynamic"] | generated["static"]
        found = interleaved(sides | {GEMM: _gemm, STREAM: _stream, PRODUCTS: _products(shape)}, self.repeats)
        best = [max(of_cache, key=lambda name: median(found[name])) for of_cache in generated.values()]
        at = f"{length} tokens"
        rows = [figure(f"{at}, {name}", UNIT, found[name]) for name in (*embedded, *others, *best)]
        fastest = max(best, key=lambda name: median(found[name]))
        own = max(embedded, key=lambda name: median(found[name]))
        rows.append(ratio(f"{at}, embedded against generate, each at its best", found[own], found[fastest]))
        if SLOTS in self.slots:
            ours = found[_embedded(SLOTS)]
            context = served.num_prompt_tokens + length / 2
            peaks = list(zip(found[GEMM], found[STREAM], strict=True))
            bound = [_bound(shape, context, s, *peak) for s, peak in zip(found[PRODUCTS], peaks, strict=True)]
            ideal = [_ideal_bound(shape, context, *peak) for peak in peaks]
            rows += [
                ratio(f"{at}, {_embedded(SLOTS)}, against {fastest}", ours, found[fastest], at_least=AGAINST_GENERATE),
                figure(f"{at}, bound at {SLOTS} slots", UNIT, bound),
                ratio(f"{at}, {_embedded(SLOTS)}, of that bound", ours, bound, at_least=OF_THE_BOUND),
                figure(f"{at}, bound at {SLOTS} slots if every product were a large one", UNIT, ideal),
                ratio(f"{at}, {_embedded(SLOTS)}, of the bound of large products", ours, ideal),
            ]
            if sglang is not None:
                rows.append(ratio(f"{at}, {_embedded(SLOTS)}, against {SGLANG}", ours, found[SGLANG]))
        return rows


def _embedded(slots: int) -> str:
    return f"embedded, {slots} slots"


# --- sides ---


class _Endless(PromptCodec):
    """No token ends a completion, so that all have the same length."""

    def __init__(self, model_dir: Path):
        super().__init__(model_dir)
        self.eos_ids = frozenset()


class _Served:
    """The model, as files and weights for our engines and as an object for the library's."""

    def __init__(self, model: PreTrainedModel, model_dir: Path, notice: WeightsNotice):
        self.model, self.model_dir, self.notice = model, model_dir, notice
        self.codec = _Endless(model_dir)
        task = make_task(Config().task, 0)
        self.prompts = [p.prompt for p in itertools.islice(iter(task.next_problem, None), max(512, SLOTS))]
        self.num_prompt_tokens = float(np.mean([len(self.codec.encode(p)) for p in self.prompts]))


def _notice(model: PreTrainedModel, publisher: WeightPublisher, model_dir: Path) -> WeightsNotice:
    ids, batch = canary_batch(model)
    with torch.no_grad():
        logprobs, _ = completion_logprobs(model, batch, temperature=1.0)
    return publisher.publish(model.state_dict(), 0, model_dir, ids.numpy(), logprobs.numpy())


def _transformers(config: Any, slots: int) -> TransformersDecoder:
    return TransformersDecoder(config, slots, torch.device("cpu"))


def _engine(served: _Served, decoder: Callable[..., Any], slots: int, length: int) -> Side:
    engine = BatchingEngine(decoder(served.model.config, slots), served.codec, slots, 0, "bench")
    engine.load_weights(served.notice)
    return _rounds(engine, served, slots, length, time.process_time)


def _sglang(served: _Served, stack: ExitStack, say: Say) -> Engine | None:
    server = start_sglang(served.model_dir, SLOTS, say)
    if server is None:
        return None
    stack.callback(server.close)
    engine = stack.enter_context(server.engine(served.codec, "gloo"))
    engine.load_weights(served.notice)
    return engine


def _rounds(engine: Engine, served: _Served, slots: int, length: int, clock: Callable[[], float]) -> Side:
    """All slots start and end together."""
    numbers = itertools.count()
    sampling = SamplingParams(1.0, length)

    def once() -> float:
        prompts = served.prompts[:slots]
        ids = list(itertools.islice(numbers, slots))
        work = [Work(i, i, 0, Problem("", "", p, ""), sampling) for i, p in zip(ids, itertools.cycle(prompts))]
        started = clock()
        engine.submit(work)
        while engine.num_in_flight:
            engine.step()
        return slots * length / (clock() - started)

    return once


def _settings(length: int, cache: str | None) -> GenerationConfig:
    """Plain sampling of `length` tokens. Without compilation, which takes minutes and runs slower on a CPU."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )


def _generate(served: _Served, cache: str, batch: int, length: int) -> Side:
    settings = _settings(length, cache)
    encoded = [served.codec.encode(p) for p in itertools.islice(itertools.cycle(served.prompts), batch)]
    generate: Any = served.model.generate
    longest = max(map(len, encoded))
    ids = torch.tensor([[0] * (longest - len(e)) + e for e in encoded])
    mask = torch.tensor([[0] * (longest - len(e)) + [1] * len(e) for e in encoded])

    def once() -> float:
        started = time.process_time()
        made = generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        assert made.shape == (batch, longest + length), "every row has its length"
        return batch * length / (time.process_time() - started)

    return once


def _library_batching(served: _Served, length: int, say: Say) -> dict[str, Side]:
    """The library's own continuous batching, if it runs on this machine."""
    encoded = [served.codec.encode(p) for p in served.prompts[:SLOTS]]
    settings = _settings(length, None)
    # Left to itself it clears a cache of nine tenths of the memory that is free, call by call.
    cache = ContinuousBatchingConfig(max_batch_tokens=SLOTS * PROMPT_ROOM)
    cache.num_blocks = SLOTS * math.ceil((PROMPT_ROOM + length) / cache.page_size)
    generate: Any = served.model.generate_batch

    def once() -> float:
        started = time.process_time()
        made = generate(encoded, generation_config=settings, continuous_batching_config=cache)
        seconds = time.process_time() - started
        if sum(len(output.generated_tokens) for output in made.values()) != SLOTS * length:
            raise RuntimeError("it returned other tokens than it was asked for")
        return SLOTS * length / seconds

    try:
        once()
    except Exception as e:  # an experimental part of the library, whose failures have no type of their own
        say(f"continuous batching of transformers does not run here: {' '.join(str(e).split())[:200]}")
        return {}
    return {f"continuous batching of transformers, {SLOTS} requests": once}


# --- the bound ---


def _gemm() -> float:
    """Floating-point operations a processor second in a product of large matrices."""
    a, b = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
    started = time.process_time()
    for _ in range(3):
        torch.mm(a, b)
    return 3 * 2 * GEMM_SIZE**3 / (time.process_time() - started)


def _stream() -> float:
    """Bytes a processor second that can be read from memory."""
    source = torch.ones(STREAM_MB << 18)
    started = time.process_time()
    for _ in range(3):
        source.sum()
    return 3 * (STREAM_MB << 20) / (time.process_time() - started)


def _products(shape: ModelShape) -> Side:
    """Processor seconds of one decode step's products with weights, in their shapes and one after the other, so that a
    matrix comes from where it does in an engine: from the cache that the others have left it in.
    """
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [(shape.hidden, width + 2 * kv_width), (width, shape.hidden)]
    mlp = [(shape.hidden, 2 * shape.ff), (shape.ff, shape.hidden)]
    sizes = [*[*attention, *mlp] * shape.num_layers, (shape.hidden, shape.vocab)]
    pairs = [(torch.ones(SLOTS, inputs), torch.ones(inputs, outputs)) for inputs, outputs in sizes]

    def once() -> float:
        started = time.process_time()
        for _ in range(STEPS):
            for rows, matrix in pairs:
                torch.mm(rows, matrix)
        return (time.process_time() - started) / STEPS

    return once


def _bound(shape: ModelShape, context: float, products_s: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Tokens a second if a step were nothing but its products with weights, as measured, and its attention at the speed
    of large products or of memory, whichever is slower. `context`: mean tokens that a row looks back on.
    """
    flops, num_bytes = _attention(shape, context)
    return SLOTS / (products_s + SLOTS * max(flops / flops_per_s, num_bytes / bytes_per_s))


def _ideal_bound(shape: ModelShape, context: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Tokens a second if decoding were nothing but large products, or nothing but reading weights and cache once a
    step, whichever is slower.
    """
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    of_layer = shape.hidden * (2 * width + 2 * kv_width + 3 * shape.ff)
    weights = shape.num_layers * of_layer + shape.vocab * shape.hidden
    flops, num_bytes = _attention(shape, context)
    return min(flops_per_s / (2 * weights + flops), bytes_per_s / (4 * weights / SLOTS + num_bytes))


def _attention(shape: ModelShape, context: float) -> tuple[float, float]:
    """Operations, and bytes of the cache read, of one row's token."""
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return 4 * shape.num_layers * width * context, 4 * 2 * shape.num_layers * kv_width * context
