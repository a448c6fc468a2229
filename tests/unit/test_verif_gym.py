"""Answers to generated puzzles are scored by the generator's own scorer, and never evaluated as code."""

import pytest

from pipeline.tasks.reasoning_gym import ReasoningGymTask
from pipeline.tasks.registry import ReasoningGymConfig
from pipeline.verifiers.gym import GymVerifier, is_arithmetic
from pipeline.verifiers.triage import Question
from samplers.base import Problem


def make(name: str, **params) -> tuple[GymVerifier, Problem]:
    config = ReasoningGymConfig(name=name, params=params, num_problems=3, eval_size=1)
    return GymVerifier(config), ReasoningGymTask(config, seed=5).next_problem()


@pytest.mark.parametrize("form", ["{}", r"so \boxed{{{}}}", "<answer>{}</answer>", "Answer: {}", "  {}.0\n"])
def test_the_answer_in_any_form(form: str):
    verifier, problem = make("chain_sum", min_terms=2, max_terms=3)
    verdict = verifier.verify(problem, form.format(problem.answer), False)
    assert (verdict.outcome, verdict.reward) == ("correct", 1.0)


def test_partial_credit_is_the_reward_but_not_correct():
    verifier, problem = make("countdown")
    verdict = verifier.verify(problem, r"\boxed{1+1}", False)
    assert verdict.outcome == "incorrect" and 0 < verdict.reward < 1


def test_another_expression_than_the_oracle_is_correct_if_it_solves_the_puzzle():
    verifier, problem = make("countdown")
    verdict = verifier.verify(problem, rf"\boxed{{({problem.answer})}}", False)
    assert (verdict.outcome, verdict.reward) == ("correct", 1.0)


@pytest.mark.parametrize("text", ["", "   ", "\n"])
def test_no_answer_is_incorrect(text: str):
    verifier, problem = make("chain_sum")
    assert verifier.verify(problem, text, False).outcome == "incorrect"


def test_a_cut_text_without_a_marked_answer_is_incorrect():
    verifier, problem = make("chain_sum")
    verdict = verifier.verify(problem, problem.answer, True)
    assert (verdict.outcome, verdict.detail) == ("incorrect", "cut by the token limit")


def test_a_problem_of_another_generator_is_unknown():
    verifier, _ = make("chain_sum")
    other = Problem("gcd:5:0", "reasoning_gym", "", "")
    assert verifier.verify(other, "3", False).outcome == "unknown"


@pytest.mark.parametrize("answer", ["hello", "2 * 3", "", "[1, 2]", "9" * 5_000])
def test_an_answer_that_its_scorer_cannot_read_is_incorrect(answer: str):
    """Else a policy that has not learnt the form yet would end the run for its rate of unknown verdicts."""
    verifier, problem = make("prime_factorization")
    assert verifier.verify(problem, f"<answer>{answer}</answer>", False).outcome == "incorrect"


def test_a_scorer_that_fails_at_its_own_answer_too_says_nothing(monkeypatch: pytest.MonkeyPatch):
    verifier, problem = make("prime_factorization")
    monkeypatch.setattr(type(verifier._dataset(5)), "_normalize_answer", lambda *_: 1 / 0)
    verdict = verifier.judge(Question(problem.problem_id, "", "7"))
    assert verdict.outcome == "unknown" and "ZeroDivisionError" in verdict.detail


@pytest.mark.parametrize("answer", ["nan", "nan + 2i", "inf", "-1e999", "NaN"])
def test_what_is_no_number_is_at_no_distance_from_the_right_one(answer: str):
    verifier, problem = make("complex_arithmetic")
    verdict = verifier.verify(problem, f"<answer>{answer}</answer>", False)
    assert (verdict.outcome, verdict.reward) == ("incorrect", 0.0)


@pytest.mark.parametrize("name", ["countdown", "n_queens", "spiral_matrix", "polynomial_multiplication", "chain_sum"])
def test_hostile_answers_are_not_evaluated(name: str, tmp_path):
    verifier, problem = make(name)
    victim = tmp_path / "made_by_an_answer"
    for code in (
        f"__import__('os').mkdir({str(victim)!r})",
        f"[open({str(victim)!r}, 'w')]",
        f"[[__import__('pathlib').Path({str(victim)!r}).touch()]]",
    ):
        verdict = verifier.verify(problem, f"<answer>{code}</answer>", False)
        assert verdict.outcome == "incorrect"
        assert not victim.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(3 + 4)*2 - 1/7", True),
        ("2.5*x**2 + sin(x) + C", True),
        ("x.subs(y)", False),
        ("abs(3)", False),
        ("lambda: 0", False),
        ("[1]", False),
        ("'a'", False),
        ("x_1", False),
        ("1 .real", False),
    ],
)
def test_is_arithmetic(text: str, expected: bool):
    assert is_arithmetic(text) is expected
