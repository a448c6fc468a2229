"""What the coordinator puts on record: steps, evaluations, warnings and the end, each with the cost so far."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from pipeline.coordinator.flow import AttemptFlow
from pipeline.coordinator.queues import queues, untrained
from pipeline.metrics import MetricSink

PeerStats = Mapping[str, Mapping[str, float]]


def of_verifiers(peer_stats: PeerStats) -> PeerStats:
    """Of what peers say, by name, that of verifiers, once they have judged."""
    return {name: said for name, said in peer_stats.items() if "child_p99_ms" in said}


class Records:
    def __init__(self, sink: MetricSink, flow: AttemptFlow, peer_stats: PeerStats):
        """`peer_stats` is what peers say of themselves, by name; it changes as they do."""
        self._sink, self._flow, self._peer_stats = sink, flow, peer_stats

    def write(self, kind: str, **fields: Any) -> None:
        cost = self._flow.tally.cost_so_far()
        self._sink.write({"kind": kind, "step": self._flow.policy_version} | cost | fields)

    def step(self, learner_metrics: dict[str, float]) -> None:
        metrics = self._flow.tally.step_metrics(learner_metrics)
        self.write("step", time=time.time(), metrics=metrics | self._gauges())

    def failure(self, reason: str, gauges: dict[str, float]) -> None:
        """The run ends here, or its learner: what there is of this step would else never be written. If the run goes
        on, the next step has it too.
        """
        metrics = self._flow.tally.since_step() | self._gauges() | gauges
        self.write("failure", time=time.time(), reason=reason, metrics=metrics)

    def new_warnings(self) -> None:
        """Each warning once, to the metrics and to this process's log."""
        for text in self._flow.tally.take_new_warnings():
            print(f"warning: {text}", file=sys.stderr, flush=True)
            self.write("warning", time=time.time(), text=text)

    def _gauges(self) -> dict[str, float]:
        flow = self._flow
        gauges = {f"queue/{k}": float(v) for k, v in queues(flow).items()}
        gauges |= {f"untrained/{k}": v for k, v in untrained(flow).items()}
        gauges |= {f"sampler/{k}": v for k, v in flow.sampler.stats().items()}
        gauges |= {f"guard/{k}": v for k, v in flow.starvation.gauges().items()}
        gauges["guard/warnings"] = float(flow.tally.counters["warnings"])
        gauges["guard/unknown_verdict_frac"] = flow.tally.unknown_frac
        return gauges | self._verifiers()

    def _verifiers(self) -> dict[str, float]:
        """Of all verifiers: the sum of what they count, and the slowest one's latencies."""
        stats = [*of_verifiers(self._peer_stats).values()]
        if not stats:
            return {}
        judged = [sum(said[f"num_{outcome}"] for outcome in ("correct", "incorrect", "unknown")) for said in stats]
        fast = sum(said["fast_frac"] * num for said, num in zip(stats, judged, strict=True))
        gauges = {"verifier/fast_frac": fast / max(sum(judged), 1.0)}
        gauges |= {f"verifier/{name}": sum(said[name] for said in stats) for name in ("num_waiting", "num_kills")}
        gauges |= {f"verifier/{name}": max(said[name] for said in stats) for name in ("child_p50_ms", "child_p99_ms")}
        return gauges
