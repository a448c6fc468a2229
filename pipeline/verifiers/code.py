"""Programs by their tests, each run in a sandbox of its own, for a child process."""

import json
import secrets
import time

import msgspec

from pipeline.errors import VerifierError
from pipeline.messages import Verdict
from pipeline.tasks.code import StreamTest, Test, decode_tests
from pipeline.tasks.registry import CodeConfig
from pipeline.verifiers.sandbox import Limits, Ran, run_sandboxed
from pipeline.verifiers.triage import Question, WholeText, shown, triage
from samplers.base import Problem

START_S = 2.0  # wall time for two interpreters to start on a busy machine
MAX_TESTS_S = 10  # a problem may take as long as this many tests at their limit
# The program's own `exit(0)` must not pass a test, so the word that ends a passed one is drawn for each run.
_UNIT_TEST = """
import json, os, sys
job = json.load(sys.stdin)
scope = {"__name__": "program"}
exec(compile(job.pop("program"), "program.py", "exec"), scope)
exec(compile(job.pop("test"), "test.py", "exec"), scope)
sys.stdout.flush()
os.write(1, job["passed"].encode())
"""


def longest_judgement_s(config: CodeConfig) -> float:
    """No honest judgement takes longer, however slow the program is."""
    return (MAX_TESTS_S + 1) * _limits(config).wall_s + START_S


class CodeVerifier:
    """Correct when every test passes; the reward is the share that do.

    After the first test that runs out of time the rest count as failed, so that a program that never ends costs one
    time limit. A unit test runs in the program's own interpreter: it holds against mistakes and idle tricks, not
    against a program that searches the interpreter for the word to say; stdin and stdout are judged outside.
    """

    def __init__(self, config: CodeConfig):
        self._limits = _limits(config)

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        found = triage(problem, text, truncated, "auto")
        return found if isinstance(found, Verdict) else self.judge(found)

    def judge(self, question: Question | WholeText) -> Verdict:
        """`unknown` when the sandbox failed, which says nothing about the program."""
        assert isinstance(question, WholeText)
        try:
            tests = decode_tests(question.problem.answer)
            num_passed, trouble = self._count_passed(question.text, tests)
        except msgspec.MsgspecError as e:
            return Verdict("unknown", 0.0, detail=f"the problem's answer is not a list of tests: {e}")
        except VerifierError as e:
            return Verdict("unknown", 0.0, detail=shown(e.message))
        reward = num_passed / len(tests)
        detail = f"{num_passed} of {len(tests)} tests passed" + (f"; {trouble}" if trouble else "")
        return Verdict("correct" if num_passed == len(tests) else "incorrect", reward, detail=detail)

    def _count_passed(self, program: str, tests: tuple[Test, ...]) -> tuple[int, str]:
        """How many tests pass, and what became of the first that does not."""
        give_up = time.monotonic() + MAX_TESTS_S * self._limits.wall_s
        num_passed, trouble = 0, ""
        for number, test in enumerate(tests, start=1):
            end = self._run(program, test) if time.monotonic() < give_up else "time"
            num_passed += end == "ok"
            if end != "ok" and not trouble:
                trouble = f"test {number}: {_WORDS[end]}"
            if end == "time":
                break
        return num_passed, trouble

    def _run(self, program: str, test: Test) -> str:
        if isinstance(test, StreamTest):
            ran = run_sandboxed(program, test.input, self._limits)
            return _judged(ran, _lines(ran.output) == _lines(test.output.encode()))
        passed = secrets.token_hex(16)
        job = {"program": program, "test": test, "passed": passed}
        ran = run_sandboxed(_UNIT_TEST, json.dumps(job), self._limits)
        return _judged(ran, ran.output.endswith(passed.encode()))


_WORDS = {
    "failed": "the program failed",
    "time": "out of time",
    "output": "too much output",
    "wrong": "wrong result",
}


def _judged(ran: Ran, right: bool) -> str:
    return "wrong" if ran.end == "ok" and not right else ran.end


def _lines(output: bytes) -> list[bytes]:
    """White space at the ends of lines and of the text does not count."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")]


def _limits(config: CodeConfig) -> Limits:
    return Limits(
        cpu_s=config.time_limit_s,
        wall_s=2 * config.time_limit_s + START_S,  # the machine is shared; the time that counts is the core's
        memory_bytes=config.memory_mb << 20,
        processes=config.processes,
    )
