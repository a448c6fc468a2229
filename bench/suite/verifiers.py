"""Verifications a second of the pool against math-verify in a loop.

Both sides judge the same answers, block by block in turn, so that whatever else the machine does meets both alike. The
loop is what a script would write: parse, parse, verify, on the main thread, with the library's own timeouts.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from pipeline.messages import Verdict, VerifyJob
from pipeline.sections import PositiveInt
from pipeline.tasks.rows import read_rows
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.triage import triage
from samplers.base import Problem

WORKERS = (1, 2)
DEADLINE_S = 60.0  # on a busy machine a child that is killed would be started again within the measurement
# Judged by all sides before the clock starts: a first answer of its kind costs a library seconds.
NUM_WARM = 20
EXACT, REST = "exact arithmetic", "computer algebra"
LOOP = "math-verify in a loop"
TARGETS = {EXACT: 10.0, REST: 1.0}  # times as fast as the loop

# Right answers in another spelling than the gold's: those that exact arithmetic decides, and those that it does not.
NUMBERS = (
    ("{a}", "{a}"),
    ("{a},000", "{a}000"),
    (r"\frac{{{a}}}{{4}}", "{a}/4"),
    ("{a}.50", r"{a}\frac{{1}}{{2}}"),
)
ALGEBRA = (
    ("x^2+{a}x+{b}", "{b}+{a}x+x^2"),
    (r"\frac{{\sqrt{{{a}}}}}{{{b}}}", r"\sqrt{{{a}}}/{b}"),
    (r"\left( {a}, \frac{{\pi}}{{{b}}} \right)", r"({a}, \pi/{b})"),
    (r"[{a},\infty)", r"x \ge {a}"),
    (r"\{{{a},{b}\}}", "{b}, {a}"),
    ("{a}x+{b}y=1", "1={b}y+{a}x"),
    (r"{a}+{b}i", r"{b}i+{a}"),
    (r"{b}\sqrt{{{a}}}", r"\sqrt{{{a}}}\cdot {b}"),
)


class VerifiersBench(Benchmark, frozen=True):
    """`file`: JSON lines or a Parquet file with the text to judge in the field `answer` and the right answer in `gold`;
    without one, made answers, `answers_per_problem` to a problem as in a group of rollouts, every second one right. At
    most `blocks` blocks of `block_size` answers of either part.
    """

    file: str = ""
    gold: str = "gold"
    answer: str = "answer"
    blocks: PositiveInt = 5
    block_size: PositiveInt = 100
    answers_per_problem: PositiveInt = 8

    def run(self, say: Say) -> list[Row]:
        num = self.blocks * self.block_size + NUM_WARM
        if self.file:
            rows = read_rows(self.file, "give a JSON-lines file")
            items = [
                Item(Problem("", "file", "", r.gold(self.gold, "gold")), r.text(self.answer, "answer")) for r in rows
            ]
        else:
            items = made(NUMBERS, num, self.answers_per_problem)
        # Few real answers need computer algebra, so that part is filled up with made ones.
        return measure([*items, *made(ALGEBRA, num, self.answers_per_problem)], self.blocks, self.block_size)


class Item(NamedTuple):
    problem: Problem
    text: str


def made(spellings: Sequence[tuple[str, str]], num: int, per_problem: int) -> list[Item]:
    """`num` answers, `per_problem` to a problem, in each pair of spellings (gold, answer) by turns; odd ones wrong."""
    items = []
    for i in range(num):
        p, k = divmod(i, per_problem)
        gold, answer = spellings[p % len(spellings)]
        a, b = 2 + p // len(spellings), 3 + p
        box = rf"\boxed{{{answer.format(a=a + k % 2 * k, b=b)}}}"
        items.append(Item(Problem("", "file", "", gold.format(a=a, b=b)), f"So, {k} words later, it is {box}."))
    return items


def measure(items: Sequence[Item], num_blocks: int, block_size: int) -> list[Row]:
    """Rows for each part of the answers; the pools are warm."""
    parts: dict[str, list[Item]] = {EXACT: [], REST: []}
    for item in items:
        found = triage(item.problem, item.text, False, "auto")
        parts[EXACT if isinstance(found, Verdict) else REST].append(item)
    pools = {f"pool of {n}": VerifierPool(n, DEADLINE_S) for n in WORKERS}
    try:
        for n, pool in zip(WORKERS, pools.values(), strict=True):
            while pool.stats()["num_children_ready"] < n:
                pool.poll(0.1)
        judges = {LOOP: _math_verify()} | {name: partial(_judge, pool) for name, pool in pools.items()}
        rows = []
        for part, of_part in parts.items():
            if of_part:
                blocks = _blocks(of_part, num_blocks, block_size)
                warm = (of_part[sum(map(len, blocks)) :] or of_part)[:NUM_WARM]
                sides = {name: _in_turn(judge, [warm, *blocks]) for name, judge in judges.items()}
                rows += _rows(part, interleaved(sides, len(blocks)))
        return rows
    finally:
        for pool in pools.values():
            pool.close()


def _blocks(items: list[Item], num_blocks: int, size: int) -> list[list[Item]]:
    whole = [items[i : i + size] for i in range(0, len(items) - size + 1, size)]
    return whole[:num_blocks] or [items]


def _in_turn(judge: Callable[[list[Item]], None], blocks: list[list[Item]]) -> Callable[[], float]:
    """Answers a second of the next block at each call."""
    rest = iter(blocks)
    return lambda: _per_s(judge, next(rest))


def _rows(part: str, rates: dict[str, list[float]]) -> list[Row]:
    rows = []
    for name, of_side in rates.items():
        rows.append(figure(f"{part}, {name}", "answers/s", of_side))
        if name != LOOP:
            rows.append(ratio(f"{part}, {name}, against the loop", of_side, rates[LOOP], at_least=TARGETS[part]))
    return rows


def _per_s(judge: Callable[[list[Item]], None], block: list[Item]) -> float:
    started = time.perf_counter()
    judge(block)
    return len(block) / (time.perf_counter() - started)


def _judge(pool: VerifierPool, block: list[Item]) -> None:
    for i, item in enumerate(block):
        pool.submit(VerifyJob(i, item.problem, item.text, False))
    missing = len(block)
    while missing:
        missing -= len(pool.poll(1.0))


def _math_verify() -> Callable[[list[Item]], None]:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def loop(block: list[Item]) -> None:
        for item in block:
            verify(parse(f"${item.problem.answer}$"), parse(item.text))

    loop([Item(Problem("", "file", "", "x+1"), r"\boxed{1+x}")])
    return loop
