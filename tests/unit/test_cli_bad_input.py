"""What a user gets wrong: one line on stderr, exit status 2, and nothing half-written."""

import json

import pytest

from pipeline.cli import main


@pytest.fixture
def files(tmp_path):
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    (tmp_path / "no_config").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "fields.jsonl").write_text(json.dumps({"question": "1+1?", "reply": "2"}) + "\n")
    (tmp_path / "broken.toml").write_text("[learner\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.toml"], "no such file"),
        (["broken.toml"], "not a readable TOML file"),
        (["task.kind=jsonl", "task.path=nope.jsonl"], "no such file"),
        (["task.kind=jsonl", "task.path=empty.jsonl"], "empty"),
        (["task.kind=jsonl", "task.path=fields.jsonl"], "'answer'"),
        (["task.kind=reasoning_gym", "task.name=chain_sums"], "chain_sum"),
        (["learner.lrr=1"], "did you mean 'lr'"),
        (["sampling.temperature=0"], "temperature must be above 0"),
        (["sampling.top_p=0.9"], "top_p"),
        (["model.path=nope"], "no such directory"),
        (["model.path=no_weights"], "no weights"),
        (["learner.kl.reference=nope"], "learner.kl.reference nope: no such directory"),
        (["model.path=no_config"], "no config.json"),
        (["model.path=builtin:nope"], "no such built-in model"),
        (["task.kind=reasoning_gym", "task.name=gcd"], "set model.path"),
        (["max_rollouts=0"], "would never end"),
        (["max_rollouts=383"], "no step would be trained"),
        (["learner.lr"], "a setting is written key=value"),
        (["learner.lr=inf"], "finite"),
        (["sampling.max_new_tokens=512"], "do not fit into the 512 positions"),
        (["sampling.max_new_tokens=256", "sampler.seq_multiplier=2"], "do not fit into the 512 positions"),
        (["sampling.max_new_tokens=128", 'guards.starvation=["continue_truncated"]'], "completions of 512 tokens"),
        (["learner.betas=[0.9, 1.0]"], "[learner.betas[1]] expected `float` < 1.0"),
        (["model.path=" + "x" * 300], "File name too long"),
        (["model.path=~no-such-user/x"], "model.path ~no-such-user/x"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(files, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    assert main(["train", "--run-dir", "run", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ngu: error: ")
    assert says in error
    assert error.count("\n") == 1
    assert sorted(files.rglob("*")) == before
