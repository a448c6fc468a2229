"""The trace of a process: valid for Perfetto, bounded, whole after a kill, and nothing when it is off."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import tracing


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Path]:
    tracing.start(tmp_path, "engine-0")
    yield tmp_path
    tracing.stop()


def merged(run_dir: Path) -> list[dict[str, Any]]:
    path = tracing.merge(run_dir)
    assert path is not None
    return json.loads(path.read_text())["traceEvents"]


def test_spans_nest_and_what_overlaps_has_its_own_track(traced):
    asked_s = time.monotonic()
    with tracing.span("turn", received=3), tracing.span("commit"):
        tracing.counter("queues", {"launch": 2.0})
        time.sleep(2e-9 * tracing.MIN_SPAN_NS)
    tracing.since("judge", asked_s, (7, "child"), attempt=5)
    tracing.stop()
    events = merged(traced)
    assert {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"} == {
        ("process_name", "engine-0"),
        ("thread_name", "main"),
        ("thread_name", "child"),
    }
    commit, turn, judge = (e for e in events if e["ph"] == "X")
    assert (turn["name"], turn["args"], judge["args"]) == ("turn", {"received": 3}, {"attempt": 5})
    assert turn["ts"] <= commit["ts"] <= commit["ts"] + commit["dur"] <= turn["ts"] + turn["dur"]
    assert turn["tid"] == commit["tid"] != judge["tid"] == 7
    assert judge["ts"] <= turn["ts"] and judge["ts"] + judge["dur"] >= turn["ts"] + turn["dur"]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"launch": 2.0}]


def test_a_process_writes_so_much_and_says_that_it_stopped(tmp_path):
    tracer = tracing.Tracer(tmp_path, "learner", max_bytes=4000)
    for i in range(1000):
        tracer.complete("step", i, i + 1, {}, (1, "main"))
    tracer.close()
    (part,) = (tmp_path / tracing.PARTS).iterdir()
    assert 3000 < part.stat().st_size < 4400
    assert merged(tmp_path)[-1]["name"] == "the trace of this process is full"


def test_a_line_torn_by_a_kill_is_left_out(traced):
    tracing.since("step", time.monotonic(), (1, "main"))
    tracing.stop()
    (part,) = (traced / tracing.PARTS).iterdir()
    whole = merged(traced)
    with part.open("ab") as file:
        file.write(b'{"name": "st')
    tracing.Tracer(traced, "coordinator").close()
    assert [e for e in merged(traced) if e["args"] != {"name": "coordinator"}] == whole


def test_nothing_is_written_when_it_is_off(tmp_path):
    with tracing.span("step"):
        tracing.counter("queues", {"launch": 1.0})
        tracing.since("judge", time.monotonic(), (1, "child"))
    assert not tracing.is_on()
    assert tracing.merge(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
