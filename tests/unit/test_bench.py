"""`ngu bench`: parameters, figures with their intervals, the history and its report."""

import ast
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.suite import registry
from bench.suite import report as suite_report
from bench.suite import results as suite_results
from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.commands import bench, report
from bench.suite.peers import Measurer
from bench.suite.registry import BENCHMARKS, Entry
from bench.suite.results import read_history
from bench.suite.samplers import SamplersBench
from pipeline import cli
from pipeline.errors import ConfigError, NguError
from pipeline.sections import PositiveInt
from samplers.fixed import FixedConfig

PNG = b"\x89PNG"


class Toy(Benchmark, frozen=True):
    repeats: PositiveInt = 3
    sizes: tuple[int, ...] = (1, 2)

    def run(self, say: Say) -> list[Row]:
        say("no peer here")
        counts = range(1, self.repeats + 1)
        return [figure(f"size {n}", "things/s", [n * i for i in counts], at_least=1.5) for n in self.sizes]


class Broken(Benchmark, frozen=True):
    def run(self, say: Say) -> list[Row]:
        raise NguError("its peer has died")


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Entry(f"{__name__}:Toy", "a toy | of a benchmark")
    broken = Entry(f"{__name__}:Broken", "fails")
    monkeypatch.setattr(registry, "BENCHMARKS", registry.BENCHMARKS | {"toy": toy, "toy2": toy, "broken": broken})


def test_every_benchmark_is_there_and_listed_with_its_sentence(tmp_path: Path, capsys):
    for entry in BENCHMARKS.values():
        module, _, name = entry.place.partition(":")
        assert any(isinstance(d, ast.ClassDef) and d.name == name for d in cli._definitions(module)), entry.place
    assert bench(results=tmp_path) == 0
    out = capsys.readouterr().out
    assert all(name in out and entry.sentence in out for name, entry in BENCHMARKS.items())
    assert not list(tmp_path.iterdir())


def test_a_run_prints_writes_and_appends_and_the_report_draws_it(tmp_path: Path, capsys):
    results, file = tmp_path / "history", tmp_path / "all.json"
    assert bench("toy", "toy2", "repeats=5", "sizes=[4]", json=file, results=results) == 0
    assert bench("toy", results=results) == 0
    captured = capsys.readouterr()
    assert "size 4  12 things/s" in captured.out and "≥ 1.5 things/s" in captured.out and "met" in captured.out
    assert captured.err.count("no peer here") == 3
    written = json.loads(file.read_bytes())
    assert [(r["benchmark"], r["parameters"]) for r in written] == [
        (name, {"repeats": 5, "sizes": [4]}) for name in ("toy", "toy2")
    ]
    assert written[0]["changed"] == {"repeats": 5, "sizes": [4]}
    assert "repeats=5, sizes=[4]" in captured.out, "a target that was judged by other parameters says so"
    assert written[0]["machine"]["cores"] >= 1 and written[0]["versions"]["numpy"]
    history = read_history(results)
    assert [len(history[name]) for name in ("toy", "toy2")] == [2, 1]
    assert msgspec.to_builtins(history["toy"][0]) == written[0] | {"load": tuple(written[0]["load"])}
    assert report(results=results, out=tmp_path / "page") == 0
    page = (tmp_path / "page" / "report.md").read_text()
    assert "2 met, 1 open, 0 missed" in page and "- no peer here" in page
    assert "| size 4 | 12 things/s |" in page and "| size 2 | 4 things/s |" in page
    assert (tmp_path / "page" / "report.png").read_bytes().startswith(PNG)
    assert "cores of" in page and "repeats=5, sizes=[4]." in page


def test_the_picture_has_runs_of_the_newest_ones_parameters(tmp_path: Path):
    for settings in (["repeats=5"], ["sizes=[2]"], ["repeats=5"]):
        bench("toy", *settings, results=tmp_path)
    history = read_history(tmp_path)
    assert suite_report._draw(history).axes[0].get_title(loc="left").startswith("toy: 2 runs")
    newest = history["toy"][-1]
    lost = msgspec.structs.replace(newest, rows=[*newest.rows, figure("lost", "things", [3], at_most=0.0)])
    drawn = suite_report._draw({"toy": [lost]}).axes[0]
    assert drawn.get_title(loc="left").endswith("1 more missed, not on this axis")
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["size 1", "size 2"]


