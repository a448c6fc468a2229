"""Answers to reasoning-gym problems, by the scorer of their own generator, for a child process.

The entry that a scorer needs is not sent: it is generated again from the problem id, which keeps the types that JSON
would lose (tuples, integer keys) and keeps `Problem.answer` readable. Some scorers pass the answer to `eval` or to
sympy's `parse_expr`, which evaluates it too: the first are given `ast.literal_eval` in place of `eval`, the second only
see arithmetic.
"""

import ast
import cmath
import functools
import math
import re
import sys
from typing import Any

from pipeline.config import ExtractRule
from pipeline.messages import Verdict
from pipeline.tasks.reasoning_gym import make_dataset, parse_id
from pipeline.tasks.registry import ReasoningGymConfig
from pipeline.verifiers.triage import Question, WholeText, shown, triage
from samplers.base import Problem

_EVALUATING = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
_PARSING = frozenset(
    ("countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication")
)
_FUNCTION_NAMES = "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi"
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_WORD = re.compile(r"[A-Za-z_]\w*")
_ARITHMETIC = frozenset("0123456789+-*/^().,= \t\n")


class GymVerifier:
    """Correct when the generator's scorer gives 1; the reward is its score."""

    def __init__(self, config: ReasoningGymConfig, rule: ExtractRule = "auto"):
        self._config = config
        self._rule: ExtractRule = rule
        self._dataset = functools.lru_cache(maxsize=4)(lambda seed: make_dataset(config, seed))
        for module in [m for name, m in sys.modules.items() if name.startswith("reasoning_gym.")]:
            if module.__name__.rpartition(".")[2] in _EVALUATING:
                vars(module)["eval"] = ast.literal_eval

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        found = triage(problem, text, truncated, self._rule)
        return found if isinstance(found, Verdict) else self.judge(found)

    def judge(self, question: Question | WholeText) -> Verdict:
        """`unknown` when the id is not of this task or the scorer fails at any answer; one that fails at this answer,
        but not at the problem's own, was given none in the form that was asked for.
        """
        assert isinstance(question, Question)
        answer = shown(question.answer)
        try:
            seed, index = parse_id(question.problem_id, self._config.name)
            dataset = self._dataset(seed)
            entry = dataset[index]
        except Exception as e:
            return Verdict("unknown", 0.0, answer, detail=_failure(e))
        try:
            score = self._score(dataset, entry, question.answer)
        except Exception as e:
            is_answers_fault = not isinstance(e, MemoryError) and self._takes_its_own(dataset, entry)
            return Verdict("incorrect" if is_answers_fault else "unknown", 0.0, answer, detail=_failure(e))
        return Verdict("correct" if score >= 1 - 1e-9 else "incorrect", score, answer)

    def _takes_its_own(self, dataset: Any, entry: dict[str, Any]) -> bool:
        try:
            self._score(dataset, entry, entry["answer"])
        except Exception:
            return False
        return True

    def _score(self, dataset: Any, entry: dict[str, Any], answer: str | None) -> float:
        if answer != entry["answer"] and self._cannot_be_right(str(answer)):
            return 0.0
        score = float(dataset.score_answer(answer, entry))
        if math.isnan(score):
            raise ValueError("its score is no number")
        return min(max(score, 0.0), 1.0)

    def _cannot_be_right(self, answer: str) -> bool:
        return _is_infinite(answer) or (self._config.name in _PARSING and not is_arithmetic(answer))


def _failure(error: Exception) -> str:
    return f"scorer failed: {type(error).__name__}: {error}"[:200]


def _is_infinite(answer: str) -> bool:
    """A number that is none, such as `nan` or `1e999`: to scorers that look at distances it is near everything."""
    try:
        return not cmath.isfinite(complex(re.sub("i$", "j", "".join(answer.split()))))
    except ValueError:
        return False


def is_arithmetic(text: str) -> bool:
    """Numbers, operators, single letters and known functions; no attribute, string, bracket or call of a name."""
    words = _WORD.findall(text)
    if any(len(w) > 1 and w not in _FUNCTIONS for w in words) or re.search(r"\.\s*[A-Za-z_]", text):
        return False
    return all(c in _ARITHMETIC or (c.isascii() and c.isalpha()) for c in text)
