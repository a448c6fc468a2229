"""`ngu split`: which set a problem belongs to, what is measured once and never again, and files that tasks take."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tiny_models import save_model_dir, tiny_model

from learner.evaluation.outcomes import RolloutOutcome
from learner.evaluation.split import CHUNK, Difficulty, Measurement
from pipeline import cli
from pipeline.errors import ConfigError
from pipeline.tasks.jsonl import JsonlTask
from pipeline.tasks.registry import JsonlConfig
from samplers.base import Problem

PROBLEMS = [Problem(f"p{i:03}", "tests", "?", str(i)) for i in range(CHUNK + 6)]


def difficulty(num_first: int, num_all: int | None = None) -> Difficulty:
    """Of a problem solved so often in its first 16 rollouts and, if it has them, in all 128."""
    problem, average = PROBLEMS[0], num_first / 16
    if num_all is None:
        return Difficulty(problem, 16, num_first, average, is_complete=False)
    return Difficulty(problem, 128, num_all, average, is_complete=True)


@pytest.mark.parametrize(
    ("found", "sets"),
    [
        (difficulty(0), ["hard"]),
        (difficulty(0, 0), ["hard", "extremely_hard"]),
        (difficulty(0, 1), ["hard"]),
        (difficulty(1), ["hard"]),
        (difficulty(2), []),
        (difficulty(4), []),
        (difficulty(5), ["easy"]),
        (difficulty(9), ["easy"]),
        (difficulty(10), []),
        (difficulty(16), []),
        (Difficulty(PROBLEMS[0], 0, 0, None, is_complete=False), []),
    ],
)
def test_the_published_sets(found: Difficulty, sets: list[str]):
    assert found.sets == sets


def test_buckets_divide_all_pass_rates():
    names = [difficulty(0, n).bucket for n in (0, 1, 8, 9, 38, 39, 76, 77, 128)]
    assert names == [
        "1 never solved",
        *["2 hard"] * 2,
        *["3 middling"] * 2,
        *["4 easy"] * 2,
        *["5 easiest"] * 2,
    ]
    assert names == sorted(names)


def roll_out(asked: list[tuple[str, int]]) -> Callable:
    """Every problem is right in every fourth rollout, but no rollout of the first problem could be judged."""

    def run(chunk, num, advance):
        asked.extend((p.problem_id, num) for p in chunk)
        rows = [(p, i) for p in chunk for i in range(num) if p is not PROBLEMS[0]]
        return [RolloutOutcome(p.problem_id, "", i % 4 == 0, 0.0, 1, False) for p, i in rows]

    return run


def test_a_measurement_goes_on_where_it_was_cut_off(tmp_path: Path):
    asked: list[tuple[str, int]] = []

    def cut(chunk, num, advance):
        if asked:
            raise KeyboardInterrupt
        return roll_out(asked)(chunk, num, advance)

    with pytest.raises(KeyboardInterrupt):
        Measurement(tmp_path, {"model": "m"}).measure(PROBLEMS, 16, cut, print)
    assert len(asked) == CHUNK
    with (tmp_path / "measured.jsonl").open("ab") as torn:
        torn.write(b'{"problem_id":"p0')
    again = Measurement(tmp_path, {"model": "m"})
    assert [p.problem_id for p in again.missing(PROBLEMS, 16)] == [p.problem_id for p in PROBLEMS[CHUNK:]]
    again.measure(PROBLEMS, 16, roll_out(asked), print)
    again.measure(PROBLEMS[1:3], 112, roll_out(asked), print)
    assert len(asked) == len(set(asked)) == len(PROBLEMS) + 2
    last = Measurement(tmp_path, {"model": "m"})
    assert last.done == again.done
    found = [last.difficulty(p) for p in PROBLEMS[:4]]
    assert [(d.num_rollouts, d.num_correct, d.avg_at_16) for d in found] == [
        (0, 0, None),
        (128, 32, 0.25),
        (128, 32, 0.25),
        (16, 4, 0.25),
    ]
    with pytest.raises(ConfigError, match="measured another model"):
        Measurement(tmp_path, {"model": "other"})


@pytest.fixture
def ngu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    verb = EntryPoint("split", "learner.split_command:split", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [verb])
    return lambda *argv: cli.main([str(a) for a in argv])


def test_the_sets_of_a_model_are_files_that_a_task_takes(ngu, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = save_model_dir(tmp_path / "model", "qwen2")
    tiny_model("qwen2", seed=0).save_pretrained(model)
    path, out = tmp_path / "letters.jsonl", tmp_path / "out"
    rows = [{"question": q, "answer": a} for q, a in zip("abcdefg", "abcde99", strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["split", model, f"task.path={path}", "task.eval_size=1", "task.prompt_template={question}"]
    argv += ["sampling.max_new_tokens=6", "--task", "jsonl", "--out", out]
    assert ngu(*argv, "--buckets", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["problems"] == 6 == sum(summary["buckets"].values())
    lines = (out / "measured.jsonl").read_text().splitlines()[1:]
    assert sorted(json.loads(line)["num_asked"] for line in lines) == [16] * 6 + [112] * 6
    unsolved = [json.loads(line)["answer"] for line in (out / "extremely_hard.jsonl").read_text().splitlines()]
    assert summary["sets"]["extremely_hard"] == len(unsolved) == summary["buckets"]["1 never solved"]
    assert "9" in unsolved, "a digit that the model cannot write"

    buckets = str(out / "buckets.jsonl")
    bare = {"prompt_template": "{question}", "level_field": "level"}
    again = JsonlTask(JsonlConfig(path=buckets, eval_path=buckets, **bare), seed=0)
    assert {p.level for p in again.eval_problems()} == {name for name, n in summary["buckets"].items() if n}
    assert len({p.prompt for p in again.eval_problems()} & set("abcdefg")) == 6

    before = (out / "measured.jsonl").read_bytes()
    assert ngu(*argv, "--buckets") == 0
    assert (out / "measured.jsonl").read_bytes() == before
    said = capsys.readouterr().out
    assert "6 problems" in said and "under 0.023 (95%)" in said
    assert ngu(*argv, "sampling.temperature=0.5") == 2
    assert ngu("split", "builtin:manufactoria", "--out", tmp_path / "m") == 2
    said = capsys.readouterr().err
    assert "choose another --out" in said and "cannot be written to a file" in said
