"""Problem families that ask for a verdict on the tape: nine languages over one pair of colours, 560 problems.

Each problem has a reference predicate, written without the language, and programs from weak to right: a prefix of the
word, the automaton that forgets what it has seen at a mismatch, the right automaton; or one condition, then both.
"""

from collections.abc import Callable, Hashable, Iterator
from itertools import product
from typing import Any, NamedTuple

from pipeline.tasks.manufactoria.ladder import Spec
from pipeline.tasks.manufactoria.language import ACCEPT, PAIRS, REJECT, Program, Puller


class Automaton(NamedTuple):
    """A finite automaton; `step(state, colour)` gives a state or the sink ACCEPT or REJECT.

    `accepts` says whether a tape that ends in a state is accepted. States are numbers from 0 or strings.
    """

    start: Hashable
    step: Callable[[Any, str], Hashable]
    accepts: Callable[[Any], bool]


def compile_automaton(automaton: Automaton, pair: str) -> Program:
    """One puller a reachable state, numbered breadth first."""
    states = [automaton.start]
    nodes: list[Puller] = []

    def target(state: Any) -> int:
        if state in (ACCEPT, REJECT):
            return state
        if state not in states:
            states.append(state)
        return states.index(state)

    for state in states:  # grows while it is walked
        first, second = (target(automaton.step(state, colour)) for colour in pair)
        nodes.append(Puller(pair, first, second, ACCEPT if automaton.accepts(state) else REJECT))
    return Program(0, tuple(nodes))


def starts(word: str) -> Automaton:
    def step(i: int, colour: str) -> int:
        if colour != word[i]:
            return REJECT
        return i + 1 if i + 1 < len(word) else ACCEPT

    return Automaton(0, step, lambda i: False)


def contains(word: str, forgets: bool = False) -> Automaton:
    """The automaton of Knuth, Morris and Pratt; with `forgets` a mismatch starts over and loses partial matches."""

    def step(i: int, colour: str) -> int:
        matched = _matched(word, i, colour, forgets)
        return matched if matched < len(word) else ACCEPT

    return Automaton(0, step, lambda i: False)


def ends(word: str, forgets: bool = False) -> Automaton:
    return Automaton(0, lambda i, colour: _matched(word, i, colour, forgets), lambda i: i == len(word))


def at_least(counted: str, number: int) -> Automaton:
    def step(i: int, colour: str) -> int:
        i += colour == counted
        return i if i < number else ACCEPT

    return Automaton(0, step, lambda i: False)


def exactly(counted: str, number: int) -> Automaton:
    def step(i: int, colour: str) -> int:
        i += colour == counted
        return i if i <= number else REJECT

    return Automaton(0, step, lambda i: i == number)


def modulo(counted: str, modulus: int, remainder: int) -> Automaton:
    return Automaton(0, lambda i, colour: (i + (colour == counted)) % modulus, lambda i: i == remainder)


def first_is_not(colour: str) -> Automaton:
    return Automaton(0, lambda i, c: REJECT if c == colour else ACCEPT, lambda i: True)


def after(word: str, automaton: Automaton) -> Automaton:
    """Tapes that start with `word` and, taken whole, are accepted by `automaton`."""
    reached: Any = automaton.start
    for colour in word:
        reached = automaton.step(reached, colour)

    def step(state: Any, colour: str) -> Hashable:
        if not isinstance(state, str):
            return automaton.step(state, colour)
        if colour != word[len(state)]:
            return REJECT
        return state + colour if len(state) + 1 < len(word) else reached

    return Automaton("", step, lambda state: not isinstance(state, str) and automaton.accepts(state))


def words(pair: str, longest: int) -> Iterator[str]:
    """All words of 1 to `longest` colours."""
    for length in range(1, longest + 1):
        yield from map("".join, product(pair, repeat=length))


def specs() -> Iterator[Spec]:
    """Every problem, easy families first."""
    for pair in PAIRS:
        yield from _words(pair)
        yield from _counts(pair)
        yield from _conjunctions(pair)


