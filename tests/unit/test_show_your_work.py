import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.tasks.registry import ShowYourWorkConfig, make_task
from pipeline.tasks.show_your_work import (
    LEVELS,
    Expression,
    ShowYourWork,
    draw_expression,
    expression_at,
    guess,
    level_size,
    strategy,
    to_problem,
    working,
)

# No deadline: a busy machine is not a failure. No database: a test leaves no file behind.
QUIET = settings(max_examples=50)
LINE = re.compile(r"(\d)([-+*])(\d)([-+])(\d)=(\d)(\d)")


@st.composite
def expressions(draw) -> Expression:
    level = draw(st.sampled_from(LEVELS))
    return expression_at(level, draw(st.integers(0, level_size(level) - 1)))


def task(num_problems: int = 200, eval_per_level: int = 4, seed: int = 0) -> ShowYourWork:
    return ShowYourWork(ShowYourWorkConfig(num_problems=num_problems, eval_per_level=eval_per_level), seed)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (Expression(4827, "*", 6), "Work:\n7*6+0=42\n2*6+4=16\n8*6+1=49\n4*6+4=28\n\\boxed{28962}"),
        (Expression(4827, "+", 5936), "Work:\n7+6+0=13\n2+3+1=06\n8+9+0=17\n4+5+1=10\n\\boxed{10763}"),
        (Expression(4205, "-", 1738), "Work:\n5-8-0=17\n0-3-1=16\n2-7-1=14\n4-1-1=02\n\\boxed{2467}"),
        (Expression(500, "-", 499), "Work:\n0-9-0=11\n0-9-1=10\n5-4-1=00\n\\boxed{1}"),
        (Expression(0, "*", 9), "Work:\n0*9+0=00\n\\boxed{0}"),
    ],
)
def test_the_working_of_a_known_problem(expression: Expression, text: str):
    assert working(expression) == text


@QUIET
@given(expressions())
def test_every_line_is_right_and_its_digits_spell_the_answer(expression: Expression):
    *lines, boxed = working(expression).removeprefix("Work:\n").split("\n")
    digits, carry = "", 0
    for line in lines:
        match = LINE.fullmatch(line)
        assert match is not None
        x, op, y, sign, carry_in, carry_out, digit = match.groups()
        assert (op, int(carry_in)) == (expression.op, carry)
        value = {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[op] + int(f"{sign}{carry_in}")
        base = -10 if op == "-" else 10
        assert value == base * int(carry_out) + int(digit)
        digits, carry = digit + digits, int(carry_out)
    spelled = digits if expression.op == "-" else f"{carry}{digits}"
    assert boxed == f"\\boxed{{{int(spelled)}}}"
    assert to_problem(expression).answer == str(int(spelled))


@QUIET
@given(expressions())
def test_an_expression_belongs_to_its_level(expression: Expression):
    a, op, b = expression
    assert expression.level in LEVELS
    assert len(str(a)) == int(expression.level[1:])
    if op == "*":
        assert 2 <= b <= 9
    else:
        assert len(str(a)) == len(str(b))
    assert expression.answer >= 0


@pytest.mark.parametrize("level", ["+1", "+2", "-1", "-2", "*1", "*3"])
def test_a_level_lists_every_expression_once(level: str):
    listed = {expression_at(level, i) for i in range(level_size(level))}
    assert len(listed) == level_size(level)
    assert {e.level for e in listed} == {level}


def test_level_sizes():
    assert [level_size(level) for level in ("+1", "-1", "*1", "+2", "-2", "*2")] == [100, 55, 80, 8100, 4095, 720]


@QUIET
@given(expressions(), st.randoms(use_true_random=False))
def test_a_guess_is_about_as_long_as_the_answer_could_be(expression: Expression, rng):
    match = re.fullmatch(r"Guess: \\boxed\{(0|[1-9]\d*)\}", guess(expression, rng))
    assert match is not None
    longer = len(match[1]) - len(str(expression.a))
    assert longer in ((0,) if expression.op == "-" else (0, 1))


@QUIET
@given(expressions(), st.randoms(use_true_random=False))
def test_strategy_tells_working_from_guessing(expression: Expression, rng):
    assert strategy(working(expression)) == "work"
    assert strategy(guess(expression, rng)) == "guess"
    assert strategy(expression.prompt) == "other"


def test_a_problem_carries_what_the_wire_needs():
    problem = to_problem(Expression(4827, "*", 6))
    assert (problem.problem_id, problem.source) == ("show_your_work/4827*6", "show_your_work")
    assert (problem.prompt, problem.answer, problem.level) == ("Compute 4827*6.\n", "28962", "*4")


def test_the_mixture_of_operators_and_digits():
    source = task(num_problems=2000, eval_per_level=24)
    levels = Counter(source.next_problem().level for _ in range(2000))
    by_operator = {op: sum(n for level, n in levels.items() if level[0] == op) for op in "+-*"}
    assert by_operator == {"+": 1700, "-": 200, "*": 100}
    assert [levels[f"*{n}"] for n in range(1, 6)] == [20] * 5
    # What the one-digit spaces lack goes to the longer problems: 100 - 24 of +1 and 55 - 24 of -1 are left to train on.
    assert (levels["+1"], levels["-1"]) == (76, 31)
    assert [levels[f"+{n}"] for n in range(2, 6)] == [406] * 4


def test_level_weights_are_the_shares_of_a_pass_and_hard_levels_are_the_long_products():
    source = task(num_problems=2000)
    drawn = Counter(source.next_problem().level for _ in range(2000))
    assert source.level_weights() == {level: n / 2000 for level, n in drawn.items()}
    assert source.hard_levels == ("*3", "*4", "*5")


@pytest.mark.parametrize("num_problems", [1, 7, 20, 333])
def test_a_pass_is_every_problem_once_in_a_new_order(num_problems: int):
    source = task(num_problems=num_problems)
    first, second = ([source.next_problem().problem_id for _ in range(num_problems)] for _ in range(2))
    assert len(set(first)) == num_problems
    assert sorted(first) == sorted(second)
    assert num_problems < 20 or first != second


def test_same_seed_same_stream_other_seed_other_problems():
    streams = [[s.next_problem() for _ in range(50)] for s in (task(seed=1), task(seed=1), task(seed=2))]
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]


