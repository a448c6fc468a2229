import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.messages import Verdict
from pipeline.tasks.manufactoria.judge import (
    Reward,
    Rubric,
    TapeTest,
    decode_rubric,
    encode_rubric,
    passes,
    reward_of,
    verify,
)
from pipeline.tasks.manufactoria.language import parse
from pipeline.verifiers.triage import triage
from samplers.base import Problem

QUIET = settings(max_examples=60)

ALL_R = "START n0 PULLER_RB n0 n0 NONE END"
TESTS = (TapeTest("", True), TapeTest("RR", True), TapeTest("RB", False), TapeTest("RY", "Y"))


def problem(reward: Reward = "per_test") -> Problem:
    return Problem("manufactoria/x", "manufactoria", "x ?", encode_rubric(Rubric(reward, TESTS)))


def test_a_rubric_is_readable_json_and_comes_back():
    written = encode_rubric(Rubric("mixed", TESTS))
    assert written == '{"reward":"mixed","tests":[["",true],["RR",true],["RB",false],["RY","Y"]]}'
    assert decode_rubric(written) == Rubric("mixed", TESTS)


@pytest.mark.parametrize(
    ("test", "passed"),
    [
        (TapeTest("RR", True), True),
        (TapeTest("RR", False), False),
        (TapeTest("RR", ""), True),
        (TapeTest("RYR", "YR"), True),
        (TapeTest("RYR", "Y"), False),
        (TapeTest("B", True), False),
        (TapeTest("B", False), True),
        (TapeTest("B", ""), False),
    ],
)
def test_a_test_asks_for_accept_reject_or_a_final_tape(test: TapeTest, passed: bool):
    assert passes(parse(ALL_R), test) is passed


@pytest.mark.parametrize(
    ("reward", "values"),
    [("per_test", [0.0, 0.75, 1.0]), ("all_pass", [0.0, 0.0, 1.0]), ("mixed", [0.0, 0.375, 1.0])],
)
def test_the_reward_is_the_share_of_tests_or_all_of_them_or_the_mean(reward: Reward, values: list[float]):
    assert [reward_of(n, 4, reward) for n in (0, 3, 4)] == values


def test_a_right_program_is_correct_in_either_form():
    text = "START s:\n NEXT a\nPULLER_RB a:\n [R] a\n [EMPTY] e\nEND e\n"
    for completion in (ALL_R, f"{ALL_R} ", text):
        verdict = verify(problem(), completion, truncated=False)
        assert (verdict.outcome, verdict.reward, verdict.extracted) == ("correct", 1.0, ALL_R)
        assert verdict.detail == "4 of 4 tests"


def test_the_verifier_judges_it_at_once_without_a_child():
    found = triage(problem(), ALL_R, truncated=False, rule="auto")
    assert isinstance(found, Verdict)
    assert found.outcome == "correct"


def test_a_weaker_program_is_incorrect_with_the_reward_of_its_tests():
    verdict = verify(problem(), "START END", truncated=False)
    assert (verdict.outcome, verdict.reward, verdict.detail) == ("incorrect", 0.5, "2 of 4 tests")
    assert verify(problem("all_pass"), "START END", truncated=False).reward == 0.0
    assert verify(problem("mixed"), "START END", truncated=False).reward == 0.25


def test_what_does_not_parse_scores_nothing_and_says_why():
    verdict = verify(problem(), f"{ALL_R} PAINTER_RED", truncated=False)
    assert (verdict.outcome, verdict.reward) == ("incorrect", 0.0)
    assert verdict.detail == "word 8: PAINTER_RED lacks 2 of its words"


def test_a_cut_completion_scores_nothing_even_if_it_would_run():
    verdict = verify(problem(), ALL_R, truncated=True)
    assert (verdict.outcome, verdict.reward, verdict.detail) == ("incorrect", 0.0, "cut by the token limit")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        '{"reward":"mixed","tests":[]}',
        "42",
        "{}",
        '{"reward":"luck","tests":[["",true]]}',
        '{"reward":"per_test","tests":[[1]]}',
    ],
)
def test_a_broken_problem_is_unknown_never_a_failure_of_the_policy(answer: str):
    broken = Problem("p", "manufactoria", "x ?", answer)
    assert verify(broken, ALL_R, truncated=False).outcome == "unknown"


@QUIET
@given(st.text(max_size=60), st.text(max_size=60), st.booleans())
def test_any_text_gets_one_finite_verdict(answer: str, text: str, truncated: bool):
    for p in (problem(), Problem("p", "manufactoria", "x ?", answer)):
        verify(p, text, truncated).check()


def test_a_program_that_never_ends_and_a_huge_text_are_judged():
    assert verify(problem(), "START n0 PAINTER_RED n0 n0", truncated=False).reward == 0.25
    assert verify(problem(), "START END " * 200_000, truncated=False).reward == 0.0
