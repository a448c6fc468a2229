"""An engine that is kept busy while its weights change, and what is lost of its work."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from bench.suite.sglang import SGLangServer
from pipeline.engines.base import Engine, LoadReport
from pipeline.messages import Rollout, SamplingParams, WeightsNotice, Work
from samplers.base import Problem

SLOTS = 64
STEPS_BETWEEN = 8  # decode steps before a load; their median is what a stall is compared with
PACE_TOKENS = 4 * SLOTS  # at least, to see how fast they come: a server counts a batch of them at a time


class Losses(NamedTuple):
    """Requests that never came back, and tokens that were computed beyond what the others needed."""

    requests: int
    tokens: int


class Count(NamedTuple):
    """How an engine counts its tokens: those `decoded` since its start and those `computed`, and how many of the latter
    a rollout needs, and whether those of a canary are among them.
    """

    decoded: Callable[[], int]
    computed: Callable[[], int]
    of_rollout: Callable[[Rollout], int]
    has_canary: bool


def own_count(engine: Engine) -> Count:
    """It counts what it samples; prompts, which a load leaves in the cache, it does not."""

    def tokens() -> int:
        return round(engine.stats()["tokens"])

    return Count(tokens, tokens, lambda rollout: rollout.num_tokens, has_canary=False)


def server_count(server: SGLangServer) -> Count:
    """The first token of a request comes with the reading of its prompt."""
    return Count(
        lambda: server.count("decode"),
        lambda: server.count("prefill_compute", "decode"),
        lambda rollout: len(rollout.prompt_array()) + rollout.num_tokens - 1,
        has_canary=True,
    )


class Busy:
    """Gives an engine its weights, keeps every slot of it busy, and counts what comes back."""

    def __init__(self, engine: Engine, notice: WeightsNotice, count: Count):
        self.num_bytes = notice.num_bytes
        self._engine, self._count = engine, count
        self._num_submitted = self._num_ended = self._num_needed = 0
        engine.load_weights(notice)
        self._num_before = self._settled()
        self._fill()
        self.pace()

    def load(self, notice: WeightsNotice) -> LoadReport:
        report = self._engine.load_weights(notice)
        assert report.is_right
        self._num_needed += len(notice.canary_ids) // 4 if self._count.has_canary else 0
        return report

    def pace(self) -> tuple[float, float]:
        """The median of some decode steps in seconds, and the tokens decoded a second, admissions included."""
        seconds: list[float] = []
        num_decoded, num_before = 0, self._count.decoded()
        started = time.perf_counter()
        while num_decoded < PACE_TOKENS:
            for _ in range(STEPS_BETWEEN):
                self._fill()
                begun = time.perf_counter()
                self._step()
                seconds.append(time.perf_counter() - begun)
            num_decoded = self._count.decoded() - num_before
        return median(seconds), num_decoded / (time.perf_counter() - started)

    def losses(self) -> Losses:
        """Once all requests have had the time to come back."""
        while self._engine.num_in_flight:
            self._step()
        num_computed = self._settled() - self._num_before
        # Whichever way the count is wrong, it is no proof that nothing was lost.
        return Losses(self._num_submitted - self._num_ended, abs(num_computed - self._num_needed))

    def _settled(self) -> int:
        """What an idle engine has computed: a server answers a request before it counts its last tokens."""
        found = self._count.computed()
        while (again := self._count.computed()) != found:
            found = again
        return found

    def _step(self) -> None:
        for ended in self._engine.step():
            if isinstance(ended, Rollout):
                self._num_ended += 1
                self._num_needed += self._count.of_rollout(ended)

    def _fill(self) -> None:
        new = range(self._num_submitted, self._num_submitted + SLOTS - self._engine.num_in_flight)
        prompts = (f"Compute {100 + i % 900}+{200 + i % 700}.\n" for i in new)
        sampling = SamplingParams(1.0, 70)
        work = [Work(i, i, 0, Problem("", "", p, ""), sampling) for i, p in zip(new, prompts, strict=True)]
        self._engine.submit(work)
        self._num_submitted += len(new)
