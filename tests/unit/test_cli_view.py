"""What a run looks like while it runs: on a terminal, and in a log file."""

import io
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pipeline import rundir, view
from pipeline.config import Config
from pipeline.metrics import JsonlSink
from pipeline.progress import Progress, duration, number, sparkline

STATUS: dict[str, Any] = {
    "state": "training",
    "time": 1060.0,
    "started": 1000.0,
    "step": 3,
    "max_steps": None,
    "rollouts": 30,
    "max_rollouts": 100,
    "rollouts_per_s": 347.2,
    "ess": None,
    "hard_pass_at_1": None,
    "queues": {"launch": 1, "in_flight": 64},
    "attempts": {"trained": 20, "stale": 0},
    "engines": {"engine-0": {"tokens": 15_000.0, "slots_used": 63.0}},
    "sampler": {"retry_frac": 0.25},
    "warnings": ["look here"],
}
EVAL = {
    "kind": "eval",
    "step": 0,
    "phase": "before",
    "pass_at_1": {"+1": 0.5},
    "num_rollouts": {"+1": 24},
    "hard_pass_at_1": None,
    "mix_pass_at_1": 0.5,
    "intervals": {"mix_pass_at_1": [0.25, 0.625]},
    "rollouts": 0,
}


def step(n: int) -> dict:
    return {"kind": "step", "step": n, "time": 1000.0 + 10 * n, "rollouts": 10 * n, "tokens": 0, "metrics": {"ess": 1}}


def make_run(tmp_path: Path, records: list[dict], **status: Any) -> Path:
    (tmp_path / "status.json").write_bytes(msgspec.json.encode(STATUS | status))
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for record in records:
        sink.write(record)
    sink.close()
    return tmp_path


def progress_of(run: Path) -> Progress:
    progress = Progress(run)
    progress.refresh()
    return progress


def test_time_left_follows_the_limit_that_ends_the_run_first(tmp_path: Path):
    by_rollouts = progress_of(make_run(tmp_path, [step(n) for n in (1, 2, 3)]))
    assert by_rollouts.done_frac == pytest.approx(0.3)
    assert by_rollouts.time_left_s == pytest.approx(70.0)
    by_steps = progress_of(make_run(tmp_path, [], max_steps=4))
    assert by_steps.done_frac == pytest.approx(0.75)
    assert by_steps.time_left_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("steps", "status"),
    [([], {}), ([3], {}), ([3, 3], {}), ([1, 3], {"state": "finished"}), ([1, 3], {"max_rollouts": None})],
    ids=["no step", "one step", "no pace", "ended", "endless"],
)
def test_time_left_is_unknown_when_it_is(tmp_path: Path, steps: list[int], status: dict):
    assert progress_of(make_run(tmp_path, [step(n) for n in steps], **status)).time_left_s is None


def test_a_run_that_has_written_nothing_is_starting(tmp_path: Path):
    progress = progress_of(tmp_path)
    assert (progress.state, progress.done_frac, progress.elapsed_s) == ("starting", 0.0, 0.0)
    Console(file=io.StringIO()).print(view.screen(progress))


@pytest.mark.parametrize("width", [40, 100])
def test_the_screen_shows_the_run(tmp_path: Path, width: int):
    console = Console(width=width, file=(out := io.StringIO()))
    run = make_run(tmp_path, [EVAL, step(1)], evaluation={"left": 90, "of": 360})
    console.print(view.screen(progress_of(run)))
    text = out.getvalue()
    for words in ("training", "270/360", "30/100", "engine-0", "15.0k", "! look here"):
        assert words in text
    assert max(map(len, text.splitlines())) <= width


def test_the_log_has_one_line_for_each_thing_and_no_control_characters(tmp_path: Path, capsys):
    run = make_run(tmp_path, [EVAL, step(1), step(2)])
    plain, progress = view.PlainView(), Progress(run)
    plain.update(progress, progress.refresh())
    plain.update(progress, progress.refresh())
    make_run(tmp_path, [step(3)], state="failed", reason="two\nlines")
    plain.update(progress, progress.refresh())
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    lines = [line.split(" ", 1)[1] for line in out.splitlines()]
    assert lines[0] == "evaluation before (step 0): hard -, overall 0.500 [0.250, 0.625], 24 rollouts"
    assert [line.partition(",")[0] for line in lines if line.startswith("step")] == ["step 1", "step 2", "step 3"]
    assert lines.count("warning: look here") == 1
    assert lines[-1] == "failed: two lines"


def test_of_a_long_history_the_log_shows_the_end(tmp_path: Path, capsys):
    run = make_run(tmp_path, [step(n) for n in range(1, 100)])
    plain, progress = view.PlainView(), Progress(run)
    plain.update(progress, progress.refresh())
    out = capsys.readouterr().out
    assert out.count("step ") == view.HISTORY_LINES and "step 99" in out


def test_following_shows_what_was_written_up_to_the_end(tmp_path: Path, capsys):
    run = make_run(tmp_path, [])
    turns = iter([False, True])

    def ended() -> bool:
        if last := next(turns):
            make_run(tmp_path, [step(9)], state="finished")
        return last

    view.follow(run, view.make_view(live=True), ended)  # captured output is no terminal, so lines it is
    assert "step 9" in capsys.readouterr().out


def test_a_broken_view_does_not_stop_the_run(tmp_path: Path, capsys):
    run = rundir.create(tmp_path / "run", Config())
    (run / "metrics.jsonl").write_text("not json\n")
    ran = threading.Event()
    with view.followed(run, live=False):
        ran.set()
    assert ran.is_set()
    assert "the run goes on" in capsys.readouterr().out


def test_words_for_numbers():
    assert [duration(s) for s in (None, 0, 59.6, 3723)] == ["-", "0:00", "1:00", "1:02:03"]
    assert [number(v) for v in (None, float("nan"), 0, 0.12345, 15_234, 2.5e6)] == [
        *("-", "-", "0.000", "0.123", "15.2k", "2.5M")
    ]
    assert sparkline([-1, 0.0, 0.5, 1.0, 2], width=4) == "▁▅██"


def test_a_log_says_where_a_slow_run_stands(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, [])
    plain, progress = view.PlainView(), Progress(run)
    plain.update(progress, progress.refresh())
    plain.update(progress, progress.refresh())
    assert capsys.readouterr().out.count("in flight 64") == 0
    monkeypatch.setattr(view, "QUIET_S", -1.0)
    plain.update(progress, progress.refresh())
    line = capsys.readouterr().out
    assert "training, step 3, rollouts 30/100" in line
    assert "in flight 64" in line
