"""`ngu methods`: what it measures of methods over seeds, says, draws and refuses; labels by a user's function."""

import csv
import json
from importlib.metadata import EntryPoint
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from evaluations import N, two_strategies

from bench.coverage import methods_command
from bench.coverage.methods import Methods, Trained, compare_methods
from bench.coverage.methods_words import sentences
from bench.coverage.training import snapshots
from bench.scaling.reshaping import interference, thinned_interference
from learner.evaluation.outcomes import RolloutOutcome, write_outcomes
from learner.evaluation.source import ModelSource
from learner.evaluation.strategies import find_label
from pipeline import cli
from pipeline.at_k import pass_at_k
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.messages import Problem

KS = [1, 4, 64]
SHARES = {"fixed": 0.97, "ngu": 0.6}  # of the strategy that solves half of the problems


def runs(num_seeds: int = 3) -> list[Trained]:
    return [
        Trained(name, seed, two_strategies(share, 10 * i + seed + 1))
        for i, (name, share) in enumerate(SHARES.items())
        for seed in range(num_seeds)
    ]


@pytest.fixture(scope="module")
def found() -> Methods:
    return compare_methods(two_strategies(0.5, 99), runs(), KS)


def test_a_method_is_the_mean_of_its_seeds(found: Methods):
    of_fixed = [run.outcomes for run in runs() if run.method == "fixed"]
    for k, base, estimate, gain in zip(KS, found.base, found.methods[0].pass_at_k, found.methods[0].gain, strict=True):
        rates = []
        for outcomes in of_fixed:
            correct = np.array([sum(r.correct for r in outcomes if r.problem_id == f"p{i}") for i in range(40)])
            rates.append(pass_at_k(np.full(40, N), correct, k).mean())
        assert estimate.value == pytest.approx(np.mean(rates)) and gain.value == pytest.approx(np.mean(rates) - base)
        assert estimate.low == pytest.approx(min(rates)) and estimate.high == pytest.approx(max(rates))
    for method in found.methods:
        assert method.reweighted is not None and method.taught is not None
        assert method.reweighted.value + method.taught.value == pytest.approx(method.gain[0].value)
        assert sum(e.value for e in method.shares.values()) == pytest.approx(1.0)
        levels = [e.value for e in method.gain_by_level.values()]
        assert np.mean(levels) == pytest.approx(method.gain[-1].value), "as many problems at either level"
    fixed, ngu = found.methods
    assert fixed.against_first == []
    assert [e.value for e in ngu.against_first] == pytest.approx(
        [b.value - a.value for a, b in zip(fixed.pass_at_k, ngu.pass_at_k, strict=True)]
    )


def test_what_narrows_is_told_from_what_does_not(found: Methods):
    says = sentences(found)
    assert says[0].startswith("fixed (3 seeds) narrows coverage: pass@64 falls") and "narrows" not in says[1]
    assert any(line.startswith("ngu against fixed, paired by seed: pass@1 ") for line in says)
    assert any(line.startswith("fixed moves pass@64 down at y") for line in says)
    alone = sentences(compare_methods(two_strategies(0.5, 99), runs(1), KS))
    assert alone[0].startswith("fixed (1 seed) shows nothing for sure; pass@1 ")
    assert not any("[" in line or "narrows" in line or "widens" in line for line in alone), "one seed shows nothing"


def test_models_need_problems_in_common_and_seeds_of_their_own():
    base = two_strategies(0.5, 1)
    with pytest.raises(ConfigError, match="0 of 40 problems have 65 judged rollouts"):
        compare_methods(base, runs(1), [1, 65])
    with pytest.raises(ConfigError, match="two runs of fixed have the seed 0"):
        compare_methods(base, [*runs(1), *runs(1)], KS)
    plain = [Trained("a", 0, two_strategies(0.9, 2, label=False))]
    assert compare_methods(two_strategies(0.5, 1, label=False), plain, KS).methods[0].reweighted is None


# --- over training ---


def test_fewer_rollouts_are_the_mean_over_what_could_have_been_drawn():
    correct = np.array([0, 1, 3, 4])
    solved = {"4": [1, 1, 0, 1, 1]}
    assert thinned_interference(solved, 4) == interference(np.full(4, 4), correct)
    thin = thinned_interference(solved, 2)
    rates = [sum(pair) / 2 for c in correct for pair in combinations([1] * c + [0] * (4 - c), 2)]
    every = interference(np.full(len(rates), 2), np.array([round(2 * r) for r in rates]))
    assert thin.zero_mass == pytest.approx(every.zero_mass) and thin.histogram == pytest.approx(every.histogram)
    assert thin.distance_to_uniform == pytest.approx(every.distance_to_uniform)


