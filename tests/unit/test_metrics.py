"""Reading metrics.jsonl: torn lines, growing files, resumed runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import NguError
from pipeline.metrics import JsonlSink, RecordTail, current_records, read_records


def step(n: int, **metrics: float) -> dict:
    return {"kind": "step", "step": n, "time": float(n), "rollouts": 8 * n, "tokens": 80 * n, "metrics": metrics}


def write(path: Path, *records: dict) -> None:
    sink = JsonlSink(path)
    for record in records:
        sink.write(record)
    sink.close()


def test_a_missing_file_has_no_records(tmp_path: Path):
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_file_torn_anywhere_keeps_its_whole_lines_and_can_be_continued(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = [step(1), step(2)][: (cut >= first) + (cut == len(whole))]
        assert read_records(path) == kept
        write(path, step(3))
        assert read_records(path) == [*kept, step(3)]


def test_a_long_torn_line_is_cut_back_over_many_blocks(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    write(path, step(2))
    assert read_records(path) == [step(1), step(2)]


def test_a_tail_returns_each_record_once_and_only_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = RecordTail(path)
    assert tail.read() == []
    write(path, step(1))
    assert tail.read() == [step(1)]
    with path.open("ab") as file:
        file.write(b'{"kind":')
        file.flush()
        assert tail.read() == []
        file.write(b'"levels"}\n')
    assert tail.read() == [{"kind": "levels"}]
    assert tail.read() == []


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(b"[1, 2]\n")
    with pytest.raises(NguError, match=r"metrics\.jsonl, line 2"):
        read_records(path)


def test_repeated_steps_replace_all_that_followed_the_checkpoint():
    evaluation = {"kind": "eval", "phase": "during", "step": 2}
    before = {"kind": "eval", "phase": "before", "step": 0}
    first_try = [before, step(1, x=1), step(2, x=1), evaluation, step(3, x=1)]
    assert current_records([*first_try, step(2, x=2), step(3, x=2)]) == [
        before,
        step(1, x=1),
        step(2, x=2),
        step(3, x=2),
    ]
    assert current_records(first_try) == first_try


@given(st.lists(st.integers(1, 9), max_size=8))
def test_steps_that_hold_are_those_of_an_uninterrupted_run(checkpoints: list[int]):
    """A run killed and resumed any number of times, from any earlier checkpoint, reads as one."""
    records, at = [], 0
    for i, checkpoint in enumerate([*checkpoints, 0]):
        start = min(checkpoint, at)
        records += [step(n, x=i) for n in range(start + 1, start + 6)]
        at = start + 5
    held = [r["step"] for r in current_records(records)]
    assert held == list(range(1, at + 1))
