"""Mathematical answers by math-verify, for a child process that may be killed at any moment.

Gold first and prediction second, always: `math_verify.verify` is not symmetric. Its own timeouts are off (they hang,
and fail off the main thread); the pool's deadline is the only clock. Only LaTeX extraction is used: its fallback to
the first number it finds reads `5)7`, `5^` and `5\\foo{7}` as 5.
"""

import functools
import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, nan, zoo

from pipeline.config import ExtractRule
from pipeline.messages import Verdict
from pipeline.verifiers.exact import in_tex, is_words, normalize
from pipeline.verifiers.recheck import refuted
from pipeline.verifiers.triage import NOT_MATHEMATICS, Question, WholeText, shown, triage
from samplers.base import Problem

_LATEX = (LatexExtractionConfig(),)
# math-verify rewrites `\sqrt(2)` into a line break followed by a root and drops everything after it.
_SQRT_OF_GROUP = re.compile(r"\\sqrt ?\(([^()]*)\)")
_IMAGINARY = re.compile(r"(?<=[0-9]) i(?![A-Za-z])")  # `4 i` is to math-verify a letter, `4i` is not
_BASE = re.compile(r"_\{?([0-9]+)\}?")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its timeouts are off


class MathVerifier:
    """Compares a final answer with the gold as mathematical objects."""

    def __init__(self, rule: ExtractRule = "auto"):
        self._rule: ExtractRule = rule

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        found = triage(problem, text, truncated, self._rule)
        return found if isinstance(found, Verdict) else self.judge(found)

    def judge(self, question: Question | WholeText) -> Verdict:
        """May take for ever; `unknown` when the comparison itself failed."""
        assert isinstance(question, Question)
        try:
            problem = _difference(question.gold, question.answer)
        except Exception as e:
            return Verdict("unknown", 0.0, shown(question.answer), detail=f"math-verify failed: {type(e).__name__}")
        if problem is None:
            return Verdict("correct", 1.0, shown(question.answer))
        return Verdict("incorrect", 0.0, shown(question.answer), detail=problem)


@functools.lru_cache(maxsize=4096)  # rollouts of one problem often end in the same answer
def _difference(gold: str, answer: str) -> str | None:
    """What tells the two apart, or None when they are equal."""
    if is_words(normalize(gold)) and is_words(normalize(answer)):
        return "different words"
    gold_bases, answer_bases = _BASE.findall(gold), _BASE.findall(answer)
    if gold_bases and answer_bases and gold_bases != answer_bases:
        return "different bases"
    parsed_gold, parsed_answer = _parse_gold(gold), _parse(answer)
    # A time of day such as 10:00 is read as a ratio to nothing, at which math-verify fails for every wrong answer.
    if parsed_gold is None or parsed_answer is None or _is_no_number(parsed_gold):
        return NOT_MATHEMATICS
    # First what is cheap: math-verify simplifies what differs by every means before it says so.
    if why := refuted(parsed_gold, parsed_answer):
        return why
    if not verify(parsed_gold, parsed_answer, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True):
        return "not equal"
    return None


def _parse(text: str) -> Any | None:
    """The sympy object of an answer (LaTeX with or without dollar signs), or None."""
    text = _IMAGINARY.sub("i", _SQRT_OF_GROUP.sub(r"\\sqrt{\1}", in_tex(" ".join(text.split()))))
    # A bare `\left( 3, \frac{\pi}{2} \right)` would be read as 3; between dollars it is a pair.
    latex = text if "$" in text.replace("\\$", "") else f"${text}$"
    parsed = parse(latex, extraction_config=_LATEX, parsing_timeout=0)
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def _is_no_number(parsed: Any) -> bool:
    return isinstance(parsed, Expr) and parsed.has(zoo, nan)


@functools.lru_cache(maxsize=4096)
def _parse_gold(text: str) -> Any | None:
    return _parse(text)
