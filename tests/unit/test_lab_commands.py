"""`ngu lab`: what its verbs print and write, sweeps that were interrupted, and replays of a recorded run."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from bench.files import config_key, read_results
from bench.lab import commands, runner
from bench.lab.commands import compare, replay_, simulate_
from bench.lab.config import load_lab_config
from bench.lab.population import make_population
from bench.lab.recorded import read_ledger
from bench.lab.replay import replay
from bench.lab.sweep import Result, load_sweep, run_sweep
from pipeline import cli, rundir
from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.ledger import Ledger
from pipeline.messages import Rollout, SamplingParams, Verdict, VersionSpan, Work
from samplers.base import Problem
from samplers.fixed import FixedConfig
from samplers.registry import SamplerConfig

SMALL = ["max_rollouts=600", "learner.batch_size=64", "lab.population.kind=levels", "lab.population.num_problems=80"]
PNG = b"\x89PNG"


# --- compare and simulate ---


def test_compare_writes_a_table_a_plot_and_all_it_measured(tmp_path: Path, capsys):
    plot, out = tmp_path / "c.png", tmp_path / "c.json"
    assert compare("fixed", "never_give_up", *SMALL, budget=500, seeds=2, plot=plot, json=out, jobs=1) == 0
    printed = capsys.readouterr().out
    for words in ("never_give_up", "rollouts", "problems solved", "wasted on all-wrong", "w(p)", "signal to noise"):
        assert words in printed
    assert plot.read_bytes().startswith(PNG)
    found = json.loads(out.read_bytes())
    assert list(found) == ["fixed", "never_give_up"]
    assert [r["seed"] for r in found["fixed"]] == [0, 1]
    assert all(500 <= r["rollouts"] < 600 for reports in found.values() for r in reports)


def test_compare_takes_files_and_settings(tmp_path: Path, capsys):
    (tmp_path / "a.toml").write_text('max_rollouts = 300\n[sampler]\nkind = "fixed"\nnum_rollouts = 4\n')
    plot = tmp_path / "c.png"
    assert compare(str(tmp_path / "a.toml"), "speed", "max_rollouts=200", plot=plot, jobs=1) == 0
    assert "speed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fixed",), "at least two"),
        (("fixed", "fixed"), "at least two"),
        (("fixed", "bogus"), "bogus: neither a file nor a kind"),
        (("fixed", "speed", "sampler.bogus=1"), "unknown key 'bogus'"),
    ],
)
def test_compare_refuses_in_one_line(arguments: tuple[str, ...], words: str):
    with pytest.raises(ConfigError, match=words) as error:
        compare(*arguments)
    assert "\n" not in error.value.message


def test_compare_refuses_different_populations(tmp_path: Path):
    path = tmp_path / "a.toml"
    path.write_text('[lab.population]\nkind = "beta"\n')
    with pytest.raises(ConfigError, match="differs"):
        compare(str(path), "fixed")


def test_simulate_without_hard_problems_or_anything_trained_still_prints_and_draws(tmp_path: Path, capsys):
    easy = ["lab.population.kind=beta", "lab.population.a=50", "lab.population.b=0.1", "max_rollouts=100"]
    assert simulate_(*easy, plot=tmp_path / "s.png", json=tmp_path / "s.json") == 0
    assert "rollouts to solve, hard" in capsys.readouterr().out
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)


def test_an_output_that_cannot_be_written_is_an_error(tmp_path: Path):
    for option in ("json", "plot"):
        with pytest.raises(ConfigError, match=f"choose another --{option}"):
            simulate_(*SMALL, **{option: tmp_path / "missing" / "x"})  # pyright: ignore[reportArgumentType]


def test_check_prints_every_figure_and_fails_when_one_is_off(monkeypatch, tmp_path: Path, capsys):
    from bench.lab.check import Row

    rows = [Row("case", "E[N]", 1.0, 0.1, 1.2), Row("case", "P(accept)", 0.5, 0.0, 0.5)]
    monkeypatch.setattr("bench.lab.check.check", lambda: iter(rows))
    assert simulate_(check=True, json=tmp_path / "check.json") == 0
    assert "0 off" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "check.json").read_bytes())) == 2
    rows.append(Row("case", "w(p)", 1.0, 0.1, 2.0))
    assert simulate_(check=True) == 1
    assert "OFF" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="takes no config"):
        simulate_("run.toml", check=True)


def test_the_help_line_of_a_verb_with_sub_commands():
    line = cli._first_line(EntryPoint("lab", "bench.lab.commands:app", cli.GROUP))
    assert line == commands.app.help


def test_every_kind_of_sampler_has_a_name():
    assert len(set(commands.KINDS)) == len(SamplerConfig.__args__) and None not in commands.KINDS


# --- sweep ---


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text("max_rollouts = 200\n")
    path = tmp_path / "sweep.toml"
    path.write_text(
        'base = "base.toml"\nseeds = 2\n[vary]\n"sampler.round_size" = [2, 4]\n"learner.batch_size" = [32]\n'
    )
    return path


def test_a_sweep_covers_its_grid_and_prints_the_best_first(sweep_file: Path, tmp_path: Path, capsys):
    out = tmp_path / "results.jsonl"
    assert commands.sweep(sweep_file, out=out, jobs=1, json=tmp_path / "s.json") == 0
    results = read_results(out, Result)
    assert [r.settings["sampler.round_size"] for r in results] == [2, 2, 4, 4]
    assert [r.report.seed for r in results] == [0, 1, 0, 1]
    assert "sampler.round_size" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "s.json").read_bytes())) == 4


def test_an_interrupted_sweep_goes_on_and_equals_one_that_was_not(sweep_file: Path, tmp_path: Path, monkeypatch):
    cells = load_sweep(sweep_file)
    whole = run_sweep(cells, tmp_path / "whole.jsonl", 1, lambda _: None)
    out = tmp_path / "torn.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    simulated, advanced = [], []

    def counted(config):
        simulated.append(config)
        return runner.World(config, make_population(config.lab, config.seed)).run()

    monkeypatch.setattr(runner, "simulate", counted)
    assert run_sweep(cells, out, 1, advanced.append) == whole
    assert len(simulated) == 3 and advanced == [1, 1, 1, 1]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_changed_grid_reuses_what_it_can(sweep_file: Path, tmp_path: Path):
    run_sweep(load_sweep(sweep_file), tmp_path / "r.jsonl", 1, lambda _: None)
    sweep_file.write_text(sweep_file.read_text().replace("[2, 4]", "[4, 8]"))
    advanced: list[int] = []
    run_sweep(load_sweep(sweep_file), tmp_path / "r.jsonl", 1, advanced.append)
    assert advanced == [2, 1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[vary", "not a sweep"),
        ("seeds = 0\n[vary]\na = [1]\n", "not a sweep"),
        ('[vary]\n"sampler.round_size" = []\n', "not a sweep"),
        ('[vary]\n"sampler.round_size" = [4, 99]\n', "sampler.round_size=99.*max_attempts"),
        ('[vary]\n"sampler.bogus" = [4]\n', "unknown key 'bogus'"),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_runs(tmp_path: Path, text: str, words: str):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        load_sweep(tmp_path / "s.toml")
    assert "\n" not in error.value.message
    with pytest.raises(ConfigError, match="no such file"):
        load_sweep(tmp_path / "missing.toml")


@pytest.mark.parametrize("data", [b"problem_id,rate\n", b"my notes", b'{"key":1}\n'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, data: bytes):
    path = tmp_path / "notes"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a file of results"):
        read_results(path, Result)
    assert path.read_bytes() == data


def test_keys_tell_configs_apart():
    keys = [config_key(load_lab_config(None, [f"seed={seed}"])) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]


# --- replay ---


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten easy problems, always right, and ten hard ones: never right, but one in its second round."""
    settings = ["sampler.kind=never_give_up", "learner.batch_size=16", "sampling.max_new_tokens=200"]
    path = rundir.create(tmp_path / "run", load_config(None, settings))
    ledger = Ledger(path / "ledger.sqlite")
    for i in range(20):
        level = "easy" if i < 10 else "hard"
        problem = Problem(f"{level}{i}", "test", "", "", level)
        for round in range(2 if i == 19 else 1):
            for place in range(4):
                right = level == "easy" or (round == 1 and place == 0)
                _record(ledger, Work(100 * i + 4 * round + place, i, round, problem, SamplingParams(1.0, 9)), right)
    ledger.end(list(range(1904, 1908)), "trained", 1)
    ledger.close()
    return path


