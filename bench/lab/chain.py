"""The lab's record of a chain."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Chain:
    """All judged rollouts in launch order, each list of length N; `keep` are the trained ones once it is closed.

    `pass_rate` is the problem's when the chain was opened, `behaviour` the probability of each rung when it was drawn.
    """

    index: int
    pass_rate: float
    rungs: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    round_sizes: list[int] = field(default_factory=list)
    keep: tuple[int, ...] = ()
