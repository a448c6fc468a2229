"""What Prometheus reads of a run, and that the dashboard asks for nothing else."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import Simulation
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import TelemetryConfig, parse_config
from pipeline.coordinator.exporter import Exporter
from pipeline.engines.fake import FakeScript
from pipeline.errors import ConfigError
from pipeline.messages import Heartbeat

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
# Of what a verifier says of itself.
JUDGED = {"num_correct": 20.0, "num_incorrect": 19.0, "num_unknown": 1.0, "fast_frac": 0.75, "num_kills": 1.0}
JUDGED |= {"num_waiting": 3.0, "child_p50_ms": 2.0, "child_p99_ms": 250.0}
Samples = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(TelemetryConfig(prometheus_port=0))  # here: any free port
    yield made
    made.close()


def scrape(exporter: Exporter) -> tuple[set[str], Samples]:
    """Names on the endpoint as an expression writes them, and the samples that there are."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples: Samples = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return {f.name + ("_total" if f.type == "counter" else "") for f in families}, samples


def test_the_endpoint_serves_the_run_and_every_figure_of_the_dashboard(tmp_path, exporter):
    config = parse_config({"max_rollouts": 300, "learner": {"batch_size": 32}, "eval": {"every_steps": 0}}, "test")
    run = Simulation(tmp_path, config, script=FakeScript(fail_frac=0.05), unknown_every=20)
    assert scrape(exporter) == (set(), {}), "nothing before the first turn"
    run.coordinator.turn(0.0)
    run.inbox.append(("verifier", Heartbeat(JUDGED)))
    run.run()
    run.ledger.close()
    exporter.update(run.coordinator)
    names, samples = scrape(exporter)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {n for p in panels for t in p["targets"] for n in re.findall(r"\bngu_\w+", t["expr"])}

    assert names == asked, "what no panel shows is not worth a scrape"
    counters, counts = run.coordinator.tally.counters, run.ledger.counts
    assert samples["ngu_rollouts_total"] == {(): counters["rollouts"]}
    assert samples["ngu_attempts_ended_total"][("trained",)] == counts["trained"] > 0
    assert samples["ngu_errors_total"] == {("engine",): counters["error/engine"]}
    assert samples["ngu_verdicts_total"][("unknown",)] > 0
    assert samples["ngu_state"] == {("run", "finished"): 1.0}
    assert samples["ngu_policy_version"] == {(): run.version}
    assert samples["ngu_step_metric"][("loss",)] == 1.0
    assert 0 < samples["ngu_solve_ratio"][("easy",)] < 1
    assert "ngu_memory_resident_bytes" not in samples, "nobody has looked yet"
    assert samples["ngu_verifier_seconds"] == {("p50", "verifier"): 0.002, ("p99", "verifier"): 0.25}
    last = run.sink.of_kind("step")[-1]["metrics"]
    assert {name: value for name, value in last.items() if name.startswith("verifier/")} == {
        "verifier/fast_frac": 0.75,
        "verifier/num_waiting": 3.0,
        "verifier/num_kills": 1.0,
        "verifier/child_p50_ms": 2.0,
        "verifier/child_p99_ms": 250.0,
    }


def test_a_port_in_use_is_the_users_mistake(exporter):
    with pytest.raises(ConfigError, match=rf"cannot serve Prometheus at 127\.0\.0\.1:{exporter.port}"):
        Exporter(TelemetryConfig(prometheus_port=exporter.port))
