"""`python -m bench.verifiers FILE.jsonl`: verifications a second of the pool against math-verify in a loop.

Both sides judge the same answers, block by block in turn, so that whatever else the machine does meets both alike. The
loop is what a script would write: parse, parse, verify, on the main thread, with the library's own timeouts.
"""

import json as json_module
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from cyclopts import App, Parameter
from cyclopts.types import PositiveInt

from pipeline.errors import NguError
from pipeline.messages import Verdict, VerifyJob
from pipeline.tasks.rows import read_rows
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.triage import triage
from samplers.base import Problem

WORKERS = (1, 2)
DEADLINE_S = 60.0  # on a busy machine a child that is killed would be started again within the measurement
# Judged by all sides before the clock starts: a first answer of its kind costs a library seconds.
NUM_WARM = 20
EXACT, REST = "exact arithmetic", "computer algebra"


# Right answers in another spelling than the gold's, of the kinds that text and exact arithmetic do not decide.
RESPELT = (
    ("x^2+{a}x+{b}", "{b}+{a}x+x^2"),
    (r"\frac{{\sqrt{{{a}}}}}{{{b}}}", r"\sqrt{{{a}}}/{b}"),
    (r"\left( {a}, \frac{{\pi}}{{{b}}} \right)", r"({a}, \pi/{b})"),
    (r"[{a},\infty)", r"x \ge {a}"),
    (r"\{{{a},{b}\}}", "{b}, {a}"),
    ("{a}x+{b}y=1", "1={b}y+{a}x"),
    (r"{a}+{b}i", r"{b}i+{a}"),
    (r"{b}\sqrt{{{a}}}", r"\sqrt{{{a}}}\cdot {b}"),
)


class Item(NamedTuple):
    problem: Problem
    text: str


def respelt(num: int) -> list[Item]:
    """`num` different problems that need computer algebra, with right answers."""
    items = []
    for i in range(num):
        gold, answer = RESPELT[i % len(RESPELT)]
        a, b = 2 + i // len(RESPELT), 3 + i
        box = rf"\boxed{{{answer.format(a=a, b=b)}}}"
        items.append(Item(Problem("", "file", "", gold.format(a=a, b=b)), f"So it is {box}."))
    return items


class Rate(msgspec.Struct, frozen=True):
    """Verifications a second of one part of the answers, medians over blocks.

    `pool` and `times` are by number of workers: the pool's rate, and how many times the loop's it is in the same block,
    as [least, median, most].
    """

    part: str
    num: int
    loop: float
    pool: dict[int, float]
    times: dict[int, tuple[float, float, float]]


def verifiers(
    file: str,
    /,
    *,
    gold: str = "gold",
    answer: str = "answer",
    blocks: PositiveInt = 5,
    block_size: PositiveInt = 100,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure how fast answers are judged, against math-verify called in a loop.

    Parameters
    ----------
    file:
        JSON lines or a Parquet file, one answer each.
    gold:
        The field with the right answer.
    answer:
        The field with the text to judge.
    blocks:
        At most so many blocks of the answers that exact arithmetic decides, and of the rest; no answer twice.
    block_size:
        Answers in a block.
    json:
        Print one JSON object.
    """
    rows = read_rows(file, "give a JSON-lines file")
    items = [Item(Problem("", "file", "", row.gold(gold, "--gold")), row.text(answer, "--answer")) for row in rows]
    rates = measure(items, blocks, block_size)
    if json:
        print(json_module.dumps({"file": file, "rates": msgspec.to_builtins(rates, str_keys=True)}))
    else:
        print(table(rates))
    return 0


def measure(items: Sequence[Item], num_blocks: int, block_size: int) -> list[Rate]:
    """A rate for each part of the answers; the pools are warm.

    Few real answers need computer algebra, so that part is filled up with made ones.
    """
    parts: dict[str, list[Item]] = {EXACT: [], REST: []}
    for item in (*items, *respelt(num_blocks * block_size + NUM_WARM)):
        found = triage(item.problem, item.text, False, "auto")
        parts[EXACT if isinstance(found, Verdict) else REST].append(item)
    loop = _math_verify()
    pools = {n: VerifierPool(n, DEADLINE_S) for n in WORKERS}
    try:
        for n, pool in pools.items():
            while pool.stats()["num_children_ready"] < n:
                pool.poll(0.1)
        rates = []
        for part, of_part in parts.items():
            if of_part:
                blocks = _blocks(of_part, num_blocks, block_size)
                measured = sum(map(len, blocks))
                _rate(part, [(of_part[measured:] or of_part)[:NUM_WARM]], loop, pools)
                rates.append(_rate(part, blocks, loop, pools))
        return rates
    finally:
        for pool in pools.values():
            pool.close()


def _blocks(items: list[Item], num_blocks: int, size: int) -> list[list[Item]]:
    whole = [items[i : i + size] for i in range(0, len(items) - size + 1, size)]
    return whole[:num_blocks] or [items]


def _rate(
    part: str, blocks: list[list[Item]], loop: Callable[[list[Item]], None], pools: dict[int, VerifierPool]
) -> Rate:
    loops: list[float] = []
    pooled: dict[int, list[float]] = {n: [] for n in pools}
    for block in blocks:
        loops.append(_per_s(loop, block))
        for n, pool in pools.items():
            pooled[n].append(_per_s(lambda items, pool=pool: _judge(pool, items), block))
    times = {n: [ours / theirs for ours, theirs in zip(rates, loops, strict=True)] for n, rates in pooled.items()}
    return Rate(
        part,
        sum(map(len, blocks)),
        statistics.median(loops),
        {n: statistics.median(rates) for n, rates in pooled.items()},
        {n: (min(t), statistics.median(t), max(t)) for n, t in times.items()},
    )


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


def table(rates: Sequence[Rate]) -> str:
    header = ["decided by", "answers", "math-verify a second"]
    header += [f"{n} worker{'s' * (n > 1)}: a second, times" for n in WORKERS]
    rows = [header]
    for rate in rates:
        row = [rate.part, str(rate.num), f"{rate.loop:.0f}"]
        for n in WORKERS:
            low, median, high = rate.times[n]
            row.append(f"{rate.pool[n]:.0f}, {median:.2f} [{low:.2f}, {high:.2f}]")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main() -> Any:
    app = App(name="python -m bench.verifiers")
    app.default(verifiers)
    try:
        return app()
    except NguError as e:
        print(f"error: {e.message}")
        return e.exit_status


if __name__ == "__main__":
    raise SystemExit(main())
