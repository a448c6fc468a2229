"""Programming problems read from a file, and the programs found in completions."""

import json
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.messages import Verdict
from pipeline.tasks.code import CodeTask, StreamTest, decode_tests
from pipeline.tasks.registry import CodeConfig, make_task
from pipeline.verifiers.code import CodeVerifier, longest_judgement_s
from pipeline.verifiers.triage import WholeText, triage
from samplers.base import Problem


def write(path: Path, *tests: object) -> CodeConfig:
    path.write_text("".join(json.dumps({"question": f"q{i}", "tests": t}) + "\n" for i, t in enumerate(tests)))
    return CodeConfig(path=str(path), eval_size=0)


def test_the_answer_of_a_problem_is_its_tests(tmp_path: Path):
    config = write(tmp_path / "code.jsonl", [{"input": "2", "output": "4"}, "assert f(2) == 4"])
    problem = CodeTask(config, seed=0).next_problem()
    assert (problem.problem_id, problem.source) == ("code:1", "code")
    assert problem.prompt.startswith("q0\n") and "```python" in problem.prompt
    assert decode_tests(problem.answer) == (StreamTest("2", "4"), "assert f(2) == 4")


def test_a_test_that_is_not_python_sets_its_problem_aside(tmp_path: Path):
    task = CodeTask(write(tmp_path / "code.jsonl", ["assert f(2) =="], ["assert True"]), seed=0)
    assert task.num_problems == 1
    assert [s.problem_id for s in task.set_aside] == ["code:1"] and "test 1 is not Python" in task.set_aside[0].why


@pytest.mark.parametrize(
    "tests", [[], "assert 1", [1], [{"input": "1"}], [{"input": "1", "output": 2}], None, ["1"] * 101]
)
def test_other_shapes_are_refused_with_line_and_field(tmp_path: Path, tests):
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 1: field 'tests'") as caught:
        make_task(write(tmp_path / "bad.jsonl", tests), seed=0)
    assert "\n" not in caught.value.message


def code(text: str, truncated: bool = False) -> Verdict | WholeText:
    return triage(Problem("p", "code", "", "[]"), text, truncated, "auto")


def test_the_last_closed_block_is_the_program():
    found = code("First\n```python\nx = 1\n```\nbetter:\n```\nx = 2\n```\nand ```not this```")
    assert isinstance(found, WholeText) and found.text == "x = 2\n"


@pytest.mark.parametrize("text", ["", "x = 1", "```python\nx = 1", "```\n\n```", "```python\n```"])
def test_without_a_program_the_answer_is_wrong(text):
    found = code(text)
    assert isinstance(found, Verdict) and (found.outcome, found.detail) == ("incorrect", "no program")


def test_tests_that_cannot_be_read_say_nothing_about_the_program():
    for answer in ("", "18", '[{"input": "1"}]'):
        verdict = CodeVerifier(CodeConfig(path="")).verify(Problem("p", "code", "", answer), "```\n1\n```", False)
        assert verdict.outcome == "unknown" and "not a list of tests" in verdict.detail


def test_the_backstop_of_the_pool_is_beyond_any_honest_judgement():
    slow, fast = (longest_judgement_s(CodeConfig(path="", time_limit_s=t)) for t in (10, 1))
    assert slow > 10 * 10 and fast < slow
