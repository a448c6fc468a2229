"""The built-in task: integer arithmetic that pays only when it is worked out digit by digit.

A level is an operator and a number of digits, such as "+3": `+` and `-` take two n-digit numbers (the answer is never
negative), `*` an n-digit number and a digit from 2 to 9. A policy can answer by working (always right when every line
is right) or by guessing (right by luck only), so how often it is right splits into choosing to work and working well.

A level is treated as an indexed space of expressions. Drawing distinct indices draws distinct problems, in any number,
without listing the space.
"""

import random
from functools import cache
from itertools import repeat
from math import isqrt
from typing import Literal, NamedTuple

from pipeline.errors import ConfigError
from pipeline.tasks.base import level_shares
from pipeline.tasks.registry import ShowYourWorkConfig
from pipeline.tasks.shuffle import ShuffledPasses
from samplers.base import Problem

SOURCE = "show_your_work"
MAX_DIGITS = 5
OPERATORS = ("+", "-", "*")
LEVELS = tuple(f"{op}{digits}" for op in OPERATORS for digits in range(1, MAX_DIGITS + 1))
HARD_LEVELS = ("*3", "*4", "*5")  # never right by guessing, and almost never worked at first
WORK_PREFIX = "Work:\n"
GUESS_PREFIX = "Guess: "

MAX_NUM_PROBLEMS = 1_000_000
# Runs with different seeds are compared on the same evaluation problems.
_EVAL_SEED = "show_your_work/eval"

Strategy = Literal["work", "guess", "other"]


class Expression(NamedTuple):
    """`a op b` of one level; `+` and `-` have operands of equal length and `-` has a >= b."""

    a: int
    op: str
    b: int

    @property
    def answer(self) -> int:
        match self.op:
            case "+":
                return self.a + self.b
            case "-":
                return self.a - self.b
            case _:
                return self.a * self.b

    @property
    def level(self) -> str:
        return f"{self.op}{len(str(self.a))}"

    @property
    def prompt(self) -> str:
        return f"Compute {self.a}{self.op}{self.b}.\n"


def level_size(level: str) -> int:
    """The number of distinct expressions of a level."""
    count = _num_operands(level)
    match level[0]:
        case "+":
            return count * count
        case "-":
            return count * (count + 1) // 2
        case _:
            return count * 8


