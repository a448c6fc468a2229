"""`python -m bench.verifiers`: both sides judge the same answers, and the printed numbers are those measured."""

import json
from pathlib import Path

import pytest

from bench import verifiers as bench
from pipeline.verifiers.math import MathVerifier
from pipeline.verifiers.triage import Question, triage

pytestmark = pytest.mark.timeout(280)  # three children import sympy, and the machine may be busy


def test_both_sides_judge_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    rows = [{"gold": str(i), "answer": rf"So \boxed{{{i}}}."} for i in range(7)]
    rows += [{"gold": "x+1", "answer": r"\boxed{1+x}"}, {"gold": r"\frac{\pi}{2}", "answer": r"\boxed{\pi/2}"}]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[str] = []
    monkeypatch.setattr(bench, "_math_verify", lambda: lambda block: asked.extend(i.problem.answer for i in block))
    judged: list[int] = []
    judge = bench._judge
    monkeypatch.setattr(bench, "_judge", lambda pool, block: (judge(pool, block), judged.append(len(block))))
    assert bench.verifiers(str(path), blocks=2, block_size=3, json=True) == 0
    exact, slow = json.loads(capsys.readouterr().out)["rates"]
    assert (exact["part"], exact["num"], slow["part"], slow["num"]) == (bench.EXACT, 6, bench.REST, 6)
    # What warms up is not measured.
    assert asked[:7] == ["6", "0", "1", "2", "3", "4", "5"]
    assert asked[-6:-4] == ["x+1", r"\frac{\pi}{2}"] and len(asked) == 7 + bench.NUM_WARM + 6
    assert len(set(asked)) == len(asked)
    assert judged == [1, 1, 3, 3, 3, 3, bench.NUM_WARM, bench.NUM_WARM, 3, 3, 3, 3], "by one worker and by two"
    for rate in (exact, slow):
        assert set(rate["pool"]) == {"1", "2"} and min(rate["pool"].values()) > 0
        assert all(low <= median <= high for low, median, high in rate["times"].values())


def test_every_made_answer_is_right_and_needs_computer_algebra():
    items = bench.respelt(4 * len(bench.RESPELT))
    assert len({i.problem.answer for i in items}) == len(items)
    for item in items:
        assert isinstance(triage(item.problem, item.text, False, "auto"), Question), item
        assert MathVerifier().verify(item.problem, item.text, False).outcome == "correct", item


def test_the_table_names_ratios_and_their_spread():
    rate = bench.Rate(bench.EXACT, 500, 800.0, {1: 9000.0, 2: 9100.0}, {1: (10.0, 11.25, 12.0), 2: (10.5, 11.0, 12.5)})
    header, row = bench.table([rate]).splitlines()
    assert "math-verify a second" in header
    assert "9000, 11.25 [10.00, 12.00]" in row and "800" in row
