"""The ledger as a person asks it: queries, the check of the books, and pruning that keeps both."""

import gc
import json
import sqlite3
import sys
from pathlib import Path

import pytest
from fakes import Simulation

from pipeline.config import parse_config
from pipeline.engines.fake import FakeScript
from pipeline.errors import ConfigError, NguError
from pipeline.ledger import Ledger
from pipeline.ledger_cli import COLUMNS, ledger


def run_to_end(path: Path, **daemon: int) -> Simulation:
    raw = {
        "max_rollouts": 480,
        "engines": {"slots": 8},
        "learner": {"batch_size": 32},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 2} | daemon,
    }
    run = Simulation(path, parse_config(raw, "test"), script=FakeScript(lambda p: 0.4, fail_frac=0.05))
    run.run()
    run.ledger.close()
    (path / "config.json").write_text("{}")  # all that makes it a run for the verb
    return run


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Simulation:
    return run_to_end(tmp_path_factory.mktemp("run"))


def rows(capsys, *args, **wanted) -> list[dict]:
    assert ledger(*args, json=True, **wanted) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_attempt_is_listed_and_filters_join(ended, capsys):
    everything = rows(capsys, ended.run_dir)
    assert len(everything) == ended.ledger.counts["launched"]
    assert tuple(everything[0]) == COLUMNS
    step_2 = rows(capsys, ended.run_dir, step=2, fate="trained")
    assert {r["attempt"] for r in step_2} == {r.attempt_id for g in ended.batches[1].groups for r in g.rollouts}
    chain = step_2[0]["chain"]
    assert rows(capsys, ended.run_dir, chain=chain) == [r for r in everything if r["chain"] == chain]
    right = rows(capsys, ended.run_dir, outcome="correct")
    assert right == [r for r in everything if r["outcome"] == "correct"] != []
    assert rows(capsys, ended.run_dir, problem="p1") == [r for r in everything if r["problem"] == "p1"] != []


def test_the_table_has_a_header_and_a_line_an_attempt(ended, capsys):
    assert ledger(ended.run_dir, fate="failed") == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == list(COLUMNS)
    assert len(lines) == ended.ledger.counts["failed"] > 0
    assert all("failed" in line for line in lines)


def test_a_reader_that_leaves_is_no_error(ended, monkeypatch):
    """As `head` does: nothing is left that reads a database which is closed."""
    written: list[str] = []

    def write(line: str) -> None:
        if len(written) == 3:
            raise BrokenPipeError
        written.append(line)

    monkeypatch.setattr("builtins.print", write)
    with pytest.raises(BrokenPipeError):
        ledger(ended.run_dir)
    monkeypatch.undo()
    gc.collect()  # what cannot be closed warns, and warnings are errors


def test_the_books_of_a_finished_run_balance(ended, capsys):
    assert ledger(ended.run_dir, verify=True) == 0
    assert "the books balance" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("DELETE FROM attempts WHERE attempt_id = 40", "1 attempts were launched and"),
        ("UPDATE attempts SET ended_ns = NULL WHERE attempt_id = 40", "1 ended attempts have no end, such as"),
        ("UPDATE attempts SET fate = 0 WHERE attempt_id = 40", "1 open attempts have an end"),
        ("UPDATE attempts SET fate = 99 WHERE attempt_id = 40", "1 attempts ended in a way that has no name"),
        ("UPDATE attempts SET step = NULL WHERE fate = 1", "trained attempts have no step"),
        ("UPDATE attempts SET newest_version = 99 WHERE fate = 1", "before the policy that sampled them"),
        (
            "UPDATE attempts SET step = step + 1 WHERE fate = 1 AND attempt_id % 2",
            "chains were trained by two steps",
        ),
    ],
)  # fmt: skip
def test_each_kind_of_damage_is_found(tmp_path, capsys, damage, words):
    run_to_end(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute(damage).rowcount >= 1
    db.close()
    assert ledger(tmp_path, verify=True) == 1
    out = capsys.readouterr().out
    assert words in out and "the books do not balance" in out


def test_pruning_bounds_the_table_and_keeps_the_sums(tmp_path, capsys):
    run = run_to_end(tmp_path, ledger_keep_steps=2)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        kept, oldest = db.execute("SELECT count(*), min(step) FROM attempts").fetchone()
    db.close()
    assert oldest >= run.version - 4, "2 steps, and those of the checkpoint before the newest"
    assert 0 < kept < run.ledger.counts["launched"] / 2
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.counts == run.ledger.counts
    assert again.next_attempt_id() > run.ledger.counts["launched"]
    again.close()
    assert ledger(tmp_path, verify=True) == 0
    assert "0 of them pruned" not in capsys.readouterr().out


def test_a_pruned_run_goes_on_after_a_crash(tmp_path):
    from pipeline.checkpoints import latest

    raw = {
        "max_rollouts": 480,
        "engines": {"slots": 8},
        "learner": {"batch_size": 32},
        "daemon": {"checkpoint_every_steps": 2, "ledger_keep_steps": 1},
    }
    config = parse_config(raw, "test")
    run = Simulation(tmp_path, config)
    while run.version < 9:
        run.turn()
    run.ledger._db.close()
    again = Simulation(tmp_path, config, resume=latest(tmp_path))
    again.run()
    again.ledger.close()
    (tmp_path / "config.json").write_text("{}")
    assert ledger(tmp_path, verify=True) == 0


def test_a_run_without_a_ledger_and_a_file_that_is_none_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has not launched anything"):
        ledger(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(NguError, match="not a readable ledger"):
        ledger(tmp_path)


def test_a_check_of_the_books_takes_no_filter(ended, tmp_path):
    for option in ({"problem": "p1"}, {"fate": "trained"}, {"step": 1}, {"json": True}, {"export": tmp_path / "x"}):
        with pytest.raises(ConfigError, match="--verify checks the whole ledger"):
            ledger(ended.run_dir, verify=True, **option)


def test_attempts_are_exported_with_their_types_under_any_filter(ended, tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    file = tmp_path / "attempts.parquet"
    assert ledger(ended.run_dir, export=file) == 0
    assert capsys.readouterr().out == f"{ended.ledger.counts['launched']} attempts in {file}\n"
    table = parquet.read_table(file)
    listed = rows(capsys, ended.run_dir)
    for name in ("attempt", "chain", "round", "problem", "level", "fate", "step", "outcome", "reward", "tokens"):
        assert table[name].to_pylist() == [row[name] for row in listed], name
    assert str(table.schema.field("launched").type) == "timestamp[ns, tz=UTC]"
    assert ledger(ended.run_dir, fate="trained", step=2, export=file) == 0
    capsys.readouterr()
    trained = parquet.read_table(file)
    assert trained.num_rows == len(rows(capsys, ended.run_dir, fate="trained", step=2)) > 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["attempts.parquet"]
    with pytest.raises(ConfigError, match="cannot write it"):
        ledger(ended.run_dir, export=tmp_path / "missing" / "attempts.parquet")


def test_an_export_without_pyarrow_says_what_to_install(ended, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        ledger(ended.run_dir, export=tmp_path / "attempts.parquet")
    assert list(tmp_path.iterdir()) == []