def expression_at(level: str, index: int) -> Expression:
    """Expression number `index` of a level, 0 <= index < level_size(level); no two indices give the same one."""
    lowest = _lowest_operand(level)
    match level[0]:
        case "+":
            row, column = divmod(index, _num_operands(level))
            return Expression(lowest + row, "+", lowest + column)
        case "-":
            # Row r of the triangle a >= b holds r + 1 expressions and starts at r (r + 1) / 2.
            row = (isqrt(8 * index + 1) - 1) // 2
            return Expression(lowest + row, "-", lowest + index - row * (row + 1) // 2)
        case _:
            row, column = divmod(index, 8)
            return Expression(lowest + row, "*", 2 + column)


def draw_expression(level: str, rng: random.Random) -> Expression:
    """A uniform draw from a level."""
    return expression_at(level, rng.randrange(level_size(level)))


def working(expression: Expression) -> str:
    """The reference completion: one line a column from the right, `x op y with carry-in = carry-out, digit`.

    Subtraction borrows instead: `4-5-0=19` is borrow 1, digit 9.
    """
    a, op, b = expression
    top = map(int, reversed(str(a)))
    bottom = repeat(b) if op == "*" else map(int, reversed(str(b)))
    lines, carry = [], 0
    for x, y in zip(top, bottom, strict=False):
        match op:
            case "+":
                left, total = f"{x}+{y}+{carry}", x + y + carry
            case "-":
                left, total = f"{x}-{y}-{carry}", x - y - carry
            case _:
                left, total = f"{x}*{y}+{carry}", x * y + carry
        quotient, digit = divmod(total, 10)
        carry = abs(quotient)
        lines.append(f"{left}={carry}{digit}\n")
    return f"{WORK_PREFIX}{''.join(lines)}{_boxed(expression.answer)}"


def guess(expression: Expression, rng: random.Random) -> str:
    """A completion that boxes a random number as long as the answer looks from the operands alone.

    That length is n digits for `-` and n or n + 1 for the others, so only one-digit problems have a guess that is
    right often enough to be reinforced.
    """
    num_digits = len(str(expression.a))
    if expression.op != "-":
        num_digits += rng.randrange(2)
    lowest = 0 if num_digits == 1 else 10 ** (num_digits - 1)
    return f"{GUESS_PREFIX}{_boxed(rng.randrange(lowest, 10**num_digits))}"


def strategy(text: str) -> Strategy:
    """How a completion went about its problem, judged by how it starts."""
    if text.startswith(WORK_PREFIX):
        return "work"
    return "guess" if text.startswith(GUESS_PREFIX) else "other"


def to_problem(expression: Expression) -> Problem:
    a, op, b = expression
    return Problem(
        problem_id=f"{SOURCE}/{a}{op}{b}",
        source=SOURCE,
        prompt=expression.prompt,
        answer=str(expression.answer),
        level=expression.level,
    )


class ShowYourWork:
    """A `TaskSource` over `num_problems` distinct training problems: 85% `+`, 10% `-`, 5% `*`, 1 to 5 digits.

    The digits of an operator are equally frequent as far as its levels reach: `+1` holds 100 expressions and `-1` 55,
    and what they cannot give goes to the longer ones. The evaluation set has `eval_per_level` problems of each of the
    15 levels (at most half of a level) and never shares a problem with training. The training set follows `seed`, the
    evaluation set does not.
    """

    def __init__(self, config: ShowYourWorkConfig, seed: int):
        if not 1 <= config.num_problems <= MAX_NUM_PROBLEMS:
            raise ConfigError(f"task.num_problems is {config.num_problems}; give 1 to {MAX_NUM_PROBLEMS}")
        if config.eval_per_level < 0:
            raise ConfigError(f"task.eval_per_level is {config.eval_per_level}; give 0 (no evaluation) or more")
        self.num_problems: int = config.num_problems
        self.hard_levels = HARD_LEVELS
        self._passes = ShuffledPasses(config.num_problems, seed)
        held_out = {level: _eval_indices(level, config.eval_per_level) for level in LEVELS}
        self._eval = [to_problem(expression_at(level, i)) for level in LEVELS for i in held_out[level]]
        room = {level: level_size(level) - len(held_out[level]) for level in LEVELS}
        rng = random.Random(f"{SOURCE}/train/{seed}")
        self._training: list[tuple[str, int]] = []
        for level, count in _level_counts(config.num_problems, room).items():
            # Enough distinct indices that `count` remain once every held-out one among them is gone.
            indices = rng.sample(range(level_size(level)), count + len(held_out[level]))
            reserved = set(held_out[level])
            free = [i for i in indices if i not in reserved]
            self._training += [(level, i) for i in free[:count]]

    def next_problem(self) -> Problem:
        return to_problem(expression_at(*self._training[self._passes.next_index()]))

    def eval_problems(self) -> list[Problem]:
        return list(self._eval)

    def level_weights(self) -> dict[str, float]:
        return level_shares(level for level, _ in self._training)

    def state(self) -> dict[str, object]:
        return self._passes.state()

    def restore(self, state: dict[str, object]) -> None:
        self._passes.restore(state)


def _boxed(number: int) -> str:
    return f"\\boxed{{{number}}}"


@cache
def _lowest_operand(level: str) -> int:
    digits = int(level[1:])
    return 0 if digits == 1 else 10 ** (digits - 1)


@cache
def _num_operands(level: str) -> int:
    return 10 ** int(level[1:]) - _lowest_operand(level)


def _eval_indices(level: str, count: int) -> list[int]:
    size = level_size(level)
    return random.Random(f"{_EVAL_SEED}/{level}").sample(range(size), min(count, size // 2))


def _level_counts(num_problems: int, room: dict[str, int]) -> dict[str, int]:
    """Training problems of each level: an even split of the operator's share, short levels filled first."""
    share = {"-": round(0.10 * num_problems), "*": round(0.05 * num_problems)}
    share["+"] = num_problems - share["-"] - share["*"]
    counts: dict[str, int] = {}
    for op in OPERATORS:
        remaining = share[op]
        levels = sorted((level for level in LEVELS if level[0] == op), key=lambda level: room[level])
        for levels_left, level in zip(range(len(levels), 0, -1), levels, strict=True):
            counts[level] = min(room[level], remaining // levels_left)
            remaining -= counts[level]
    return counts