def _record(ledger: Ledger, work: Work, right: bool) -> None:
    ledger.launch([work])
    spans, ids = (VersionSpan(0, 0),), b"\0" * 4 * (10 if right else 30)
    rollout = Rollout(work.attempt_id, work.chain_id, work.round, b"", ids, ids, spans, "stop", "", "e", 0, 0)
    ledger.judge([rollout], [Verdict("correct" if right else "incorrect", float(right))])


def test_a_ledger_becomes_a_population(run: Path):
    records = {r.problem_id: r for r in read_ledger(run)}
    assert len(records) == 20
    last = records["hard19"]
    assert (last.launched, last.judged, last.correct, last.trained) == (8, 8, 1, 4)
    assert (last.first_judged, last.first_correct) == (4, 0)
    settings = ["lab.population.kind=ledger", f"lab.population.run={run}", "lab.lengths.spread=0"]
    made = make_population(load_lab_config(None, settings).lab, 0)
    rates = {p.problem_id: rate for p, rate in zip(made.problems, made.pass_rates, strict=True)}
    prior = 1 / 42  # no success in the 40 rollouts of the level's first rounds
    assert rates["hard10"] == pytest.approx(4 * prior / 8)
    assert rates["hard19"] == pytest.approx((4 * prior + 1) / 12)
    assert made.median_tokens[0] == 10 and made.median_tokens[10] == 30


