"""Every `MetricSink` keeps what it was given, survives a kill after `write`, and closes twice."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from pipeline.metrics import JsonlSink, MetricSink, MetricSinks, Record, TensorBoardSink, open_sinks, read_records

STEP: Record = {
    "kind": "step",
    "step": 4,
    "time": 1000.5,
    "rollouts": 1536,
    "tokens": 60_000,
    "metrics": {"loss": 0.25, "queue/launch": 3.0, "broken": math.nan},
}
EVAL: Record = {
    "kind": "eval",
    "step": 4,
    "phase": "during",
    "version_min": 3,
    "version_max": 4,
    "rollouts": 1536,
    "pass_at_1": {"+1": 0.5, "*3": 0.0},
    "num_rollouts": {"+1": 24, "*3": 24},
    "hard_pass_at_1": 0.0,
    "mix_pass_at_1": None,
    "truncated_frac": 0.5,
    "best_at_k": {"1": 0.25, "4": 0.5},
}
LEVELS: Record = {
    "kind": "levels",
    "step": 4,
    "rollouts_by_level": {"+1": {"launched": 8, "trained": 4, "correct": 2}},
}

WARNING: Record = {"kind": "warning", "step": 4, "time": 1001.0, "text": "lengths drift"}

Scalars = dict[str, list[tuple[int, float]]]


def scalars_of_jsonl(run: Path) -> Scalars:
    found: Scalars = {}
    for record in read_records(run / "metrics.jsonl"):
        for name, value in record.get("metrics", {}).items():
            if value is not None:
                found.setdefault(name, []).append((record["step"], value))
    return found


def scalars_of_tensorboard(run: Path) -> Scalars:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("eval/")]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


MAKERS: dict[str, tuple[Callable[[Path], MetricSink], Callable[[Path], Scalars]]] = {
    "jsonl": (lambda run: JsonlSink(run / "metrics.jsonl"), scalars_of_jsonl),
    "tensorboard": (lambda run: TensorBoardSink(run / "tensorboard"), scalars_of_tensorboard),
    "fan-out": (lambda run: MetricSinks(JsonlSink(run / "metrics.jsonl")), scalars_of_jsonl),
    "run": (open_sinks, scalars_of_tensorboard),
}


@pytest.fixture(params=MAKERS)
def make_and_read(request: pytest.FixtureRequest):
    return MAKERS[request.param]


def test_what_is_written_can_be_read_before_close(make_and_read, tmp_path: Path):
    make, read = make_and_read
    sink = make(tmp_path)
    try:
        for record in (STEP, EVAL, LEVELS):
            sink.write(record)
        assert read(tmp_path) == {"loss": [(4, 0.25)], "queue/launch": [(4, 3.0)]}
    finally:
        sink.close()
        sink.close()


def test_opened_again_it_goes_on(make_and_read, tmp_path: Path):
    make, read = make_and_read
    for step in (1, 2):
        sink = make(tmp_path)
        sink.write(STEP | {"step": step, "metrics": {"loss": float(step)}})
        sink.close()
    assert read(tmp_path) == {"loss": [(1, 1.0), (2, 2.0)]}


def test_one_tensorboard_page_shows_ess_the_lag_histogram_queues_and_solve_rates(tmp_path: Path):
    """What its server answers to the browser: the page's charts, and curves for each of them."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    metrics = {"ess": 0.9, "lag_mean": 1.0, "queue/verify": 2.0, "solve_rate/*3": 0.2}
    metrics |= {"num_tokens/lag_0": 50.0, "num_tokens/lag_3_4": 7.0, "num_tokens/lag_17_up": 1.0}
    metrics |= {"guard/truncated_frac": 0.1, "guard/warnings": 0.0, "verifier/child_p99_ms": 4.0}
    sink = TensorBoardSink(tmp_path / "run")
    for record in (STEP | {"metrics": metrics}, EVAL, WARNING):
        sink.write(record)
    sink.close()
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    plugins: dict = {}
    context = TBContext(
        logdir=str(tmp_path),
        data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path)),
        plugin_name_to_instance=plugins,
    )
    plugins["scalars"], page = ScalarsPlugin(context), CustomScalarsPlugin(context)
    layout = json.loads(page.layout_impl(RequestContext(), ""))
    curves = {
        chart["title"]: {
            tag
            for regex in chart["multiline"]["tag"]
            for tag in page.scalars_impl(RequestContext(), "run", regex, "")["tag_to_events"]
        }
        for chart in layout["category"][0]["chart"]
    }
    assert all(curves.values()), "a chart without a curve"
    assert curves["queue depths"] == {"queue/verify"}
    assert curves["solve rate by difficulty, training"] == {"solve_rate/*3"}
    assert len(curves["lag: trained tokens by versions of lag"]) == 3
    events = multiplexer.GetAccumulator("run")
    (lag,) = [tensor_util.make_ndarray(e.tensor_proto).tolist() for e in events.Tensors("lag")]
    assert lag == [[0, 1, 50], [3, 5, 7], [17, 34, 1]]
    (words,) = [tensor_util.make_ndarray(e.tensor_proto).item() for e in events.Tensors("warnings")]
    assert words == b"lengths drift"


def test_tensorboard_shows_evaluations_by_level(tmp_path: Path):
    sink = TensorBoardSink(tmp_path)
    sink.write(EVAL)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = {"pass_at_1/+1", "pass_at_1/*3", "hard_pass_at_1", "best_at_k/1", "best_at_k/4", "truncated_frac"}
    assert set(events.Tags()["scalars"]) == {f"eval/{name}" for name in names}


def test_tensorboard_discards_the_steps_that_a_resumed_run_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Files are read in the order of their names, which end with how many this process wrote: the 10th before the 9th.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for steps in ((1, 2, 3), (2, 3)):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write(STEP | {"step": step, "metrics": {"loss": float(10 * len(steps) + step)}})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 31.0), (2, 22.0), (3, 23.0)]
