"""Judges a program by its problem's tests: a few of at most 1,000 steps each, so no child process is needed."""

from typing import Annotated, Literal

import msgspec

from pipeline.messages import Verdict
from pipeline.tasks.manufactoria.language import Program, ProgramError, parse, run, to_words
from samplers.base import Problem

Reward = Literal["per_test", "all_pass", "mixed"]


class TapeTest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Started with `tape`, the program must accept (True), reject (False) or accept with this final tape (a string)."""

    tape: str
    expected: bool | str


class Rubric(msgspec.Struct, frozen=True, gc=False):
    """What `Problem.answer` holds, as JSON."""

    reward: Reward
    tests: Annotated[tuple[TapeTest, ...], msgspec.Meta(min_length=1)]


def encode_rubric(rubric: Rubric) -> str:
    return msgspec.json.encode(rubric).decode()


def decode_rubric(answer: str) -> Rubric:
    """Raises msgspec.ValidationError or DecodeError for anything that `encode_rubric` did not write."""
    return msgspec.json.decode(answer, type=Rubric)


def passes(program: Program, test: TapeTest) -> bool:
    final = run(program, test.tape)
    if isinstance(test.expected, str):
        return final == test.expected
    return (final is not None) == test.expected


def reward_of(num_passed: int, num_tests: int, reward: Reward) -> float:
    """In [0, 1]: the share of tests passed, 1 for all of them and else 0, or the mean of the two."""
    share, full = num_passed / num_tests, float(num_passed == num_tests)
    return {"per_test": share, "all_pass": full, "mixed": (share + full) / 2}[reward]


def verify(problem: Problem, text: str, truncated: bool) -> Verdict:
    """Correct when every test passes; `unknown` only when the problem itself is broken. Never raises.

    A completion that was cut is worth nothing even if what is there would run: the policy must learn to stop.
    """
    try:
        rubric = decode_rubric(problem.answer)
    except msgspec.MsgspecError as e:
        return Verdict("unknown", 0.0, detail=f"the problem's answer is not a Manufactoria rubric: {e}")
    if truncated:
        return Verdict("incorrect", 0.0, detail="cut by the token limit")
    try:
        program = parse(text)
    except ProgramError as e:
        return Verdict("incorrect", 0.0, detail=e.message)
    num_passed, num_tests = sum(passes(program, test) for test in rubric.tests), len(rubric.tests)
    return Verdict(
        "correct" if num_passed == num_tests else "incorrect",
        reward_of(num_passed, num_tests, rubric.reward),
        to_words(program),
        detail=f"{num_passed} of {num_tests} tests",
    )
