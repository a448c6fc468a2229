"""`ngu bench e2e`: what is read of a run, the figures over seeds, and going on where it was interrupted."""

import json
import math
import sys
from pathlib import Path

import pytest

from bench.suite.base import Row
from bench.suite.e2e import bench, ours, trl
from bench.suite.e2e.bench import E2EBench, cost_to
from bench.suite.e2e.runs import Mark, Run, Trained, put_aside, run_to_end
from bench.suite.e2e.trl import TrlConfig
from pipeline.errors import NguError


def step_record(step: int, wall_s: float, busy_s: float, engine: str) -> dict:
    metrics = {"wall_s": wall_s, "step_s": 0.5, "publish_s": 0.25, f"{engine}/busy_s": busy_s}
    core_s = {"engine": 3.0 + wall_s, "learner": 1.0}
    return {
        "kind": "step",
        "step": step,
        "rollouts": 384 * step,
        "tokens": 9000 * step,
        "core_s": core_s,
        "metrics": metrics,
    }


@pytest.mark.parametrize("engine", ["engine-0", "remote0"])
def test_a_run_of_ours_is_read_from_its_metrics(engine: str, tmp_path: Path):
    run, models = tmp_path / "run", tmp_path / "models"
    run.mkdir()
    records = [{"kind": "eval", "step": 0, "rollouts": 0, "tokens": 0, "core_s": {"engine": 3.0, "learner": 0.5}}]
    records += [step_record(step, 2.0 * step, 10.0 + 1.8 * step, engine) for step in (1, 2, 3)]
    records += [step_record(step, 2.0 * step, 15.4, engine) for step in (4, 5)]  # nothing is launched any more
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for name in ("2", "3", "3.partial"):
        (models / name).mkdir(parents=True)
    found = ours._read(run, models, wall_s=20.0)
    assert found.marks[0] == Mark(0, 0.0, 0, 0, 0.0) and found.marks[3] == Mark(3, 6.0, 1152, 27000, 6.5)
    assert sorted(found.models) == [2, 3]
    assert found.startup_s == 10.0 and found.marks[-1].step == 5
    assert found.engine_idle == pytest.approx(0.1)  # 1.8 of every 2 seconds, whatever came before
    assert found.learner_idle == pytest.approx(1 - 5 * 0.75 / 8.75)  # from 1.25 s on, where the first batch began


LAUNCHER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (Path("in order").touch(), sys.exit()))
Path("runs").touch()
time.sleep(600)
"""


def test_a_run_that_is_interrupted_ends_in_order_and_one_that_fails_says_how(tmp_path: Path):
    """A launcher that is killed would leave its workers behind, which keep the cores busy."""

    def interrupt() -> None:
        if (tmp_path / "runs").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_end([sys.executable, "-c", LAUNCHER], tmp_path, interrupt, cwd=tmp_path)
    assert (tmp_path / "in order").exists()
    with pytest.raises(NguError, match=f"{tmp_path}/log: status 3, and at its end: no memory"):
        run_to_end([sys.executable, "-c", "print('no memory\\n'); raise SystemExit(3)"], tmp_path)


def test_the_trainer_of_others_is_told_where_its_figures_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It runs in a directory of its own."""

    def run(argv: list[str], directory: Path, **_: object) -> float:
        told = Path(argv[-2])
        assert told.is_absolute() and told.samefile(directory)
        mark = {"step": 1, "seconds": 2.0, "rollouts": 384, "tokens": 5, "core_s": 3.0}
        (told / "figures.json").write_text(json.dumps({"marks": [mark], "generate_s": 1.0, "learn_s": 0.5}))
        (told / "models" / "1").mkdir(parents=True)
        return 10.0

    monkeypatch.setattr(trl, "run_to_end", run)
    monkeypatch.chdir(tmp_path)
    found = trl.train(Path("python"), Path("out"), 0, TrlConfig(), 2)
    assert (found.startup_s, found.engine_idle, found.learner_idle) == (8.0, 0.5, 0.75)


def test_weights_are_put_aside_whole_or_not_at_all(tmp_path: Path):
    model = tmp_path / "model"
    assert not put_aside(model, tmp_path / "1") and not (tmp_path / "1").exists()
    model.mkdir()
    (model / "weights").write_text("w")
    assert put_aside(model, tmp_path / "1")
    (model / "weights").unlink()
    assert (tmp_path / "1" / "weights").read_text() == "w"


