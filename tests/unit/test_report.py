"""The report of a run: its numbers, its plots, its closing tables."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import report, rundir
from pipeline.closing import print_closing
from pipeline.config import Config
from pipeline.metrics import JsonlSink, Record

ATTEMPTS = {"trained": 12, "filtered": 3, "stale": 0, "failed": 1, "cancelled": 0, "given_up": 4}
LEVELS = {"+1": {"launched": 12, "trained": 10, "correct": 7}, "*3": {"launched": 8, "trained": 2, "correct": 1}}


def step(n: int, **metrics: float | None) -> Record:
    return {"kind": "step", "step": n, "time": 100.0 + n, "rollouts": 8 * n, "tokens": 80 * n, "metrics": metrics}


def evaluation(n: int, phase: str, plus: float, times: float) -> Record:
    return {
        "kind": "eval",
        "step": n,
        "phase": phase,
        "version_min": n,
        "version_max": n,
        "rollouts": 8 * n,
        "pass_at_1": {"+1": plus, "*3": times},
        "num_rollouts": {"+1": 24, "*3": 24},
        "hard_pass_at_1": times,
        "mix_pass_at_1": (plus + times) / 2,
    }


RECORDS = [
    evaluation(0, "before", 0.5, 0.0),
    step(1, lag_mean=0.0, lag_max=0.0, ess=1.0, reward_mean=0.25),
    step(2, lag_mean=1.0, lag_max=3.0, ess=0.5, reward_mean=0.75, wall_s=9.0),
    evaluation(2, "during", 0.75, 0.25),
    step(3, lag_mean=2.0, lag_max=2.0, ess=None, reward_mean=math.nan),
    evaluation(3, "after", 0.75, 0.5),
    {"kind": "levels", "step": 3, "rollouts_by_level": LEVELS},
]


def make_run(path: Path, records: list[Record], **status: Any) -> Path:
    run = rundir.create(path, Config(seed=5))
    sink = JsonlSink(run / "metrics.jsonl")
    for record in records:
        sink.write(record)
    sink.close()
    if status:
        rundir.write_atomic(run / "status.json", msgspec.json.encode(status))
    return run


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time and is tested once."""
    monkeypatch.setattr("pipeline.plots.to_png", lambda figure: b"a picture")


@pytest.mark.usefixtures("no_plots")
def test_the_summary_of_a_finished_run(tmp_path: Path):
    run = make_run(tmp_path / "run", RECORDS, state="finished", started=50.0, time=80.0, attempts=ATTEMPTS)
    summary = report.write_report(run)
    assert summary == rundir.read_json(run / "summary.json")
    expected = {
        "state": "finished",
        "seed": 5,
        "sampler": "never_give_up",
        "steps": 3,
        "rollouts": 24,
        "tokens": 240,
        "wall_s": 30.0,
        "train_s": 9.0,
        "hard_pass_at_1_before": 0.0,
        "hard_pass_at_1": 0.5,
        "mix_pass_at_1_before": 0.25,
        "mix_pass_at_1": 0.625,
        "lag_mean": 1.0,
        "lag_max": 3.0,
        "ess_mean": 0.75,
        "attempts": ATTEMPTS,
        "rollouts_by_level": LEVELS,
    }
    assert {name: summary[name] for name in expected} == expected


def test_plots_are_written_for_every_run(tmp_path: Path):
    run = make_run(tmp_path / "run", RECORDS, state="finished", attempts=ATTEMPTS)
    report.write_report(run)
    sizes = {name: (run / name).stat().st_size for name in report.PLOTS}
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in report.PLOTS)
    empty = make_run(tmp_path / "empty", [])
    report.write_report(empty)
    assert all((empty / name).stat().st_size < size for name, size in sizes.items())


@pytest.mark.parametrize(
    ("records", "hard", "step_of_it"),
    [(RECORDS, 0.5, 3), (RECORDS[:4], 0.25, 2), (RECORDS[:3], None, None), ([], None, None)],
    ids=["finished", "ended after an evaluation", "ended before one", "nothing"],
)
def test_the_final_value_is_of_the_latest_evaluation(records: list, hard: float | None, step_of_it: int | None):
    summary = report.summarize(records, {}, msgspec.to_builtins(Config()))
    assert (summary["hard_pass_at_1"], summary["evaluated_at_step"]) == (hard, step_of_it)


@pytest.mark.usefixtures("no_plots")
def test_a_resumed_run_counts_no_step_twice(tmp_path: Path):
    repeated = [*RECORDS[:5], *RECORDS[2:]]
    run = make_run(tmp_path / "run", repeated, state="finished")
    assert report.write_report(run)["lag_mean"] == 1.0


@pytest.mark.usefixtures("no_plots")
def test_a_report_that_is_up_to_date_is_not_computed_again(tmp_path: Path):
    run = make_run(tmp_path / "run", RECORDS, state="finished")
    report.write_report(run)
    (run / "summary.json").write_text('{"marker": true}')
    assert report.current_summary(run) == {"marker": True}
    rundir.write_atomic(run / "status.json", b'{"state": "stopped"}')
    assert report.current_summary(run)["state"] == "stopped"


@pytest.mark.parametrize("records", [RECORDS, RECORDS[:3], []], ids=["finished", "stopped early", "nothing"])
def test_closing_tables(tmp_path: Path, records: list, capsys: pytest.CaptureFixture[str]):
    summary = report.summarize(records, {"state": "failed", "reason": "why"}, msgspec.to_builtins(Config()))
    print_closing(summary | {"attempts": ATTEMPTS}, tmp_path)
    out = capsys.readouterr().out
    assert "failed: why" in out
    assert "given up" in out and "20.0%" in out
    assert ("+0.250" in out) == (records == RECORDS)
    assert ("*3" in out) == bool(records)


@pytest.mark.parametrize(("steps", "says"), [(0, True), (1, False)])
def test_a_run_that_trained_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, says: bool):
    records = [step(n) for n in range(1, steps + 1)]
    summary = report.summarize(records, {"state": "finished", "step": steps}, msgspec.to_builtins(Config()))
    print_closing(summary, tmp_path)
    assert ("nothing was trained" in capsys.readouterr().out) == says


def test_the_module_says_what_it_cannot_report_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    assert report.main() == 2
    assert "not a run directory" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["report"])
    assert report.main() == 2