def test_a_benchmark_that_fails_takes_no_figures_with_it(tmp_path: Path):
    file = tmp_path / "all.json"
    with pytest.raises(NguError, match="its peer has died"):
        bench("toy", "broken", json=file, results=tmp_path)
    assert [r["benchmark"] for r in json.loads(file.read_bytes())] == ["toy"]
    assert len(read_history(tmp_path)["toy"]) == 1


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --results"):
        bench("broken", results=tmp_path / "file" / "history")
    with pytest.raises(ConfigError, match="choose another --json"):
        bench("broken", json=tmp_path / "nowhere" / "all.json", results=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tyo",), "did you mean 'toy'"),
        (("toy", "bogus=1"), r"no such parameter \(toy: repeats, sizes\)"),
        (("toy", "sizes=3"), r"toy: \[sizes\] expected a list, got `int`"),
        (("toy", "repeats=0"), "toy: .*repeats"),
        (("toy", "sizes=[]"), "toy: these parameters leave nothing to measure"),
        (("repeats=1",), "name a benchmark"),
        (("samplers", "sampler.kind=bogus"), "samplers: .*bogus"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words) as error:
        bench(*arguments, results=tmp_path)
    assert "\n" not in error.value.message


def test_a_history_of_something_else_and_an_empty_one_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no results yet"):
        report(results=tmp_path)
    (tmp_path / "toy.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(NguError, match="not a file of results"):
        report(results=tmp_path)


def test_ctrl_c_reaches_the_benchmark_and_none_of_its_children():
    """They would leave their servers' files behind; the end of their input is theirs."""
    with Measurer(sys.executable, "tokenize") as child:
        assert os.getpgid(child._process.pid) == child._process.pid
    assert child._process.returncode == 0


def test_a_checkout_that_differs_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or whole runs would go on with those of other code."""
    monkeypatch.setattr(suite_results, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert suite_results.commit() == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "file").write_text("a")
    for args in (["init", "-q"], ["add", "file"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *args], check=True)
    names = [suite_results.commit()]
    for text in ("b", "c"):
        (tmp_path / "file").write_text(text)
        names.append(suite_results.commit())
    assert len(set(names)) == 3 and "+" not in names[0] and all(n.startswith(f"{names[0]}+") for n in names[1:])


def test_sides_take_turns_and_the_first_repeat_is_left_out():
    order: list[str] = []
    sides = {name: (lambda name=name: (order.append(name), float(len(order)))[1]) for name in "abc"}
    found = interleaved(sides, repeats=2)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}


def test_a_figure_is_a_median_with_its_interval_and_a_ratio_is_of_pairs():
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    row = figure("x", "s", values)
    assert row.median == statistics.median(values) and row.num == 5 and row.low < 3.0 < row.high
    assert figure("x", "s", [2.0]) == Row("x", "s", 2.0, 2.0, 2.0, 1)
    # Both sides doubled by a busy machine in one repeat: the ratio does not see it.
    steady = ratio("x", [2.0, 4.0, 2.0], [1.0, 2.0, 1.0])
    assert (steady.low, steady.median, steady.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ({"at_least": 1.0}, "met"),
        ({"at_least": 2.0}, "open"),
        ({"at_least": 4.0}, "missed"),
        ({"at_most": 3.0}, "met"),
        ({"at_most": 2.0}, "open"),
        ({"at_most": 0.5}, "missed"),
        ({}, None),
    ],
)
def test_a_target_is_judged_by_the_interval(target: dict[str, float], outcome: str | None):
    assert Row("x", "s", 2.0, 1.0, 3.0, 9, **target).outcome == outcome


def test_samplers_counts_decisions():
    rows = SamplersBench(sampler=FixedConfig(4), problems=(50, 2000), decisions=500).run(print)
    assert [row.what for row in rows if row.num > 1] == ["50 problems", "2,000 problems"]
    assert all(row.median > 0 and row.at_least is None for row in rows)
    assert rows[0].num >= 500 / 50 and rows[1].median >= rows[0].low
