"""`ngu coverage` on evaluations whose truth is known: what it measures, says, draws and refuses."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from evaluations import N, two_strategies

from bench.coverage import commands
from bench.coverage.compare import Comparison, compare, pair_up
from bench.coverage.figure import draw
from bench.coverage.words import sentences
from learner.evaluation.outcomes import RolloutOutcome, read_outcomes, write_outcomes
from pipeline import cli
from pipeline.at_k import pass_at_k
from pipeline.errors import ConfigError
from pipeline.estimates import parse_ks

Ngu = Callable[..., int]


@pytest.fixture
def ngu(monkeypatch: pytest.MonkeyPatch) -> Ngu:
    verb = EntryPoint("coverage", "bench.coverage.commands:coverage", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [verb])
    return lambda *argv: cli.main([str(a) for a in argv])


def comparison(before: list[RolloutOutcome], after: list[RolloutOutcome], k: str = "1..64") -> Comparison:
    ks = parse_ks(k)
    return compare(pair_up(before, after, ks[-1]), ks, seed=0)


def test_a_sharpened_policy_crosses_and_narrows():
    found = comparison(two_strategies(0.5, 1), two_strategies(0.98, 2))
    says = "\n".join(sentences(found))
    star = found.coverage.crossing.n_star
    assert star is not None and 1 < star < 8
    assert found.coverage.crossing.crossed_frac > 0.9
    for words in ("Coverage narrowed", "From N* =", "level y fell", "several runs"):
        assert words in says
    two_stages = found.strategies
    assert two_stages is not None
    assert two_stages.names == ["a", "b"]
    assert two_stages.reweighted.value == pytest.approx(0.06, abs=0.02)
    assert two_stages.taught.value == pytest.approx(0.0, abs=0.03)
    assert two_stages.share_after[0] == pytest.approx(0.98, abs=0.02)


def test_equal_models_show_no_change():
    found = comparison(two_strategies(0.5, 1), two_strategies(0.5, 2), "1..8")
    gap = found.coverage.crossing.gap_at_k_max
    assert gap.low < 0 < gap.high
    assert any("Coverage is not shown to change" in s for s in sentences(found))
    assert len(found.changed.surely_better) + len(found.changed.surely_worse) <= 1


def test_a_policy_that_learned_something_new_widens():
    before, after = two_strategies(1.0, 1), two_strategies(0.5, 2)
    found = comparison(before, after)
    assert any("Coverage widened" in s for s in sentences(found))
    assert found.coverage.crossing.n_star is None
    assert set(found.changed.gained) == {f"p{i}" for i in range(1, 40, 2)}
    assert len(found.changed.surely_better) > 12
    assert found.base_pass_at_1.zero_mass == 0.5


def test_solved_by_both_tells_nothing():
    rows = [RolloutOutcome(f"p{i}", "", True, 1.0, 5, False) for i in range(5) for _ in range(4)]
    says = sentences(comparison(rows, rows, "1..4"))
    assert "cannot tell their coverage" in says[0]
    assert any("cannot be measured" in s for s in says)


def test_curves_equal_a_direct_computation():
    before, after = two_strategies(0.5, 1), two_strategies(0.9, 2)
    found = comparison(before, after)
    for rows, estimates in ((before, found.coverage.base), (after, found.coverage.tuned)):
        counts = np.array([sum(r.correct for r in rows if r.problem_id == f"p{i}") for i in range(40)])
        for k, estimate in zip(found.coverage.ks, estimates, strict=True):
            assert estimate.value == pytest.approx(pass_at_k(np.full(40, N), counts, k).mean(), abs=1e-15)
    used = [sum(r.strategy == "a" for r in rows) / len(rows) for rows in (before, after)]
    assert found.strategies is not None
    assert [found.strategies.share_before[0], found.strategies.share_after[0]] == pytest.approx(used)


def test_both_sides_are_cut_to_the_same_rollouts():
    before, after = two_strategies(0.5, 1), two_strategies(0.5, 2)
    del after[3:5]  # two verdicts of p0 are missing
    pair = pair_up(before, after, 32)
    assert [len(p.rollouts) for p in pair.base] == [len(p.rollouts) for p in pair.tuned] == [62] + [64] * 39
    assert pair_up(before, after, 64).num_left_out == 1
    assert len(pair_up(before, after, 64).base) == 39
    with pytest.raises(ConfigError, match="0 of 40 common problems have 100"):
        pair_up(before, after, 100)
    with pytest.raises(ConfigError, match="no problem in common"):
        pair_up(before, [RolloutOutcome("q", "", True, 1.0, 1, False)], 1)


def test_the_figure_has_the_panels_that_the_data_allow():
    labelled = two_strategies(0.5, 1), two_strategies(0.9, 2)
    plain = two_strategies(0.5, 1, label=False), two_strategies(0.9, 2, label=False)
    titles = []
    for before, after in (labelled, plain):
        pair = pair_up(before, after, 4)
        figure, rows = draw(compare(pair, [1, 4], 0), pair)
        titles.append([a.get_title(loc="left") for a in figure.axes if a.axison])
        assert {len(row) for row in rows} == {6}
    assert len(titles[0]) == 5
    assert [t for t in titles[0] if t not in titles[1]] == ["Strategies (what was right: full)"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    write_outcomes(paths[0], two_strategies(0.5, 1))
    write_outcomes(paths[1], two_strategies(0.98, 2))
    return paths


def test_files_are_compared_drawn_and_put_in_words(
    ngu: Ngu, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    assert ngu("coverage", *files, "--k", "1..64", "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    for words in ("base pass@1", "Coverage narrowed", "false discovery", "slope", "coverage.svg"):
        assert words in said
    names = [f"coverage.{e}" for e in ("csv", "json", "png", "svg")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    report = json.loads((tmp_path / "out" / "coverage.json").read_text())
    rows = list(csv.DictReader((tmp_path / "out" / "coverage.csv").read_text().splitlines()))
    drawn = [float(r["value"]) for r in rows if (r["panel"], r["series"]) == ("coverage", "tuned")]
    assert drawn == [e["value"] for e in report["found"]["coverage"]["tuned"]]

    monkeypatch.setattr("bench.scaling.figures.save", lambda *given: [])  # drawing takes seconds
    assert ngu("coverage", *files, "--k", "1..64", "--out", tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out) == report


def test_models_are_evaluated_on_the_same_problems_and_kept(
    ngu: Ngu, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def roll_out(source, config, problems, num_rollouts, name, strategy):
        asked.append((source.name, len(problems), num_rollouts, name))
        return two_strategies(0.5 if source.name == "builtin" else 0.9, len(asked))

    monkeypatch.setattr(commands, "roll_out", roll_out)
    monkeypatch.setattr("bench.scaling.figures.save", lambda *given: [])  # drawing takes seconds
    out = tmp_path / "out"
    argv = ["task.eval_per_level=2", "--k", "1..32", "--rollouts", "64", "--seed", "3", "--out", out]
    assert ngu("coverage", "builtin", "builtin:show_your_work", *argv) == 0
    assert asked == [("builtin", 30, 64, "base/3"), ("builtin:show_your_work", 30, 64, "tuned/3")]
    assert read_outcomes(out / "base.jsonl") == two_strategies(0.5, 1)

    assert ngu("coverage", out / "base.jsonl", "builtin:show_your_work", *argv) == 0
    assert asked[2:] == [("builtin:show_your_work", 30, 64, "tuned/3")]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.jsonl", "B"], "nowhere.jsonl: no such file"),
        (["nowhere", "B"], "nowhere: no such directory"),
        (["A", "B", "--k", "1"], "needs k of 2 or more"),
        (["A", "B", "--k", "1..512"], "0 of 40 common problems have 512"),
        (["A", "B", "--out", "A"], "choose another --out"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    ngu: Ngu, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, argv, words: str
):
    monkeypatch.chdir(tmp_path)
    named = {"A": files[0], "B": files[1]}
    assert ngu("coverage", *(named.get(a, a) for a in argv)) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_help_and_files_of_outcomes_load_no_torch():
    probe = (
        "import sys, bench.coverage.commands, bench.coverage.compare, bench.coverage.words, learner.evaluation.report;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
