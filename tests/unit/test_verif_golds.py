"""Golds judged against themselves before anybody is asked to match them."""

import json
from pathlib import Path

import pytest

from pipeline.commands import list_set_aside
from pipeline.errors import ConfigError
from pipeline.messages import Verdict
from pipeline.tasks.jsonl import JsonlTask
from pipeline.tasks.registry import JsonlConfig
from pipeline.verifiers.golds import triage_gold
from pipeline.verifiers.triage import Question

TOWER = "2^{3^{4^{5}}}"


@pytest.mark.parametrize("gold", ["18", "-1,234.5", r"\frac{3}{4}", "12.5\\%", "Tuesday", "$7$"])
def test_plain_numbers_and_words_need_no_child(gold):
    found = triage_gold(gold)
    assert isinstance(found, Verdict) and found.outcome == "correct"


@pytest.mark.parametrize("gold", [r"\frac{\pi}{2}", "(1, 2)", "x+1", "$2\\sqrt{3}$"])
def test_mathematics_is_a_question_for_a_child(gold):
    assert triage_gold(gold) == Question("", gold, gold)


@pytest.mark.parametrize(
    ("gold", "outcome", "detail"),
    [
        ("a}+{b", "incorrect", "braces"),
        (r"\frac{1}{2", "incorrect", "braces"),
        (TOWER, "unknown", "power tower"),
        ("x+" * 600 + "1", "unknown", "characters"),
    ],
)
def test_golds_that_no_answer_matches(gold, outcome, detail):
    found = triage_gold(gold)
    assert isinstance(found, Verdict)
    assert found.outcome == outcome and detail in found.detail


def write(path: Path, golds: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": g}) + "\n" for i, g in enumerate(golds)))
    return str(path)


def test_a_task_sets_such_problems_aside(tmp_path: Path):
    path = write(tmp_path / "mixed.jsonl", ["1", TOWER, "x+1", "a}b"])
    task = JsonlTask(JsonlConfig(path=path, eval_size=0), seed=0)
    assert {task.next_problem().answer for _ in range(2)} == {"1", "x+1"}
    assert [(s.problem_id, s.gold) for s in task.set_aside] == [("mixed:2", TOWER), ("mixed:4", "a}b")]
    assert "power tower" in task.set_aside[0].why


def test_a_run_lists_what_its_task_set_aside(tmp_path: Path, capsys):
    path = write(tmp_path / "mixed.jsonl", ["1", TOWER])
    list_set_aside(JsonlTask(JsonlConfig(path=path, eval_size=0), seed=0), tmp_path)
    [row] = map(json.loads, (tmp_path / "set_aside.jsonl").read_text().splitlines())
    assert (row["problem_id"], row["gold"]) == ("mixed:2", TOWER) and "power tower" in row["why"]
    assert capsys.readouterr().out.startswith("1 problem set aside")


def test_a_file_without_any_usable_gold_is_refused(tmp_path: Path):
    path = write(tmp_path / "bad.jsonl", [TOWER])
    with pytest.raises(ConfigError, match=r"bad\.jsonl: no problem can be answered .*power tower"):
        JsonlTask(JsonlConfig(path=path, eval_size=0), seed=0)