@QUIET
@given(st.integers(0, 100))
def test_restore_continues_exactly_also_across_passes(num_drawn: int):
    source = task(num_problems=30)
    for _ in range(num_drawn):
        source.next_problem()
    resumed = task(num_problems=30)
    resumed.restore(source.state())
    assert [resumed.next_problem() for _ in range(70)] == [source.next_problem() for _ in range(70)]
    assert resumed.state() == source.state()


def test_restore_can_go_back():
    source = task(num_problems=30)
    start = source.state()
    first = [source.next_problem() for _ in range(45)]
    source.restore(start)
    assert [source.next_problem() for _ in range(45)] == first


@pytest.mark.parametrize("eval_per_level", [0, 1, 24, 1000])
def test_evaluation_never_shares_a_problem_with_training(eval_per_level: int):
    source = task(num_problems=3000, eval_per_level=eval_per_level)
    held_out = [p.problem_id for p in source.eval_problems()]
    trained = {source.next_problem().problem_id for _ in range(3000)}
    assert len(trained) == 3000
    assert len(set(held_out)) == len(held_out)
    assert trained.isdisjoint(held_out)


def test_evaluation_is_the_same_for_every_seed_and_fills_every_level():
    problems = task(eval_per_level=24, seed=0).eval_problems()
    assert problems == task(eval_per_level=24, seed=1, num_problems=50).eval_problems()
    assert Counter(p.level for p in problems) == dict.fromkeys(LEVELS, 24)


def test_evaluation_takes_at_most_half_of_a_small_level():
    levels = Counter(p.level for p in task(eval_per_level=60).eval_problems())
    assert (levels["+1"], levels["-1"], levels["*1"], levels["+2"]) == (50, 27, 40, 60)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ShowYourWorkConfig(num_problems=0), "num_problems"),
        (ShowYourWorkConfig(num_problems=10**9), "num_problems"),
        (ShowYourWorkConfig(eval_per_level=-1), "eval_per_level"),
    ],
)
def test_impossible_sizes_are_refused_by_name(config: ShowYourWorkConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        make_task(config, seed=0)


def test_uniform_draws_cover_a_small_level():
    rng = random.Random(0)
    assert len({draw_expression("-1", rng) for _ in range(2000)}) == 55
