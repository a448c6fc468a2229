"""`ngu fit` and `ngu plan` as a user calls them: what they write, print and return."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from bench.scaling import scalerl_check
from bench.scaling.isocompute_check import World
from pipeline import cli

Ngu = Callable[..., int]


@pytest.fixture
def ngu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ngu:
    monkeypatch.chdir(tmp_path)  # where fits land unless told otherwise
    homes = {"fit": "scaling", "plan": "planner"}
    verbs = [EntryPoint(name, f"bench.{home}.commands:{name}", cli.GROUP) for name, home in homes.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: verbs)
    return lambda *argv: cli.main([str(a) for a in argv])


@pytest.fixture
def curve_csv(tmp_path: Path) -> Path:
    path = tmp_path / "curve.csv"
    rng = np.random.default_rng(0)
    lines = ["recipe,gpu_hours,reward"]
    for name in ("ScaleRL", "batch 512"):
        compute, exact, _ = scalerl_check.curve(name)
        noisy = exact + rng.uniform(-0.015, 0.015, len(exact))
        lines += [f"{name},0,0.2", *(f"{name},{c},{r}" for c, r in zip(compute, noisy, strict=True))]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def sweep_csv(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.csv"
    s = World(128, 6e4, 2.0).sweep(np.random.default_rng(0))
    order = np.lexsort((s.compute, s.run))
    lines = ["run_id,seed,b_problem,n,step,compute,reward"]
    lines += [f"{s.run[i]},0,{s.b_problem[i]},{s.n[i]},{s.step[i]},{s.compute[i]},{s.reward[i]}" for i in order]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row | {"reward": "nan"}, "row 1: reward is nan; remove the row or repair it"),
        (lambda row: row | {"reward": "1.5"}, "row 1: reward is 1.5; rescale it to [0, 1]"),
        (lambda row: row | {"reward": "0.4"}, "the reward is 0.4 throughout; there is no frontier"),
        (lambda row: row | {"compute": "500"}, "compute must increase from row to row"),
        (lambda row: row | {"run_id": "one"}, "n or b_problem changes within the run"),
        (lambda row: row if float(row["compute"]) < 1300 else None, "values of n have 3 record-breaking points"),
        (lambda row: row if row["n"] in ("8", "16") else None, "2 values of n, at least 3"),
    ],
)
def test_a_sweep_that_cannot_be_fitted(ngu: Ngu, sweep_csv: Path, tmp_path: Path, capsys, change, message: str):
    rows = [change(r) for r in csv.DictReader(sweep_csv.read_text().splitlines())]
    with (tmp_path / "bad.csv").open("w") as file:
        writer = csv.DictWriter(file, ["run_id", "seed", "b_problem", "n", "step", "compute", "reward"])
        writer.writeheader()
        writer.writerows(r for r in rows if r is not None)
    assert ngu("fit", "isocompute", tmp_path / "bad.csv", "--draws", 40, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir())}


def test_fit_scalerl_leaves_a_figure_its_data_and_a_verdict(
    ngu: Ngu, curve_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert ngu("fit", "scalerl", curve_csv, "--draws", 40, "--out", out) == 0
    said = capsys.readouterr().out
    for words in ("ScaleRL: A = 0.6", "GPU-hours", "one seed", "With a common A", "predicts best", "scalerl.svg"):
        assert words in said
    found = files(out)
    assert list(found) == ["scalerl.csv", "scalerl.json", "scalerl.png", "scalerl.svg"]
    assert found["scalerl.png"].startswith(b"\x89PNG")
    assert b"<svg" in found["scalerl.svg"]
    rows = list(csv.DictReader(found["scalerl.csv"].decode().splitlines()))
    assert {r["series"] for r in rows} == {"observed", "fit"}
    report = json.loads(found["scalerl.json"])
    assert [f["name"] for f in report["fits"]] == ["ScaleRL", "batch 512"]
    assert report["fits"][0]["a"]["low"] <= 0.61 <= report["fits"][0]["a"]["high"]
    assert ngu("fit", "scalerl", curve_csv, "--draws", 40, "--out", tmp_path / "again") == 0
    assert files(tmp_path / "again") == found, "equal input gives equal files"


def test_fit_scalerl_as_published(ngu: Ngu, curve_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ("fit", "scalerl", curve_csv, "--method", "published", "--draws", 40, "--out", tmp_path / "out", "--json")
    assert ngu(*argv) == 0
    report = json.loads(capsys.readouterr().out)
    for fit, a in zip(report["fits"], (0.610, 0.605), strict=True):
        assert fit["a"]["value"] == pytest.approx(a, abs=0.0151)
        assert fit["a"]["value"] * 200 == pytest.approx(round(fit["a"]["value"] * 200)), "a node of the grid"
        assert fit["compute_low"] >= 1500


def test_fit_isocompute_and_plan(ngu: Ngu, sweep_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert ngu("fit", "isocompute", sweep_csv, "--draws", 40, "--out", out) == 0
    said = capsys.readouterr().out
    assert "n*(C) grows from" in said
    assert "It saturates at n =" in said
    assert sorted(files(out)) == [f"isocompute.{e}" for e in ("csv", "json", "png", "svg")]
    assert ngu("plan", "n", out / "isocompute.json", "--budget", "1e6", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_steps"] * plan["n"] * plan["b_problem"] == pytest.approx(1e6, rel=0.05)
    assert ngu("plan", "n", out / "isocompute.json", "--budget", "1e9") == 0
    assert "extrapolates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fit", "scalerl"], "nothing to fit: give a run directory or a CSV file"),
        (["fit", "isocompute"], "nothing to fit"),
        (["fit", "scalerl", "CURVE", "--draws", "10"], "--draws 10: at least 40"),
        (["fit", "scalerl", "CURVE", "--r0", "low"], "--r0 'low': give a number, fit or auto"),
        (["fit", "scalerl", "CURVE", "--r0", "1.5"], "a pass rate before training is in [0, 1)"),
        (["fit", "scalerl", "CURVE", "--max-compute", "1600"], "1 evaluations in the fit window"),
        (["fit", "isocompute", "CURVE"], "missing column run_id, seed"),
        (["plan", "n", "CURVE", "--budget", "10"], "not a fit written by `ngu fit isocompute`"),
        (["plan", "n", "nowhere", "--budget", "10"], "no such file"),
        (["plan", "n", "nowhere", "--budget", "-1"], "must be above 0"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    ngu: Ngu, curve_csv: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
):
    assert ngu(*(curve_csv if a == "CURVE" else a for a in argv)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_an_unwritable_directory(ngu: Ngu, curve_csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert ngu("fit", "scalerl", curve_csv, "--draws", 40, "--out", tmp_path / "file" / "out") == 2
    assert "choose another --out" in capsys.readouterr().err


def test_check_fails_when_a_claim_does(ngu: Ngu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def lines(seed: int) -> Iterator[scalerl_check.Line]:
        yield scalerl_check.Line("one", True, "as it should be")
        yield scalerl_check.Line("two", seed == 7, "depends")

    monkeypatch.setattr(scalerl_check, "check", lines)
    assert ngu("fit", "scalerl", "--check") == 1
    assert capsys.readouterr().out.splitlines() == ["ok    one: as it should be", "FAIL  two: depends"]
    assert ngu("fit", "scalerl", "--check", "--seed", 7, "--json") == 0
    assert [line["passed"] for line in json.loads(capsys.readouterr().out)] == [True, True]


def test_help_loads_nothing_that_computes():
    probe = "import sys, bench.scaling.commands; print([m for m in ('numpy', 'scipy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