def test_attempts_folded_into_sums_still_count(run: Path):
    before = {r.problem_id: r for r in read_ledger(run)}
    ledger = Ledger(run / "ledger.sqlite")
    ledger.prune(before_step=2)
    ledger.close()
    after = {r.problem_id: r for r in read_ledger(run)}
    assert after == before  # what was folded is of a second round, so even the first-round counts are whole


def test_replay_says_what_each_sampler_launches(run: Path, tmp_path: Path, capsys):
    found = replay(run, FixedConfig(4))
    assert found.recorded["hard"].launched == 44 and found.recorded["hard"].solved == 1
    for report in (found.same_report, found.other_report):
        assert 84 <= report.rollouts < 84 + 32
        assert report.curve[0].pass_rate == pytest.approx(report.end.pass_rate)
    assert found.same["hard"].launched > found.other["hard"].launched
    assert replay_(run, "sampler.num_rollouts=4", sampler="fixed", json=tmp_path / "r.json") == 0
    assert "easy" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_bytes()) == json.loads(msgspec.json.encode(found))


def test_replay_of_what_is_no_run_or_has_nothing_yet_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such directory"):
        replay(tmp_path / "missing", FixedConfig())
    fresh = rundir.create(tmp_path / "fresh", load_config(None))
    with pytest.raises(ConfigError, match=r"no ledger\.sqlite"):
        replay(fresh, FixedConfig())
    Ledger(fresh / "ledger.sqlite").close()
    with pytest.raises(ConfigError, match="no judged attempt"):
        replay(fresh, FixedConfig())
    (fresh / "ledger.sqlite").write_bytes(b"something else, " * 100)
    with pytest.raises(ConfigError, match="cannot be read as a ledger"):
        replay(fresh, FixedConfig())
