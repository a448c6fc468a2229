"""The report on an evaluation against direct computations on the outcomes that were stored."""

import itertools
import random
from fractions import Fraction
from pathlib import Path

import pytest

from learner.evaluation.outcomes import RolloutOutcome, read_outcomes, write_outcomes
from learner.evaluation.report import EvalReport, evaluate_outcomes, text
from pipeline.coordinator.book import Result
from pipeline.coordinator.evaluation import AT_K, Evaluation
from pipeline.errors import ConfigError
from pipeline.estimates import parse_ks
from pipeline.messages import Rollout, Verdict, pack_ids, pack_logprobs
from samplers.base import Problem

KS = parse_ks("8")
WEIGHTS = {"easy": 0.9, "hard": 0.1}


def make_outcomes(num_rollouts: int = 8, seed: int = 0) -> list[RolloutOutcome]:
    """Three easy problems and two hard ones, one of which is never solved; rewards are graded."""
    rng = random.Random(seed)
    rows = []
    for i, (level, rate) in enumerate((("easy", 0.9), ("easy", 0.5), ("easy", 1.0), ("hard", 0.2), ("hard", 0.0))):
        for _ in range(num_rollouts):
            right = rng.random() < rate
            reward = 1.0 if right else rng.choice((0.0, 0.25, 0.5))
            rows.append(RolloutOutcome(f"p{i}", level, right, reward, rng.randint(1, 20), rng.random() < 0.2))
    return rows


def report_on(rows: list[RolloutOutcome], ks: list[int] = KS) -> EvalReport:
    return evaluate_outcomes(rows, ks, WEIGHTS, ("hard",), 0, "model", "task")


def groups(rows: list[RolloutOutcome]) -> list[list[RolloutOutcome]]:
    return [list(g) for _, g in itertools.groupby(rows, lambda r: r.problem_id)]


def test_pass_best_and_worst_at_k_equal_enumeration_over_the_stored_outcomes(tmp_path: Path):
    write_outcomes(tmp_path / "o.jsonl", make_outcomes())
    stored = read_outcomes(tmp_path / "o.jsonl")
    found = report_on(stored)
    for at in found.at:
        exact = [Fraction(0)] * 3
        for rows in groups(stored):
            subsets = list(itertools.combinations(rows, at.k))
            exact[0] += Fraction(sum(any(r.correct for r in s) for s in subsets), len(subsets))
            exact[1] += sum(max(Fraction(r.reward) for r in s) for s in subsets) / len(subsets)
            exact[2] += sum(min(Fraction(r.reward) for r in s) for s in subsets) / len(subsets)
        values = [at.pass_at_k.value, at.best_at_k.value, at.worst_at_k.value]
        assert values == pytest.approx([float(e / 5) for e in exact], abs=1e-15)
        assert all(e.low <= e.value <= e.high for e in (at.pass_at_k, at.best_at_k, at.worst_at_k))


def test_levels_lengths_and_endings_cover_every_rollout():
    rows = make_outcomes()
    found = report_on(rows)
    assert [(r.level, r.num_problems, r.num_rollouts) for r in found.by_level] == [("easy", 3, 24), ("hard", 2, 16)]
    for row in found.by_level:
        of_level = [r for r in rows if r.level == row.level]
        assert row.pass_at_1.value == pytest.approx(sum(r.correct for r in of_level) / len(of_level))
        assert row.mean_tokens == pytest.approx(sum(r.num_tokens for r in of_level) / len(of_level))
        assert row.truncated.value == pytest.approx(sum(r.truncated for r in of_level) / len(of_level))
    for buckets in (found.by_length, found.by_ending):
        assert sum(b.num_rollouts for b in buckets) == len(rows)
        right = sum(b.correct.value * b.num_rollouts for b in buckets)
        assert right == pytest.approx(sum(r.correct for r in rows))
    low, high = found.by_length[0].name.removesuffix(" tokens").split("-")
    inside = [r for r in rows if int(low) <= r.num_tokens <= int(high)]
    assert found.by_length[0].num_rollouts == len(inside)
    assert {b.name: b.num_rollouts for b in found.by_ending}["truncated"] == sum(r.truncated for r in rows)


def test_lengths_that_never_differ_are_one_bucket():
    rows = [RolloutOutcome("p", "", True, 1.0, 7, False)] * 4
    found = report_on(rows, [1, 2])
    assert [(b.name, b.num_rollouts) for b in found.by_length] == [("7 tokens", 4)]
    assert found.hard_pass_at_1 is None
    assert "all" in text(found)


