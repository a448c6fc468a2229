"""What the ledger can carry: attempts from launch over verdict to their end, on a real file, as the coordinator writes
them: launched in one transaction, judged and ended in a later one.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles

from bench.suite.base import Benchmark, Row, Say, figure
from pipeline.ledger import Ledger
from pipeline.messages import Rollout, SamplingParams, Verdict, VersionSpan, Work
from pipeline.sections import NonNegativeInt, Positive, PositiveInt
from samplers.base import Problem

PROBLEMS = [Problem(f"bench/{i}", "bench", "", "", "level") for i in range(1000)]
SAMPLING = SamplingParams(1.0, 64)
SPANS = (VersionSpan(0, 7),)
RIGHT = Verdict("correct", 1.0)
TICK_S = 0.005
COMMIT_S = 0.001


class LedgerBench(Benchmark, frozen=True):
    """Attempts a second for each number of `rows` a transaction, in `blocks` blocks of `block_s` seconds, and the share
    of a core and the time of a commit at `paced_per_s` attempts a second, committed every 5 ms (0: not measured).
    """

    rows: tuple[PositiveInt, ...] = (1, 10, 100, 1000)
    paced_per_s: NonNegativeInt = 10_000
    blocks: PositiveInt = 10
    block_s: Positive = 0.5

    def run(self, say: Say) -> list[Row]:
        found = []
        for rows in self.rows:
            with opened() as ledger:
                found.append(
                    figure(
                        f"{rows} a transaction", "attempts/s", [self._block(ledger, rows) for _ in range(self.blocks)]
                    )
                )
        return found + (self._paced() if self.paced_per_s else [])

    def _block(self, ledger: Ledger, rows: int) -> float:
        num, started = 0, time.perf_counter()
        while (wall_s := time.perf_counter() - started) < self.block_s:
            write(ledger, rows)
            num += rows
        return num / wall_s

    def _paced(self) -> list[Row]:
        """The work is done as each tick asks for it; what a late tick missed is made up for."""
        shares, commits_s, rows = [], [], 0
        with opened() as ledger:
            for _ in range(self.blocks):
                num, started, cpu = 0, time.perf_counter(), time.process_time()
                while (wall_s := time.perf_counter() - started) < self.block_s:
                    rows = int(self.paced_per_s * wall_s) - num
                    if rows:
                        commits_s.append(write(ledger, rows))
                    num += rows
                    time.sleep(max(0.0, TICK_S - (time.perf_counter() - started - wall_s)))
                shares.append((time.process_time() - cpu) / wall_s)
        what = f"{self.paced_per_s:,}/s"
        return [
            figure(what, "of a core", shares),
            figure(f"{what}, commit p50", "s", [quantiles(commits_s, n=100)[49]]),
            figure(f"{what}, commit p99", "s", [quantiles(commits_s, n=100)[98]], at_most=COMMIT_S),
        ]


def write(ledger: Ledger, rows: int) -> float:
    """Launch `rows` attempts and end as many of before, in one transaction; the seconds that its commit took."""
    first = ledger.counts["launched"] + 1
    ledger.launch([Work(i, i // 8, 0, PROBLEMS[i % len(PROBLEMS)], SAMPLING) for i in range(first, first + rows)])
    before = range(max(first - rows, 1), first)
    rollouts = [Rollout(i, i // 8, 0, b"", b"", b"", SPANS, "stop", "", "", 0, 0) for i in before]
    ledger.end_judged(rollouts, [RIGHT] * len(rollouts), "trained", 8)
    started = time.perf_counter()
    ledger.commit_turn()
    return time.perf_counter() - started


@contextmanager
def opened() -> Iterator[Ledger]:
    with tempfile.TemporaryDirectory(prefix="ngu-bench-") as directory:
        ledger = Ledger(Path(directory) / "ledger.sqlite")
        ledger.checkpoint_in_background()
        try:
            yield ledger
        finally:
            ledger.close()
