"""`ngu bench verifiers`: both sides judge the same answers, and each figure is of the side that it names."""

import json
from pathlib import Path

import pytest

from bench.suite import verifiers as bench
from pipeline.verifiers.math import MathVerifier
from pipeline.verifiers.triage import Question, triage

pytestmark = pytest.mark.timeout(280)  # three children import sympy, and the machine may be busy


def test_both_sides_judge_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [{"gold": str(i), "answer": rf"So \boxed{{{i}}}."} for i in range(7)]
    rows += [{"gold": "x+1", "answer": r"\boxed{1+x}"}, {"gold": r"\frac{\pi}{2}", "answer": r"\boxed{\pi/2}"}]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[str] = []
    monkeypatch.setattr(bench, "_math_verify", lambda: lambda block: asked.extend(i.problem.answer for i in block))
    judged: list[int] = []
    judge = bench._judge
    monkeypatch.setattr(bench, "_judge", lambda pool, block: (judge(pool, block), judged.append(len(block))))
    found = bench.VerifiersBench(file=str(path), blocks=2, block_size=3, answers_per_problem=1).run(print)
    # What warms up is not measured.
    assert asked[:7] == ["6", "0", "1", "2", "3", "4", "5"]
    assert asked[-6:-4] == ["x+1", r"\frac{\pi}{2}"] and len(asked) == 7 + bench.NUM_WARM + 6
    assert len(set(asked)) == len(asked)
    assert judged == [1, 1, 3, 3, 3, 3, bench.NUM_WARM, bench.NUM_WARM, 3, 3, 3, 3], "by one worker and by two"
    for part in (bench.EXACT, bench.REST):
        kinds = [(row.what.removeprefix(f"{part}, "), row.unit) for row in found if row.what.startswith(part)]
        assert kinds == [
            ("math-verify in a loop", "answers/s"),
            ("pool of 1", "answers/s"),
            ("pool of 1, against the loop", "x"),
            ("pool of 2", "answers/s"),
            ("pool of 2, against the loop", "x"),
        ]
    targets = {row.what: row.at_least for row in found if row.unit == "x"}
    assert all(aim == (10.0 if what.startswith(bench.EXACT) else 1.0) for what, aim in targets.items())
    assert all(row.num == 2 and 0 < row.low <= row.median <= row.high for row in found)


def test_every_second_made_answer_is_right_and_decided_where_it_says():
    for spellings, needs_algebra in ((bench.ALGEBRA, True), (bench.NUMBERS, False)):
        items = bench.made(spellings, 8 * len(spellings), 4)
        assert len({i.problem.answer for i in items}) == len(items) / 4
        for i, item in enumerate(items):
            found = triage(item.problem, item.text, False, "auto")
            assert isinstance(found, Question) is needs_algebra, item
            outcome = MathVerifier().verify(item.problem, item.text, False).outcome
            assert outcome == ("incorrect" if i % 2 else "correct"), item
