"""What a benchmark is, and the figures it gives.

A benchmark is a frozen table of parameters, all with defaults, and a method `run` that returns rows. To add one, write
such a class and name it in `bench.suite.registry`; `ngu bench NAME key=value` sets its parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from bench.scaling.resampling import interval
from pipeline.sections import Section

NUM_DRAWS = 2000

Say = Callable[[str], None]
Outcome = Literal["met", "missed", "open"]


class Row(msgspec.Struct, frozen=True):
    """One figure: the median of `num` measurements and its 95% bootstrap interval, in `unit`.

    `unit` is "x" for a ratio of two sides that were measured in turn. `at_least` or `at_most` is the target, if there
    is one.
    """

    what: str
    unit: str
    median: float
    low: float
    high: float
    num: int
    at_least: float | None = None
    at_most: float | None = None

    @property
    def outcome(self) -> Outcome | None:
        """Whether the target is met; "open" when it lies inside the interval. None without a target."""
        if self.at_least is not None:
            good, bad = self.low >= self.at_least, self.high < self.at_least
        elif self.at_most is not None:
            good, bad = self.high <= self.at_most, self.low > self.at_most
        else:
            return None
        return "met" if good else "missed" if bad else "open"


class Benchmark(Section, frozen=True):
    """Base of every benchmark; its fields are what `ngu bench NAME key=value` sets."""

    def run(self, say: Say) -> list[Row]:
        """Measure. `say` prints a line of progress, or a note such as a peer that is not installed.

        Raises ConfigError for parameters that make no sense here, NguError when it cannot be measured.
        """
        raise NotImplementedError


# --- figures ---


def figure(
    what: str, unit: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None
) -> Row:
    """A row from repeated measurements of one thing; a count that cannot vary is a list of one."""
    found = np.asarray(values, dtype=float)
    middle = float(np.median(found))
    low, high = middle, middle
    if len(found) > 1:
        picks = np.random.default_rng(0).integers(0, len(found), (NUM_DRAWS, len(found)))
        low, high = interval(np.median(found[picks], axis=1), len(found))
    return Row(what, unit, middle, low, high, len(found), at_least, at_most)


def ratio(
    what: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """ours / theirs, measured in turn: the ratio within each repeat, so that what slows the machine cancels out."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return figure(what, "x", pairs, at_least=at_least, at_most=at_most)


def interleaved(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every side once a repeat, each repeat from another one on; a first repeat warms up and is left out.

    A side returns what it measured, such as seconds of its own clock.
    """
    names = list(sides)
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            value = sides[name]()
            if repeat:
                found[name].append(value)
    return found
