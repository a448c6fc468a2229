"""`ngu eval` as a user calls it: what it can evaluate, what it writes, and how it refuses."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from tiny_models import TOKENS, save_model_dir, tiny_model

from learner.evaluation.outcomes import read_outcomes
from learner.evaluation.report import evaluate_outcomes
from learner.evaluation.source import eval_config, find_model
from pipeline import cli, rundir
from pipeline.config import Config, SamplingConfig
from pipeline.errors import ConfigError
from pipeline.estimates import parse_ks
from pipeline.manifest import write_manifest
from pipeline.tasks.registry import JsonlConfig, ManufactoriaConfig

torch.set_num_threads(1)
Ngu = Callable[..., int]


@pytest.fixture
def ngu(monkeypatch: pytest.MonkeyPatch) -> Ngu:
    verb = EntryPoint("eval", "learner.evaluate:evaluate", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [verb])
    return lambda *argv: cli.main([str(a) for a in argv])


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """Settings of a task whose answers are single letters, which a random model boxes now and then."""
    path = tmp_path / "letters.jsonl"
    path.write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip("abcdef", "abcdef", strict=True))
    )
    return [f"task.path={path}", "task.eval_size=4", "task.prompt_template={question}", "sampling.max_new_tokens=8"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = save_model_dir(tmp_path / "model", "qwen2")
    tiny_model("qwen2", seed=0).save_pretrained(directory)
    return directory


def make_run(directory: Path, config: Config) -> tuple[Path, Path]:
    """A run and a checkpoint in it (of which only the learner's part exists)."""
    run = rundir.create(directory, config)
    checkpoint = run / "checkpoints" / "step_000003"
    weights = checkpoint / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    write_manifest(checkpoint, [weights])
    return run, checkpoint


def test_a_model_is_measured_and_its_outcomes_say_the_same(
    ngu: Ngu, model: Path, task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr("learner.evaluation.generate.SHARED_MEMORY", shared)
    assert len(TOKENS) < 32  # so that a random model finds the right letter
    argv = ["eval", model, *task, "--task", "jsonl", "--k", "2..8", "--rollouts", "12"]
    assert ngu(*argv, "--out", tmp_path / "o.jsonl", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    outcomes = read_outcomes(tmp_path / "o.jsonl")
    assert len(outcomes) == 4 * 12
    assert {o.num_tokens for o in outcomes} <= set(range(1, 9))
    assert any(o.truncated for o in outcomes)
    direct = evaluate_outcomes(outcomes, parse_ks("2..8"), {"": 1.0}, (), 0, str(model), "jsonl")
    assert [a["pass_at_k"]["value"] for a in printed["at"]] == [a.pass_at_k.value for a in direct.at]
    assert [a["worst_at_k"]["low"] for a in printed["at"]] == [a.worst_at_k.low for a in direct.at]
    assert list(shared.iterdir()) == []

    assert ngu(*argv, "--out", tmp_path / "again.jsonl") == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "o.jsonl").read_bytes()
    assert "4 problems, 48 rollouts" in capsys.readouterr().out


def test_when_nothing_can_be_judged_it_says_why(ngu: Ngu, model: Path, task: list[str], tmp_path: Path, capsys):
    (tmp_path / "mine.py").write_text("def score(problem, text, truncated): raise OSError('the judge is away')\n")
    argv = ["eval", model, *task, "task.eval_size=1", "--task", "jsonl", "--k", "1"]
    assert ngu(*argv, f"verifier.reward={tmp_path}/mine.py:score") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "none of the 1 rollouts could be judged" in said and "the judge is away" in said


def test_a_run_means_its_newest_intact_checkpoint_and_its_settings(tmp_path: Path):
    config = Config(task=JsonlConfig(path="p.jsonl"), sampling=SamplingConfig(max_new_tokens=33))
    run, checkpoint = make_run(tmp_path / "run", config)
    (run / "checkpoints" / "step_000004").mkdir()  # torn
    for name in (run, checkpoint):
        found = find_model(str(name))
        assert Path(found.model_path) == checkpoint / "model"
        assert found.run_dir == run
        used = eval_config([found], ["sampling.temperature=0.5"], None)
        assert used.task == config.task
        assert (used.sampling.max_new_tokens, used.sampling.temperature) == (33, 0.5)


def test_without_a_run_the_defaults_hold_and_a_built_in_model_brings_its_task(tmp_path: Path):
    assert eval_config([find_model("builtin")], [], None) == Config()
    assert eval_config([find_model("builtin:manufactoria")], [], None).task == ManufactoriaConfig()
    with_task = eval_config([find_model("builtin")], ["task.families=all"], "manufactoria")
    assert with_task.task == ManufactoriaConfig(families="all")
    (tmp_path / "run.toml").write_text("seed = 5\n")
    assert eval_config([find_model("builtin")], [str(tmp_path / "run.toml")], None).seed == 5


def test_a_torn_checkpoint_is_refused(tmp_path: Path):
    _, checkpoint = make_run(tmp_path / "run", Config())
    (checkpoint / "model" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ConfigError, match="torn"):
        find_model(str(checkpoint))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["RUN"], "this run has no intact checkpoint"),
        (["builtin", "--k", "none"], "--k 'none'"),
        (["builtin", "--k", "8", "--rollouts", "4"], "pass@8 needs at least 8"),
        (["builtin", "task.nothing=1"], "unknown key 'nothing'"),
        (["builtin", "a.toml", "b.toml"], "one config file at most"),
        (["builtin", "missing.toml"], "missing.toml: no such file"),
        (["builtin", "task.eval_per_level=0"], "holds out no problems"),
        (["builtin", "task.path=missing.jsonl", "--task", "jsonl"], "missing.jsonl: no such file"),
        (["builtin", "verifier.reward=absent.py:score"], "absent.py: no such file"),
        (["builtin", "--out", "nowhere/o.jsonl"], "choose another --out"),
        (["builtin", "--out", "run"], "choose another --out"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    ngu: Ngu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, argv: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    rundir.create(tmp_path / "run", Config())
    assert ngu("eval", *("run" if a == "RUN" else a for a in argv)) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