def write_run(run: Path, seed: int, sampler: str) -> None:
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"seed": seed, "sampler": {"kind": sampler}}))
    evals = [
        {"kind": "eval", "step": 0, "rollouts": 0, "solved": {"1": [1, 0], "4": [3, 1, 0, 0, 0]}},
        {"kind": "eval", "step": 2, "rollouts": 64, "solved": {"2": [1, 1, 1]}},
        {"kind": "eval", "step": 4, "rollouts": 128, "solved": {"4": [0, 0, 0, 0, 4]}},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evals))


def test_evaluations_of_a_run_are_compared_at_the_fewest_rollouts(tmp_path: Path):
    write_run(tmp_path / "run", 0, "fixed")
    found = snapshots(tmp_path / "run")
    assert [s.rollouts for s in found] == [0, 64, 128] and {s.num_rollouts for s in found} == {2}
    # A problem that is right once in four is never right in half of the pairs; one with a single rollout is left out.
    assert [s.pass_at_1.zero_mass for s in found] == pytest.approx([3.5 / 4, 1 / 3, 0.0])


# --- labels ---


def test_a_label_is_a_users_function(tmp_path: Path):
    problem = Problem("p", "else", "2+2?", "4")
    file = tmp_path / "labels.py"
    file.write_text(
        "def first(problem, text):\n    return text.split()[0]\ndef none(problem, text):\n    return None\n"
    )
    assert find_label(f"{file}:first")(problem, "Guess: 4") == "Guess:"
    assert find_label(None)(problem, "Guess: 4") == ""
    for name, text, words in (("first", "", "IndexError at labels.py:2"), ("none", "x", "returned None")):
        with pytest.raises(ConfigError, match=words):
            find_label(f"{file}:{name}")(problem, text)
    with pytest.raises(ConfigError, match=r"--strategy: .* has no function 'third'"):
        find_label(f"{file}:third")


# --- the verb ---


@pytest.fixture
def ngu(monkeypatch: pytest.MonkeyPatch):
    verb = EntryPoint("methods", "bench.coverage.methods_command:methods", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [verb])
    return lambda *argv: cli.main(["methods", *(str(a) for a in argv)])


def test_from_runs_to_a_figure_and_again_from_its_files(ngu, tmp_path: Path, monkeypatch, capsys):
    asked = []

    def roll_out(source, config, problems, num_rollouts, name, strategy):
        asked.append((source.name, num_rollouts, name, strategy))
        seed, is_base = len(asked), source.name == "builtin"
        return two_strategies(0.5 if is_base else SHARES["fixed" if "fixed" in source.name else "ngu"], seed)

    monkeypatch.setattr(methods_command, "roll_out", roll_out)
    monkeypatch.setattr("learner.evaluation.source.find_model", lambda name: ModelSource(name, name, None))
    monkeypatch.setattr("learner.evaluation.source.eval_config", lambda sources, settings, task: Config())
    dirs = [tmp_path / "runs" / name / f"seed_{seed}" for name in ("fixed_8", "ngu") for seed in (0, 1)]
    for run in dirs:
        write_run(run, int(run.name[-1]), run.parent.name)
    out, labels = tmp_path / "out", "labels.py:f"
    argv = ("--k", "1..64", "--seed", 5, "--strategy", labels, "--out", out)
    assert ngu("builtin", *dirs, "task.eval_per_level=2", *argv) == 0
    assert asked[0] == ("builtin", 64, "base/5", labels)
    assert [name for _, _, name, _ in asked[1:]] == [f"{m}.seed_{s}/5" for m in ("fixed_8", "ngu") for s in (0, 1)]
    said = capsys.readouterr().out
    for words in ("ngu against fixed_8", "methods.svg", "never solved"):
        assert words in said
    rows = list(csv.DictReader((out / "methods.csv").read_text().splitlines()))
    panels = {r["panel"] for r in rows}
    assert panels >= {"coverage", "gain", "change of pass@1", "histogram", "zero_mass", "distance_to_uniform"}
    assert (out / "methods.png").read_bytes().startswith(b"\x89PNG")

    files = [out / f"{run.parent.name}.{run.name}.jsonl" for run in dirs]
    monkeypatch.setattr("bench.scaling.figures.save", lambda *given: [])  # drawing takes seconds
    capsys.readouterr()
    assert ngu(out / "base.jsonl", *files, "--k", "1..64", "--out", tmp_path / "again", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert len(asked) == 5 and again["found"] == json.loads((out / "methods.json").read_text())["found"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base.jsonl"], "no runs to compare"),
        (["base.jsonl", "base.jsonl"], "name it METHOD.seed_N.jsonl"),
        (["base.jsonl", "empty"], "not a run with a config.json"),
        (["base.jsonl", "a.seed_0.jsonl", "--k", "1..128"], "of 3 problems have 128"),
        (["gone.jsonl", "a.seed_0.jsonl"], "gone.jsonl: no such file"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(ngu, tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    rows = [RolloutOutcome(f"p{i}", "", True, 1.0, 5, False) for i in range(3) for _ in range(4)]
    for name in ("base.jsonl", "a.seed_0.jsonl"):
        write_outcomes(tmp_path / name, rows)
    assert ngu(*words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
