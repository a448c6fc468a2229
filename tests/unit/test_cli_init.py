"""The commented TOML that `ngu init` writes from the schema."""

import tomllib
from operator import attrgetter
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.config import Config, dump_config, load_config, parse_config
from pipeline.init_config import render_config
from pipeline.recipes import RecipeName, load_recipe
from pipeline.tasks.registry import JsonlConfig, ReasoningGymConfig

TOML_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_written_file_is_the_default_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.toml"
    assert main(["init", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert load_config(path) == Config()


@pytest.mark.parametrize("name", get_args(RecipeName))
def test_a_recipe_is_a_valid_file_that_says_what_it_lacks(name: str, tmp_path: Path):
    path = tmp_path / "run.toml"
    assert main(["init", str(path), "--recipe", name]) == 0
    about, config = load_recipe(name)
    text = path.read_text()
    assert load_config(path) == config != Config()
    assert parse_config(msgspec.json.decode(msgspec.json.encode(dump_config(config))), "stored") == config
    assert text.startswith(f"# Recipe {name}. ")
    assert "Not available" in about or name in ("grpo", "isocompute-hard", "ngu")
    assert (config.task, config.model, config.max_rollouts) == (Config().task, Config().model, Config().max_rollouts)


def test_an_unknown_recipe_is_wrong_usage(tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main(["init", str(tmp_path / "run.toml"), "--recipe", "nope"])
    assert ended.value.code == 2
    assert not (tmp_path / "run.toml").exists()


def test_every_setting_is_named():
    text = render_config(Config(), alternatives=True)
    for field in msgspec.structs.fields(Config):
        assert f"{field.encode_name} = " in text or f"[{field.encode_name}]" in text
    assert "max_steps = 0  # >= 0" in text
    assert '# one of "correct", "drop"' in text
    assert "# sequence" not in tomllib.loads(text)


@pytest.mark.parametrize(
    ("table", "kind"), [("sampler", "fixed"), ("task", "jsonl"), ("task", "reasoning_gym"), ("learner.loss", "gspo")]
)
def test_an_uncommented_alternative_is_valid(table: str, kind: str):
    blocks = render_config(Config(), alternatives=True).split("# ---- or instead of the table above ----\n")
    (block,) = (b for b in blocks[1:] if b.splitlines()[-1] and f'# kind = "{kind}"' in b)
    lines = [line for line in block.split("\n\n")[0].splitlines() if line.startswith("#")]
    raw = tomllib.loads("\n".join(line.removeprefix("# ") if line != "#" else "" for line in lines))
    required = {"jsonl": {"path": "x.jsonl"}, "reasoning_gym": {"name": "gcd"}}.get(kind, {})
    *outer, leaf = table.split(".")
    for name in outer:
        raw = raw[name]
    filled = {leaf: raw[leaf] | required}
    for name in reversed(outer):
        filled = {name: filled}
    got = attrgetter(table)(parse_config(filled, "test"))
    assert got == type(got)(**required) and got.__struct_config__.tag == kind


@settings(deadline=None)
@given(path=TOML_TEXT, template=TOML_TEXT)
def test_any_text_survives(path: str, template: str):
    config = Config(task=JsonlConfig(path=path, prompt_template=template))
    assert parse_config(tomllib.loads(render_config(config, alternatives=True)), "test") == config


@settings(deadline=None)
@given(
    params=st.dictionaries(TOML_TEXT, st.integers(-(2**60), 2**60) | TOML_TEXT | st.booleans() | st.lists(TOML_TEXT))
)
def test_tables_and_lists_survive(params: dict):
    config = Config(task=ReasoningGymConfig(name="gcd", params=params))
    assert parse_config(tomllib.loads(render_config(config)), "test") == config


def test_an_existing_file_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.toml"
    path.write_text("seed = 7\n")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "seed = 7\n"
    assert "exists already" in capsys.readouterr().err


def test_an_unwritable_place_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", str(tmp_path / "missing" / "run.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
