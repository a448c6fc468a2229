"""Problem families that ask for a final tape, so that programs must paint: 214 problems of rising difficulty.

drop: take the first k colours away. paint: answer every colour with a word of the other pair; the two pairs tell done
from still to do, so one loop suffices. starts and paint: reject another beginning, paint what follows it. repaint: the
same within one pair, where the program must first paint a marker to know when it has gone round the tape.
"""

from collections.abc import Callable, Iterator
from itertools import product

from pipeline.tasks.manufactoria.acceptance import compile_automaton, spell, starts, words
from pipeline.tasks.manufactoria.ladder import Spec
from pipeline.tasks.manufactoria.language import ACCEPT, PAIRS, REJECT, Painter, Program, Puller

# What each colour of a pair is answered with, in the pair's order.
Images = tuple[str, str]

UNTOUCHED = Program(ACCEPT)


def drop(pair: str, number: int) -> Program:
    targets = [*range(1, number), ACCEPT]
    return Program(0, tuple(Puller(pair, target, target, ACCEPT) for target in targets))


def paint(pair: str, images: Images, prefix: str = "") -> Program:
    """Demand and remove `prefix`, then paint each colour's image; for images in the other pair."""
    heads = []
    for i, colour in enumerate(prefix):
        first, second = (i + 1, REJECT) if colour == pair[0] else (REJECT, i + 1)
        heads.append(Puller(pair, first, second, REJECT))
    return Program(0, (*heads, *_loop(len(prefix), pair, images, ACCEPT)))


def repaint(pair: str, images: Images) -> Program:
    """A marker of the other pair goes behind the tape and is taken off when it has come to the front."""
    other = PAIRS[1 - PAIRS.index(pair)]
    loop = _loop(1, pair, images, 2 + len("".join(images)))
    return Program(0, (Painter(other[0], 1), *loop, Puller(other, ACCEPT, REJECT, REJECT)))


def specs() -> Iterator[Spec]:
    """Every problem, easy families first."""
    for pair, other in (PAIRS, PAIRS[::-1]):
        for k in range(1, 5):
            statement = f"drop {spell(pair)} {k}"
            yield Spec("transform", 0, "drop", pair, statement, _without_first(k), _drops(pair, k))
        painted, repainted = ["", *words(other, 2)], ["", *words(pair, 2)]
        for images in product(painted, painted):
            if total := len("".join(images)):
                tier, statement = (1 if total <= 2 else 2), f"paint {_spell_images(pair, images)}"
                yield Spec("transform", tier, "paint", pair, statement, _painted(pair, images), _paints(pair, images))
        for w, images in product(words(pair, 2), product(other, other)):
            statement = f"starts {spell(w)} and paint {_spell_images(pair, images)}"
            expected, candidates = _painted(pair, images, w), _starts_paints(pair, images, w)
            yield Spec("transform", 2, "starts_paint", pair, statement, expected, candidates, (w,))
        for images in product(repainted, repainted):
            if 1 <= len("".join(images)) <= 3 and images != tuple(pair):
                statement = f"repaint {_spell_images(pair, images)}"
                expected, candidates = _painted(pair, images), _repaints(pair, images)
                yield Spec("transform", 3, "repaint", pair, statement, expected, candidates)


def _loop(start: int, pair: str, images: Images, exit_target: int) -> list[Puller | Painter]:
    """A puller at index `start` and the painters of both images, which lead back to it."""
    targets: list[int] = []
    painters: list[Painter] = []
    for image in images:
        base = start + 1 + len(painters)
        targets.append(base if image else start)
        followers = [*range(base + 1, base + len(image)), start]
        painters += [Painter(colour, then) for colour, then in zip(image, followers, strict=False)]
    return [Puller(pair, targets[0], targets[1], exit_target), *painters]


def _without_first(number: int) -> Callable[[str], str]:
    return lambda tape: tape[number:]


def _painted(pair: str, images: Images, prefix: str = "") -> Callable[[str], bool | str]:
    table = str.maketrans(dict(zip(pair, images, strict=True)))
    return lambda tape: tape.startswith(prefix) and tape[len(prefix) :].translate(table)


def _drops(pair: str, number: int) -> Callable[[], list[Program]]:
    return lambda: [UNTOUCHED, *(drop(pair, i) for i in range(1, number + 1))]


def _paints(pair: str, images: Images) -> Callable[[], list[Program]]:
    """The images grow letter by letter."""
    first, second = images
    grown = [(first[:i], "") for i in range(len(first))] + [(first, second[:i]) for i in range(len(second) + 1)]
    return lambda: [paint(pair, partial) for partial in grown]


def _starts_paints(pair: str, images: Images, prefix: str) -> Callable[[], list[Program]]:
    """The prefix too short, the prefix only, then one colour painted, then both."""

    def candidates() -> list[Program]:
        return [
            *(paint(pair, images, prefix[:i]) for i in range(1, len(prefix))),
            compile_automaton(starts(prefix), pair),
            paint(pair, (images[0], ""), prefix),
            paint(pair, images, prefix),
        ]

    return candidates


def _repaints(pair: str, images: Images) -> Callable[[], list[Program]]:
    """Nothing is changed, then one colour, then both."""
    partial = [(pair[0], images[1]), (images[0], pair[1]), images]
    return lambda: [UNTOUCHED, *(repaint(pair, p) for p in partial)]


def _spell_images(pair: str, images: Images) -> str:
    first, second = (" ".join((colour, *image)) for colour, image in zip(pair, images, strict=True))
    return f"{first} and {second}"
