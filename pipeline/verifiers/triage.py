"""The first look at a completion, in the verifier's own process: most are judged here, in microseconds.

What is left becomes a `Question` for a child process: short, so that it fits an empty pipe without blocking.
"""

import msgspec

from pipeline.config import ExtractRule
from pipeline.messages import Verdict
from pipeline.tasks.manufactoria import judge as manufactoria
from pipeline.verifiers.exact import compare
from pipeline.verifiers.extract import extract_answer, last_code_block, last_tagged
from pipeline.verifiers.limits import excess
from pipeline.verifiers.registry import scorer_of
from samplers.base import Problem

# Puzzle grids are answers of a few thousand characters; at four bytes each they must fit a 64 KiB pipe.
MAX_GYM_CHARS = 10_000
MAX_SHOWN_CHARS = 200
# The detail of a verdict on an answer that only the gold's own text could have matched.
NOT_MATHEMATICS = "not parsed as mathematics, and different text"


class Question(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="question"):
    """Is `answer` right for the problem of this id and gold?"""

    problem_id: str
    gold: str
    answer: str


class WholeText(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="text"):
    """What is `text` worth? For scorers that want more than a final answer."""

    problem: Problem
    text: str
    truncated: bool


def triage(problem: Problem, text: str, truncated: bool, rule: ExtractRule) -> Verdict | Question | WholeText:
    """A verdict where text and exact arithmetic decide, otherwise the question to put to a child."""
    match scorer_of(problem):
        case "code":
            return _triage_code(problem, text, truncated)
        case "manufactoria":
            return manufactoria.verify(problem, text, truncated)
        case "reasoning_gym":
            return _triage_gym(problem, text, truncated, rule)
    answer = extract_answer(text, rule, truncated)
    if answer is None:
        return _no_answer(truncated)
    same = compare(problem.answer, answer)
    if same is not None:
        return Verdict("correct" if same else "incorrect", float(same), shown(answer))
    if broken := excess(answer):
        return Verdict("unknown", 0.0, shown(answer), detail=f"oversize answer: {broken}")
    if broken := excess(problem.answer):
        return Verdict("unknown", 0.0, shown(answer), detail=f"oversize gold: {broken}")
    return Question(problem.problem_id, problem.answer, answer)


def _triage_gym(problem: Problem, text: str, truncated: bool, rule: ExtractRule) -> Verdict | Question:
    answer = last_tagged(text, "answer") or extract_answer(text, rule, truncated)
    if answer is None and not truncated:
        answer = text.strip()  # most generators ask for the bare answer
    if not answer:
        return _no_answer(truncated)
    if answer == problem.answer:
        return Verdict("correct", 1.0, shown(answer))
    if len(answer) > MAX_GYM_CHARS:
        return Verdict("unknown", 0.0, shown(answer), detail=f"oversize answer: {len(answer)} characters")
    return Question(problem.problem_id, "", answer)  # the scorer makes its own gold, and ours may be long


def _triage_code(problem: Problem, text: str, truncated: bool) -> Verdict | WholeText:
    program = last_code_block(text)
    if program is None:
        return Verdict("incorrect", 0.0, detail="cut by the token limit" if truncated else "no program")
    return WholeText(problem, program, truncated)


def _no_answer(truncated: bool) -> Verdict:
    return Verdict("incorrect", 0.0, detail="cut by the token limit" if truncated else "no final answer")


def shown(answer: str) -> str:
    """The answer as a verdict reports it, bounded."""
    return answer if len(answer) <= MAX_SHOWN_CHARS else answer[: MAX_SHOWN_CHARS - 1] + "…"
