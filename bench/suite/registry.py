"""The benchmarks that `ngu bench` knows. Nothing of a benchmark is imported before it is asked for."""

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import msgspec

from bench.suite.base import Benchmark
from pipeline.config import apply_override
from pipeline.config_errors import explain
from pipeline.errors import ConfigError


class Entry(NamedTuple):
    """Where the class is, as module:class, and what it measures, in a sentence."""

    place: str
    sentence: str


BENCHMARKS = {
    "coordinator": Entry(
        "bench.suite.coordinator:CoordinatorBench", "attempts a second through the coordinator's loop"
    ),
    "engine": Entry(
        "bench.suite.engine:EngineBench", "tokens a second of the engines, against generate, SGLang and the bound"
    ),
    "fits": Entry("bench.suite.fits:FitsBench", "seconds of the scaling-law fits with many points and draws"),
    "e2e": Entry(
        "bench.suite.e2e.bench:E2EBench", "whole runs of the built-in job against TRL's, and ours synchronous"
    ),
    "transport": Entry(
        "bench.suite.transport:TransportBench",
        "rollouts a second between two processes, against raw sockets and other queues",
    ),
    "weights": Entry(
        "bench.suite.weights:WeightsBench", "from new weights to an engine that has them: time, stall, what is lost"
    ),
    "learner": Entry("bench.suite.learner:LearnerBench", "an optimizer step, by how its rollouts are cut, against TRL"),
    "ledger": Entry("bench.suite.ledger:LedgerBench", "attempts a second into the ledger, and how long a commit takes"),
    "hosts": Entry(
        "bench.suite.hosts:HostsBench", "64 simulated hosts of 8 engines: lag, idle, versions apart, coordinator"
    ),
    "overlap": Entry("bench.suite.overlap:OverlapBench", "sync, one step off and in flight on 8 to 128 simulated GPUs"),
    "samplers": Entry("bench.suite.samplers:SamplersBench", "decisions a second of a sampler, by number of problems"),
    "verifiers": Entry("bench.suite.verifiers:VerifiersBench", "verifications a second against math-verify in a loop"),
}


def make_benchmarks(names: Sequence[str], settings: Sequence[str]) -> dict[str, Benchmark]:
    """The named benchmarks; a setting goes to each of them that has the parameter.

    Raises ConfigError for an unknown name, parameter or value.
    """
    kinds = {name: _kind(name) for name in names}
    parameters = {name: [f.name for f in msgspec.structs.fields(kind)] for name, kind in kinds.items()}
    for setting in settings:
        key = setting.partition("=")[0].partition(".")[0].strip()
        if not any(key in known for known in parameters.values()):
            known = "; ".join(f"{name}: {', '.join(of) or 'none'}" for name, of in parameters.items())
            raise ConfigError(f"{setting!r}: no such parameter ({known})")
    return {name: _make(name, kind, settings) for name, kind in kinds.items()}


def _kind(name: str) -> type[Benchmark]:
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(BENCHMARKS)}"
        raise ConfigError(f"no benchmark {name!r}; {hint}")
    module, _, attribute = BENCHMARKS[name].place.partition(":")
    return getattr(import_module(module), attribute)


def _make(name: str, kind: type[Benchmark], settings: Sequence[str]) -> Benchmark:
    raw = msgspec.to_builtins(kind())
    for setting in settings:
        if setting.partition("=")[0].partition(".")[0].strip() in raw:
            apply_override(raw, setting)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{name}: {explain(raw, str(e), kind)}") from None
