"""Problems from JSON lines: what is read, in which order, how it resumes, and what is refused in one line."""

import json
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.tasks.jsonl import JsonlTask
from pipeline.tasks.registry import JsonlConfig, make_task


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(n: int, first: int = 0) -> list[dict]:
    return [{"question": f"What is {i}+1?", "answer": f"It is\n#### {i + 1:,}"} for i in range(first, first + n)]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write(tmp_path / "sums.jsonl", questions(20))


def test_problems_are_what_the_file_says(data: str):
    config = JsonlConfig(path=data, eval_size=4, prompt_template="{question} Use \\boxed{} {x}.")
    task = make_task(config, seed=1)
    assert task.num_problems == 16 and len(task.eval_problems()) == 4
    problems = [task.next_problem() for _ in range(16)] + task.eval_problems()
    by_id = {p.problem_id: p for p in problems}
    assert sorted(by_id) == sorted(f"sums:{n}" for n in range(1, 21))
    assert by_id["sums:3"].prompt == "What is 2+1? Use \\boxed{} {x}."
    assert by_id["sums:3"].answer == "3"


def test_every_pass_is_complete_and_shuffled_anew(data: str):
    task = JsonlTask(JsonlConfig(path=data, eval_size=4), seed=1)
    first = [task.next_problem().problem_id for _ in range(16)]
    second = [task.next_problem().problem_id for _ in range(16)]
    assert sorted(first) == sorted(second) and len(set(first)) == 16
    assert first != second and first != sorted(first)


def test_the_seed_orders_training_but_never_the_held_out_set(data: str):
    one, two = (JsonlTask(JsonlConfig(path=data, eval_size=4), seed) for seed in (1, 2))
    assert one.eval_problems() == two.eval_problems()
    assert [one.next_problem() for _ in range(16)] != [two.next_problem() for _ in range(16)]


@pytest.mark.parametrize("taken", [0, 1, 15, 16, 17, 40])
def test_resumes_where_it_stood(data: str, taken: int):
    task = JsonlTask(JsonlConfig(path=data, eval_size=4), seed=3)
    for _ in range(taken):
        task.next_problem()
    state = json.loads(json.dumps(task.state()))
    expected = [task.next_problem() for _ in range(40)]
    again = JsonlTask(JsonlConfig(path=data, eval_size=4), seed=3)
    again.restore(state)
    assert [again.next_problem() for _ in range(40)] == expected


def test_refuses_to_resume_on_changed_data_or_seed(data: str):
    state = JsonlTask(JsonlConfig(path=data, eval_size=4), seed=3).state()
    with pytest.raises(ConfigError, match="seed 3"):
        JsonlTask(JsonlConfig(path=data, eval_size=4), seed=4).restore(state)
    Path(data).write_text(Path(data).read_text().replace("2+1", "2+2"))
    with pytest.raises(ConfigError, match="changed"):
        JsonlTask(JsonlConfig(path=data, eval_size=4), seed=3).restore(state)


def test_a_second_file_is_the_evaluation_set(data: str, tmp_path: Path):
    (tmp_path / "other").mkdir()
    held_out = write(tmp_path / "other" / "sums.jsonl", questions(3, first=100))
    task = JsonlTask(JsonlConfig(path=data, eval_path=held_out), seed=1)
    assert task.num_problems == 20
    assert [p.problem_id for p in task.eval_problems()] == ["eval/sums:1", "eval/sums:2", "eval/sums:3"]


def test_named_fields_numbers_and_levels(tmp_path: Path):
    rows = [{"problem": "1+1", "gold": 2, "level": 5}, {"problem": "q", "gold": r"\pi", "level": "L"}]
    path = write(tmp_path / "m.jsonl", rows)
    config = JsonlConfig(path=path, question_field="problem", answer_field="gold", level_field="level", eval_size=1)
    task = JsonlTask(config, seed=0)
    both = sorted([task.next_problem(), *task.eval_problems()], key=lambda p: p.answer)
    assert [(p.answer, p.level) for p in both] == [("2", "5"), (r"\pi", "L")]


def test_blank_lines_and_unicode_line_separators_do_not_shift_line_numbers(tmp_path: Path):
    path = tmp_path / "u.jsonl"
    first = json.dumps({"question": "a\u2028b", "answer": "1"}, ensure_ascii=False)
    path.write_text("\n".join([first, "", '{"question": "c", "answer": "2"}']) + "\r\n", encoding="utf-8")
    task = JsonlTask(JsonlConfig(path=str(path), eval_size=0), seed=0)
    assert {task.next_problem().problem_id for _ in range(2)} == {"u:1", "u:3"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ('{"question": "q", "answer": "1"}\nnot json\n', "line 2: not JSON"),
        ('{"question": "q", "answer": "1"}\n[1, 2]\n', "line 2: a JSON list"),
        ('{"question": "q", "gold": "1"}\n', r"line 1: no field 'answer' \(fields present: 'gold', 'question'\)"),
        ('{"question": "", "answer": "1"}\n', "line 1: field 'question' must be"),
        ('{"question": "q", "answer": null}\n', "line 1: field 'answer' must be"),
        ('{"question": "q", "answer": true}\n', "line 1: field 'answer' must be"),
        ('{"question": "q", "answer": "work ####"}\n', "line 1: nothing follows ####"),
        ('{"question": "q", "answer": "1"}\n', "1 problems, of which task.eval_size would hold out 64"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"question": "q", "answer": ' + "9" * 5_000 + "}", "line 1: not JSON"),
        ('{"question": "q", "answer": 1e999}', "line 1: field 'answer' must be a finite number"),
        ('{"question": "q", "answer": NaN}', "line 1: field 'answer' must be a finite number"),
        ('{"question": "half of \\ud83d", "answer": "1"}', "line 1: not JSON .*surrogates"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        make_task(JsonlConfig(path=str(path)), seed=0)
    assert "\n" not in caught.value.message and "bad.jsonl" in caught.value.message


def test_missing_files_and_templates(tmp_path: Path, data: str):
    with pytest.raises(ConfigError, match="no such file"):
        make_task(JsonlConfig(path=str(tmp_path / "absent.jsonl")), seed=0)
    with pytest.raises(ConfigError, match="not a readable"):
        make_task(JsonlConfig(path=str(tmp_path)), seed=0)
    with pytest.raises(ConfigError, match="prompt_template"):
        make_task(JsonlConfig(path=data, prompt_template="no place"), seed=0)
