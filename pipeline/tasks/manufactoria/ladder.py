"""From a problem's candidate programs to its ladder: programs from weak to right, and tests that tell them apart."""

import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import chain, zip_longest
from typing import Literal, NamedTuple

from pipeline.tasks.manufactoria.judge import TapeTest, passes
from pipeline.tasks.manufactoria.language import Program

NUM_TESTS = 12
# Enough draws that every weaker program meets a tape it fails and that easy tests of both kinds abound.
NUM_DRAWS = 250
LONGEST_DRAW = 9
BIASES = (0.0, 0.15, 0.5, 0.85, 1.0)

Kind = Literal["accept", "transform"]


class Spec(NamedTuple):
    """One problem before its tests are chosen.

    `expected` is the truth about a tape of colours of `pair`: True (accept), False (reject) or the final tape.
    `candidates` gives programs from weak to right. Test tapes often start or end with one of `hints`, which chance
    would seldom produce. A problem is known by its `statement`, such as "starts R B and mod B 2 1".
    """

    kind: Kind
    tier: int
    family: str
    pair: str
    statement: str
    expected: Callable[[str], bool | str]
    candidates: Callable[[], list[Program]]
    hints: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        return f"t{self.tier}_{self.family}"

    @property
    def prompt(self) -> str:
        return f"{self.statement} ?"


class Ladder(NamedTuple):
    """`rungs` are programs from weak to right. Every test is passed by the last one; tests are in order of difficulty.

    A test of difficulty i fails rung i - 1 and passes rung i and all above it; difficulty 0 passes everywhere.
    """

    rungs: tuple[Program, ...]
    tests: tuple[TapeTest, ...]


class _Scored(NamedTuple):
    test: TapeTest
    passed: tuple[bool, ...]


@cache
def build_ladder(spec: Spec) -> Ladder:
    """The same for the same problem in every run: nothing depends on a seed.

    A candidate becomes a rung if some tape fails it and passes all rungs above. An accept problem has one test for each
    weaker rung and easy ones for the rest, half of them to reject, so that the rung below the right one passes all but
    one; a transform problem spreads its tests over the rungs.
    """
    programs = spec.candidates()
    scored = [_Scored(t, tuple(passes(program, t) for program in programs)) for t in _draw_tests(spec)]
    kept = _separable(scored, len(programs))
    by_difficulty: dict[int, list[TapeTest]] = defaultdict(list)
    for test, passed in scored:
        failed = [i for i, rung in enumerate(kept) if not passed[rung]]
        by_difficulty[max(failed, default=-1) + 1].append(test)
    per_rung = 1 if spec.kind == "accept" else NUM_TESTS // len(kept)
    return Ladder(tuple(programs[i] for i in kept), tuple(_choose(by_difficulty, len(kept), per_rung)))


def _draw_tests(spec: Spec) -> list[TapeTest]:
    rng = random.Random(f"manufactoria/tests/{spec.statement}")
    tapes: dict[str, None] = {}
    for _ in range(NUM_DRAWS):
        length = int(rng.random() * (LONGEST_DRAW + 1))
        tape = "".join(rng.choices(spec.pair, cum_weights=(rng.choice(BIASES), 1.0), k=length))
        if spec.hints:
            head, tail = rng.choice(spec.hints), rng.choice(spec.hints)
            tape = f"{head[: _part(rng, head)]}{tape}{tail[len(tail) - _part(rng, tail) :]}"
        tapes[tape] = None
    return [TapeTest(tape, spec.expected(tape)) for tape in tapes]


def _part(rng: random.Random, hint: str) -> int:
    """How much of a hint to use: nothing, all or some of it, for hits and near misses."""
    return rng.choice((0, len(hint), rng.randint(0, len(hint))))


def _separable(scored: list[_Scored], num_programs: int) -> list[int]:
    """Candidates, weak to right, each of which some tape fails that all kept ones above it pass."""
    kept = [num_programs - 1]
    for i in reversed(range(num_programs - 1)):
        if any(not passed[i] and all(passed[j] for j in kept) for _, passed in scored):
            kept.insert(0, i)
    return kept


def _choose(by_difficulty: dict[int, list[TapeTest]], num_rungs: int, per_rung: int) -> list[TapeTest]:
    harder = {d: by_difficulty[d] for d in range(1, num_rungs)}
    chosen = {d: tests[:per_rung] for d, tests in harder.items()}
    num_easy = NUM_TESTS - sum(map(len, chosen.values()))
    chosen[0] = _balanced(by_difficulty[0])[:num_easy]
    # A transform may have too few easy tapes (often only the empty one): the next difficulties make up for them.
    for d, tests in harder.items():
        missing = NUM_TESTS - sum(map(len, chosen.values()))
        chosen[d] = tests[: len(chosen[d]) + missing]
    return [test for d in sorted(chosen) for test in chosen[d]]


def _balanced(tests: list[TapeTest]) -> list[TapeTest]:
    rejects = [test for test in tests if test.expected is False]
    accepts = [test for test in tests if test.expected is not False]
    return [test for test in chain.from_iterable(zip_longest(rejects, accepts)) if test is not None]