def test_every_number_is_that_of_an_evaluation_during_training():
    rows = make_outcomes()
    evaluation = Evaluation("after", 0, [])
    for row in rows:
        ids, ending = pack_ids([1] * row.num_tokens), "length" if row.truncated else "stop"
        rollout = Rollout(0, 0, 0, b"", ids, pack_logprobs([0.0]), (), ending, "", "e", started_ns=0, finished_ns=0)
        problem = Problem(row.problem_id, "tests", "", "", row.level)
        evaluation.settle(problem, Result(rollout, Verdict("correct" if row.correct else "incorrect", row.reward)))
    record = evaluation.record(WEIGHTS, ("hard",))
    found = report_on(rows)
    assert found.mix_pass_at_1 is not None and found.hard_pass_at_1 is not None
    assert found.mix_pass_at_1.value == pytest.approx(record["mix_pass_at_1"], abs=1e-12)
    assert found.hard_pass_at_1.value == pytest.approx(record["hard_pass_at_1"], abs=1e-12)
    assert {r.level: r.pass_at_1.value for r in found.by_level} == pytest.approx(record["pass_at_1"])
    assert record["intervals"].keys() == {*AT_K, "pass_at_1", "mix_pass_at_1", "hard_pass_at_1"}
    for row in found.at:  # the same rollouts, problems and draws
        for name in AT_K:
            estimate = getattr(row, name)
            assert record["intervals"][name][str(row.k)] == (estimate.low, estimate.high)
    for name, bounds in record["intervals"]["pass_at_1"].items():
        assert 0 <= bounds[0] <= record["pass_at_1"][name] <= bounds[1] <= 1
    for name in ("mix_pass_at_1", "hard_pass_at_1"):
        assert record["intervals"][name] == (getattr(found, name).low, getattr(found, name).high)
    assert {r.level: r.truncated.value for r in found.by_level} == pytest.approx(record["truncated_by_level"])
    for name in AT_K:
        assert {str(at.k): getattr(at, name).value for at in found.at} == record[name]
    tokens = [r.num_tokens for r in rows]
    assert record["mean_tokens"] == pytest.approx(sum(tokens) / len(tokens))
    in_bucket = [r for r in rows if 8 <= r.num_tokens < 16]
    assert record["num_by_tokens"]["8"] == len(in_bucket)
    assert record["correct_by_tokens"]["8"] == pytest.approx(sum(r.correct for r in in_bucket) / len(in_bucket))
    assert sum(record["num_by_tokens"].values()) == len(rows)
    solved = {
        n: [sum(r.correct for r in rows if r.problem_id == p) for p in {r.problem_id for r in rows}] for n in (8,)
    }
    assert record["solved"] == {"8": [solved[8].count(times) for times in range(9)]}


def test_a_problem_with_too_few_judged_rollouts_is_named_and_left_out():
    rows = make_outcomes()[1:]
    found = report_on(rows)
    assert (found.left_out, found.num_problems, found.num_rollouts) == (["p0"], 4, 32)
    assert "left out, with too few judged rollouts: 1 (p0)" in text(found)
    assert found.at == report_on([r for r in rows if r.problem_id != "p0"]).at


def test_too_few_rollouts_everywhere_are_refused():
    with pytest.raises(ConfigError, match="the most are 8; lower --k"):
        report_on(make_outcomes(), [16])


def test_the_text_holds_every_number_that_is_asked_for():
    said = text(report_on(make_outcomes()))
    for words in ("pass@k", "best@k", "worst@k", "pass@8", "hard levels", "truncated", "tokens", "95%"):
        assert words in said


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"{}\n", "line 1"), (b'{"problem_id": "p"}\nnot json', "line 1"), (b"\xff", "line 1")],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "o.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_outcomes(path)
    with pytest.raises(ConfigError, match="no such file"):
        read_outcomes(tmp_path / "missing.jsonl")


def test_outcomes_are_the_same_after_a_round_trip(tmp_path: Path):
    rows = make_outcomes()
    write_outcomes(tmp_path / "o.jsonl", rows)
    assert read_outcomes(tmp_path / "o.jsonl") == rows
    with pytest.raises(ConfigError, match="cannot write"):
        write_outcomes(tmp_path / "nowhere" / "o.jsonl", rows)