def a_run(arm: str, seed: int, seconds: float, hard: dict[int, float]) -> Run:
    last = max(hard)
    marks = [Mark(0, 0.0, 0, 0, 0.0), *(Mark(s, seconds * s, 384 * s, 9000 * s, s) for s in range(1, last + 1))]
    return Run("", arm, seed, marks, hard, hard[last], 0.9, 5.0, 0.01, 0.4)


def named(rows: list[Row]) -> dict[str, Row]:
    return {row.what: row for row in rows}


def test_figures_are_of_pairs_of_seeds_and_thresholds_that_were_reached():
    said: list[str] = []
    runs = [a_run("async", s, 1.0, {2: 0.2, 4: 0.6}) for s in (0, 1)]
    runs += [a_run("trl", 0, 4.0, {2: 0.0, 4: 0.2}), a_run("trl", 1, 4.0, {2: 0.3, 4: 0.4})]
    rows = named(bench._rows(runs, ["async", "trl"], said.append))
    assert rows["async: rollouts a second"].median == 384 and rows["trl: rollouts a second"].median == 96
    assert (
        rows["async against trl: rollouts a second"].median == 4
        and rows["async against trl: rollouts a second"].outcome
    )
    # Half-way between steps 2 and 4 is .4, so .3 is a quarter of the way, and .6 the end.
    assert rows["async: seconds to hard pass@1 0.3"].median == 2.5
    assert rows["async: rollouts to hard pass@1 0.6"].median == 4 * 384
    assert "trl: seconds to hard pass@1 0.3" not in rows, "one seed never got there"
    assert said[0] == "trl: to hard pass@1 0.3: never, 8 s"
    # Of the run that never got there all its time counts: 2.5 / 16 and 2.5 / 8.
    times = rows["async against trl: seconds to hard pass@1 0.3"]
    assert times.median == pytest.approx((2.5 / 16 + 2.5 / 8) / 2) and times.at_most == 0.25
    assert any("seed 0: hard pass@1 0.3 not reached in 16 s" in line for line in said)
    assert cost_to(runs[2], 0.3, "rollouts") == math.inf


def test_runs_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained: list[tuple[str, int, list[str]]] = []

    def train(directory: Path, seed: int, settings: list[str], every_steps: int) -> Trained:
        trained.append((directory.name, seed, settings))
        directory.mkdir(parents=True, exist_ok=True)
        return Trained([Mark(0, 0.0, 0, 0, 0.0), Mark(2, 2.0, 768, 9000, 3.0)], {2: directory}, 1.0, 0.0, 0.5)

    def judge(key: str, arm: str, seed: int, trained: Trained, num_rollouts: int, num_final: int) -> Run:
        return Run(key, arm, seed, trained.marks, {2: 0.4}, 0.4, 0.8, 1.0, 0.0, 0.5)

    monkeypatch.setattr(ours, "train", train)
    monkeypatch.setattr(bench, "_judged", judge)
    monkeypatch.setattr(bench, "commit", lambda: "abc")
    monkeypatch.setattr(bench, "find_python", lambda *packages: None)
    said: list[str] = []
    first = E2EBench(seeds=(0,), out=str(tmp_path)).run(said.append)
    assert [(name, seed) for name, seed, _ in trained] == [("async-0", 0), ("sync-0", 0)]
    assert trained[0][2] == ["max_rollouts=11904"] and "staleness.max_lag=0" in trained[1][2]
    assert "TRL: not installed" in said[0]
    again = E2EBench(seeds=(0, 1), trl=TrlConfig(steps=3), out=str(tmp_path)).run(print)
    assert [(name, seed) for name, seed, _ in trained[2:]] == [("async-1", 1), ("sync-1", 1)]
    assert {row.what for row in first} == {row.what for row in again}
    E2EBench(seeds=(0,), steps=4, out=str(tmp_path)).run(print)
    assert len(trained) == 6, "other settings are another run"
    E2EBench(
        seeds=(0,), settings=("engines.own_cores=true",), sync_settings=("engines.count=2",), out=str(tmp_path)
    ).run(print)
    assert [settings[1:] for *_, settings in trained[6:]] == [
        ["engines.own_cores=true"],
        ["engines.count=2", "staleness.max_lag=0"],
    ]
