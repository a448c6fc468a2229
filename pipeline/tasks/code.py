"""Programming problems: a question and the tests that a program must pass."""

import msgspec

from pipeline.errors import ConfigError
from pipeline.tasks.jsonl import FileTask
from pipeline.tasks.registry import CodeConfig
from pipeline.tasks.rows import Row

MAX_TESTS = 100  # each costs the start of two interpreters


class StreamTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the program must write when it is given this to read."""

    input: str
    output: str


Test = StreamTest | str  # a string is Python that runs after the program, in its scope, and fails by raising


class CodeTask(FileTask):
    """`Problem.answer` is the JSON of the problem's tests."""

    def __init__(self, config: CodeConfig, seed: int):
        super().__init__(config, seed, "code", lambda row: _read_tests(row, config.tests_field), _broken_test)


def decode_tests(answer: str) -> tuple[Test, ...]:
    """The tests in a `Problem.answer`; raises msgspec.ValidationError or DecodeError for any other text."""
    return msgspec.json.decode(answer, type=tuple[Test, ...])


def _read_tests(row: Row, name: str) -> str:
    value = row.value(name, "task.tests_field")
    try:
        tests = msgspec.convert(value, tuple[Test, ...])
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"{row.where}: field {name!r} must be a list of {{input, output}} objects and Python strings: {e}"
        ) from None
    if not 0 < len(tests) <= MAX_TESTS:
        raise ConfigError(f"{row.where}: field {name!r} holds {len(tests)} tests; it must hold 1 to {MAX_TESTS}")
    return msgspec.json.encode(tests).decode()


def _broken_test(answer: str) -> str | None:
    """Why no program could pass: a test in Python that is not Python."""
    for number, test in enumerate(decode_tests(answer), start=1):
        try:
            if isinstance(test, str):
                compile(test, "test", "exec")
        except (SyntaxError, ValueError) as e:
            return f"test {number} is not Python: {e}"
    return None
