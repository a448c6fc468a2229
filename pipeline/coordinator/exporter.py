"""The figures of a run for Prometheus: `http://ADDRESS:PORT/metrics`, served from a thread of the coordinator.

The loop makes a snapshot once a second and the thread only hands it out, so a scraper never reads what changes under it
and cannot slow the loop down. Names follow Prometheus' conventions: base units, `_total` for what only grows (a
run that goes back to a checkpoint resets it), `_ratio` for shares.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.config import TelemetryConfig
from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.queues import queues
from pipeline.coordinator.records import of_verifiers
from pipeline.errors import ConfigError
from pipeline.ledger import FATES

PERIOD_S = 1.0
_LAG_BUCKET = re.compile(r"num_tokens/lag_(.+)$")


class Exporter(Collector):
    def __init__(self, config: TelemetryConfig):
        """Raises ConfigError when the port cannot be had."""
        self._snapshot: list[Metric] = []
        self._due = 0.0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, thread = start_http_server(config.prometheus_port, config.prometheus_address, registry)
        except OSError as e:
            where = f"{config.prometheus_address}:{config.prometheus_port}"
            raise ConfigError(f"telemetry: cannot serve Prometheus at {where}: {e.strerror}") from None
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def collect(self) -> Iterable[Metric]:
        return self._snapshot

    def update(self, coordinator: Coordinator) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PERIOD_S
            self._snapshot = [*_totals(coordinator), *_now(coordinator), *_last_step(coordinator)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _totals(coordinator: Coordinator) -> list[Metric]:
    tally, ledger = coordinator.tally, coordinator.ledger
    counters = tally.counters
    fates = {fate: ledger.counts[fate] for fate in FATES}
    cpu_s = {role: ms / 1000 for role, ms in _under(counters, "cpu_ms/").items()}
    levels = {(level, kind): n for level, counts in tally.by_level().items() for kind, n in counts.items()}
    return [
        _counter("ngu_rollouts", "Judged training rollouts.", counters["rollouts"]),
        _counter("ngu_tokens", "Tokens of judged training rollouts.", counters["tokens"]),
        _counter("ngu_generated_rollouts", "Rollouts of engines, evaluation too.", counters["generated_rollouts"]),
        _counter("ngu_generated_tokens", "Tokens of engines, evaluation too.", counters["generated_tokens"]),
        _counter("ngu_attempts_launched", "Training attempts launched.", ledger.counts["launched"]),
        _counter("ngu_attempts_ended", "Training attempts by how they ended.", _by("fate", fates)),
        _counter("ngu_rollouts_by_level", "Training rollouts by difficulty.", (("level", "kind"), levels)),
        _counter("ngu_verdicts", "Verdicts by outcome.", _by("outcome", _under(counters, "verdict/"))),
        _counter("ngu_errors", "What went wrong at a boundary.", _by("boundary", _under(counters, "error/"))),
        _counter("ngu_warnings", "Warnings given, repeated ones included.", counters["warnings"]),
        _counter("ngu_weight_loads", "Weights loaded by engines.", counters["weight_loads"]),
        _counter("ngu_training_seconds", "Time spent training.", tally.wall_s),
        _counter("ngu_cpu_seconds", "CPU time by role.", _by("role", cpu_s)),
    ]


def _now(coordinator: Coordinator) -> list[Metric]:
    tally, guard = coordinator.tally, coordinator.flow.starvation.gauges()
    resident, free = (tally.host.get(f"host/{name}") for name in ("resident_bytes", "disk_free_bytes"))
    now = coordinator.clock()
    silence = {name: now - heard for name, heard in coordinator.peers.last_heard.items()}
    engines = {n: s["slots_used"] for n, s in coordinator.peers.stats.items() if "slots_used" in s}
    answers = {
        (name, quantile): said[f"child_{quantile}_ms"] / 1000
        for name, said in of_verifiers(coordinator.peers.stats).items()
        for quantile in ("p50", "p99")
    }
    state = {(coordinator.state, coordinator.mode): 1.0}
    return [
        _gauge("ngu_state", "1 for the state and mode that the run is in.", (("state", "mode"), state)),
        _gauge("ngu_policy_version", "Optimizer steps taken.", coordinator.policy_version),
        _gauge("ngu_attempts_open", "Training attempts that have not ended.", coordinator.ledger.num_open),
        _gauge("ngu_queue_items", "What waits or runs, by queue.", _by("queue", queues(coordinator.flow))),
        _gauge("ngu_engine_slots_used", "Rollouts that an engine runs.", _by("engine", engines)),
        _gauge("ngu_verifier_seconds", "Time of an answer in a child process.", (("verifier", "quantile"), answers)),
        _gauge("ngu_peer_silence_seconds", "Time since a process was last heard.", _by("peer", silence)),
        _gauge("ngu_memory_resident_bytes", "Memory of all the run's processes.", resident),
        _gauge("ngu_disk_free_bytes", "Room on the run's file system.", free),
        _gauge("ngu_unknown_verdict_ratio", "Share of recent verdicts that were unknown.", tally.unknown_frac),
        _gauge("ngu_starvation_signs", "Signs of starvation, of 4; 2 are a warning.", guard["starvation_signs"]),
        _gauge("ngu_truncated_ratio", "Share of recent rollouts that were cut off.", guard.get("truncated_frac")),
        _gauge("ngu_untrained_ratio", "Share of recent attempts that trained nothing.", guard.get("untrained_frac")),
    ]


def _last_step(coordinator: Coordinator) -> list[Metric]:
    last, evaluation = coordinator.tally.last_step, coordinator.tally.last_eval
    lags = {match[1]: value for name, value in last.items() if (match := _LAG_BUCKET.match(name))}
    solved = _under(last, "solve_rate/")
    held_out: Any = evaluation.get("pass_at_1", {})
    return [
        _gauge("ngu_effective_sample_ratio", "Effective sample size of the last step.", last.get("ess")),
        _gauge("ngu_importance_ratio_mean", "Mean importance ratio of the last step.", last.get("ratio_mean")),
        _gauge("ngu_lag_mean_versions", "Mean lag of the last step's tokens.", last.get("lag_mean")),
        _gauge("ngu_lag_max_versions", "Largest lag of the last step's tokens.", last.get("lag_max")),
        _gauge("ngu_step_tokens_by_lag", "Tokens of the last step by their lag in versions.", _by("lag", lags)),
        _gauge("ngu_reward_mean", "Mean reward since the step before.", last.get("generated/reward_mean")),
        _gauge("ngu_solve_ratio", "Solved rollouts by difficulty, training.", _by("level", solved)),
        _gauge("ngu_pass_at_1_ratio", "Solved rollouts by difficulty, held-out problems.", _by("level", held_out)),
        _gauge("ngu_step_metric", "Every figure of the last step, by its name in metrics.jsonl.", _by("name", last)),
    ]


Labelled = tuple[tuple[str, ...], Mapping[Any, float | None]]


def _by(label: str, values: Mapping[str, float | None]) -> Labelled:
    return (label,), {(name,): value for name, value in values.items()}


def _under(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _counter(name: str, words: str, values: float | Labelled) -> Metric:
    return _filled(CounterMetricFamily(name, words, labels=_labels(values)), values)


def _gauge(name: str, words: str, values: float | Labelled | None) -> Metric:
    return _filled(GaugeMetricFamily(name, words, labels=_labels(values)), values)


def _labels(values: float | Labelled | None) -> tuple[str, ...]:
    return values[0] if isinstance(values, tuple) else ()


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: float | Labelled | None
) -> CounterMetricFamily | GaugeMetricFamily:
    """A figure that is not known yet has no sample."""
    samples = values[1] if isinstance(values, tuple) else {(): values}
    for labels, value in samples.items():
        if value is not None:
            family.add_metric(labels, value)
    return family
