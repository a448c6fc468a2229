"""What every verifier promises: one verdict for any text, never an exception, and the same one each time."""

import math
from collections.abc import Iterator

import pytest

from pipeline.messages import Verdict
from pipeline.tasks.reasoning_gym import ReasoningGymTask
from pipeline.tasks.registry import ReasoningGymConfig
from pipeline.verifiers.base import Verifier
from pipeline.verifiers.gym import GymVerifier
from pipeline.verifiers.math import MathVerifier
from pipeline.verifiers.pool import VerifierPool
from samplers.base import Problem

GYM = ReasoningGymConfig(name="chain_sum", num_problems=5, eval_size=0)
SUM = Problem("sum:1", "show_your_work", "Compute 40+2.\n", "42")


@pytest.fixture(scope="module", params=["math", "gym", "pool"])
def case(request) -> Iterator[tuple[Verifier, Problem]]:
    if request.param == "math":
        yield MathVerifier(), SUM
    elif request.param == "gym":
        yield GymVerifier(GYM), ReasoningGymTask(GYM, seed=1).next_problem()
    else:
        with VerifierPool(num_workers=1, deadline_s=20.0) as pool:
            yield pool, SUM


def judge(case: tuple[Verifier, Problem], text: str, truncated: bool = False) -> Verdict:
    verifier, problem = case
    verdict = verifier.verify(problem, text, truncated)
    assert isinstance(verdict, Verdict) and math.isfinite(verdict.reward) and 0 <= verdict.reward <= 1
    return verdict


def test_the_right_answer_is_correct_and_worth_one(case):
    verdict = judge(case, rf"I think \boxed{{{case[1].answer}}}")
    assert (verdict.outcome, verdict.reward, verdict.extracted) == ("correct", 1.0, case[1].answer)


def test_a_wrong_answer_is_incorrect(case):
    verdict = judge(case, rf"I think \boxed{{{case[1].answer}1}}")
    assert verdict.outcome == "incorrect" and verdict.reward < 1


@pytest.mark.parametrize("text", ["", " ", "\n\n", r"\boxed{}", r"\boxed{ }"])
def test_nothing_is_incorrect_not_unknown(case, text):
    assert judge(case, text).outcome == "incorrect"


def test_a_cut_text_counts_only_with_a_finished_answer(case):
    answer = case[1].answer
    assert judge(case, f"so it is {answer}", truncated=True).outcome == "incorrect"
    assert judge(case, rf"so \boxed{{{answer}", truncated=True).outcome == "incorrect"
    assert judge(case, rf"so \boxed{{{answer}}} bec", truncated=True).outcome == "correct"


@pytest.mark.parametrize(
    "answer",
    [
        "\0",
        "\ud7ff\U0010ffff",
        "\u0663",
        "'\"`",
        "{" * 10 + "}" * 10,
        r"\frac{1}{0}",
        r"\frac{}{}",
        "$" * 7,
        "nan",
        "1" * 5_000,
        "x" * 1_000_000,
        "__import__('os').system('exit 1')",
        "\\" * 9,
    ],
    ids=lambda value: ascii(value)[:14],
)
def test_strange_answers_get_a_verdict_and_are_never_right(case, answer):
    assert judge(case, f"<answer>{answer}</answer>\n#### {answer}").outcome in ("incorrect", "unknown")
    assert judge(case, rf"\boxed{{{answer}}}").outcome in ("incorrect", "unknown")


def test_the_same_question_has_the_same_verdict(case):
    first, second = (judge(case, r"\boxed{\frac{80}{2}+1}") for _ in range(2))
    assert (first.outcome, first.reward, first.extracted, first.detail) == (
        second.outcome,
        second.reward,
        second.extracted,
        second.detail,
    )
