"""Problems from Parquet files and from a directory that `datasets` saved: the same as from JSON lines."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ConfigError
from pipeline.tasks.jsonl import JsonlTask
from pipeline.tasks.registry import CodeConfig, JsonlConfig, make_task
from pipeline.tasks.rows import read_rows

ROWS = [{"question": f"What is {i}+1?", "answer": f"It is\n#### {i + 1}", "level": i % 2} for i in range(20)]


def save_dataset(directory: Path, shards: dict[str, list[dict]], order: list[str]) -> Path:
    """What `Dataset.save_to_disk` leaves of two shards: Arrow streams, and the order in which they are read."""
    directory.mkdir(parents=True)
    for name, rows in shards.items():
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in order], "_fingerprint": "0", "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def test_every_form_holds_the_same_problems(tmp_path: Path):
    lines = tmp_path / "a" / "sums.jsonl"
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a" / "sums.parquet")
    shards = tmp_path / "b" / "sums"
    shards.mkdir(parents=True)
    for i, part in enumerate((ROWS[:12], ROWS[12:])):
        pq.write_table(pa.Table.from_pylist(part), shards / f"train-0000{i}-of-00002.parquet")
    saved = save_dataset(tmp_path / "c" / "sums", {"z.arrow": ROWS[:7], "a.arrow": ROWS[7:]}, ["z.arrow", "a.arrow"])
    forms = [lines, lines.with_suffix(".parquet"), shards, saved]
    tasks = [JsonlTask(JsonlConfig(path=str(form), level_field="level", eval_size=4), seed=1) for form in forms]
    first = [[t.next_problem() for _ in range(16)] + t.eval_problems() for t in tasks]
    assert all(problems == first[0] for problems in first)
    assert {p.level for p in first[0]} == {"0", "1"}
    tasks[3].restore(tasks[0].state())
    assert tasks[3].next_problem() == tasks[0].next_problem()


def test_the_tests_of_a_program_come_as_nested_columns(tmp_path: Path):
    row = {"question": "Echo.", "tests": [{"input": "a", "output": "a"}, {"input": "b", "output": "b"}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "code.parquet")
    task = make_task(CodeConfig(path=str(tmp_path / "code.parquet"), eval_size=0), seed=0)
    assert json.loads(task.next_problem().answer) == row["tests"]


def test_of_a_worked_solution_the_last_box_is_the_gold(tmp_path: Path):
    solution = r"First \boxed{1}, so $x=\boxed{\frac{3}{4}}$."
    pq.write_table(pa.Table.from_pylist([{"question": "q", "answer": solution}]), tmp_path / "m.parquet")
    assert read_rows(str(tmp_path / "m.parquet"), "")[0].gold("answer", "") == r"\frac{3}{4}"


def test_a_wrong_field_names_file_row_and_columns(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([*ROWS[:3], {"question": "q", "answer": None}]), tmp_path / "s.parquet")
    with pytest.raises(ConfigError, match=r"s\.parquet, row 1: no field 'gold' \(fields present: 'answer', 'level'"):
        make_task(JsonlConfig(path=str(tmp_path / "s.parquet"), answer_field="gold"), seed=0)
    with pytest.raises(ConfigError, match=r"s\.parquet, row 4: field 'answer' must be"):
        make_task(JsonlConfig(path=str(tmp_path / "s.parquet")), seed=0)


def test_what_is_no_data_set_is_refused_in_one_line(tmp_path: Path):
    torn = tmp_path / "torn.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), torn)
    torn.write_bytes(torn.read_bytes()[:-20])
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), empty)
    saved = save_dataset(tmp_path / "torn", {"a.arrow": ROWS}, ["a.arrow"])
    (saved / "a.arrow").write_bytes((saved / "a.arrow").read_bytes()[:300])
    lost = save_dataset(tmp_path / "lost", {"a.arrow": ROWS}, ["a.arrow", "b.arrow"])
    odd = save_dataset(tmp_path / "odd", {"a.arrow": ROWS}, ["a.arrow"])
    (odd / "state.json").write_text('{"_data_files": [1]}')
    both = save_dataset(tmp_path / "dict" / "train", {"a.arrow": ROWS}, ["a.arrow"]).parent
    (both / "test").mkdir()
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for split in ("test", "train"):
        pq.write_table(pa.Table.from_pylist(ROWS), mixed / f"{split}-00000-of-00001.parquet")
    for path, words in [
        (torn, "not a readable Parquet"),
        (empty, "empty"),
        (saved, "a.arrow: not a readable"),
        (lost, "b.arrow: not a readable"),
        (odd, "state.json: not the state of a data set"),
        (both, r"several splits \(test, train\); name one"),
        (mixed, r"files of several splits \(test, train\)"),
        (tmp_path / "absent.parquet", "no such file"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            read_rows(str(path), "set it")
        assert "\n" not in caught.value.message


def test_without_pyarrow_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "s.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install 'ngu-rl\[data\]'"):
        read_rows(str(tmp_path / "s.parquet"), "")