def _words(pair: str) -> Iterator[Spec]:
    for w in words(pair, 5):
        weaker = [starts(w[:i]) for i in range(1, len(w))] or [contains(w)]
        yield _spec(0, "starts", pair, f"starts {spell(w)}", _starting(w), [*weaker, starts(w)], (w,))
    for w in words(pair, 4):
        weaker = [contains(w[:i]) for i in range(1, len(w))] or [starts(w)]
        rungs = [*weaker, contains(w, forgets=True), contains(w)]
        yield _spec(1, "contains", pair, f"contains {spell(w)}", _containing(w), rungs, (w,))
        weaker = [ends(w[-i:]) for i in range(1, len(w))] or [contains(w)]
        rungs = [*weaker, ends(w, forgets=True), ends(w)]
        yield _spec(2, "ends", pair, f"ends {spell(w)}", _ending(w), rungs, (w,))


def _counts(pair: str) -> Iterator[Spec]:
    for c in pair:
        for k in range(1, 6):
            weaker = [at_least(c, i) for i in range(1, k)] or [starts(c)]
            rungs = [*weaker, at_least(c, k)]
            yield _spec(1, "atleast", pair, f"atleast {c} {k}", _counting(c, lambda n, k=k: n >= k), rungs)
        for k in range(5):
            weaker = [at_least(c, i) for i in range(1, k + 1)] or [first_is_not(c)]
            rungs = [*weaker, exactly(c, k)]
            yield _spec(1, "exactly", pair, f"exactly {c} {k}", _counting(c, lambda n, k=k: n == k), rungs)
        for m in range(2, 6):
            for r in range(m):
                rungs = [at_least(c, r) if r else first_is_not(c), exactly(c, r), modulo(c, m, r)]
                holds = _counting(c, lambda n, m=m, r=r: n % m == r)
                yield _spec(2, "mod", pair, f"mod {c} {m} {r}", holds, rungs)


def _conjunctions(pair: str) -> Iterator[Spec]:
    for w in words(pair, 2):
        prefix = f"starts {spell(w)} and"
        for c, k in product(pair, range(1, 6)):
            if k <= w.count(c):
                continue  # the prefix alone would do
            steps = [after(w, at_least(c, i)) for i in range(w.count(c) + 1, k + 1)]
            holds = _both(w, _counting(c, lambda n, k=k: n >= k))
            yield _spec(1, "starts_atleast", pair, f"{prefix} atleast {c} {k}", holds, [starts(w), *steps], (w,))
        for v in words(pair, 2):
            rungs = [ends(v), starts(w), after(w, ends(v))]
            yield _spec(3, "starts_ends", pair, f"{prefix} ends {spell(v)}", _both(w, _ending(v)), rungs, (w, v))
        for c, r in product(pair, range(2)):
            rungs = [modulo(c, 2, r), starts(w), after(w, modulo(c, 2, r))]
            holds = _both(w, _counting(c, lambda n, r=r: n % 2 == r))
            yield _spec(3, "starts_mod", pair, f"{prefix} mod {c} 2 {r}", holds, rungs, (w,))


def _spec(
    tier: int,
    family: str,
    pair: str,
    statement: str,
    expected: Callable[[str], bool],
    rungs: list[Automaton],
    hints: tuple[str, ...] = (),
) -> Spec:
    def programs() -> list[Program]:
        return [compile_automaton(automaton, pair) for automaton in rungs]

    return Spec("accept", tier, family, pair, statement, expected, programs, hints)


def spell(word: str) -> str:
    return " ".join(word)


def _matched(word: str, i: int, colour: str, forgets: bool) -> int:
    """How much of `word` is matched after `colour`, when its first `i` colours were before."""
    if i < len(word) and colour == word[i]:
        return i + 1
    if forgets:
        return 0
    seen = word[:i] + colour
    return max(j for j in range(i + 1) if j <= len(word) and seen.endswith(word[:j]))


def _starting(word: str) -> Callable[[str], bool]:
    return lambda tape: tape.startswith(word)


def _containing(word: str) -> Callable[[str], bool]:
    return lambda tape: word in tape


def _ending(word: str) -> Callable[[str], bool]:
    return lambda tape: tape.endswith(word)


def _counting(colour: str, holds: Callable[[int], bool]) -> Callable[[str], bool]:
    return lambda tape: holds(tape.count(colour))


def _both(prefix: str, holds: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda tape: tape.startswith(prefix) and holds(tape)
