"""Devices that only take time: an engine that decodes by the clock of its rates, and a learner.

An engine is stepped from completion to completion, not token by token: with R rows running all of them advance by a
token in `decode_s(R)` seconds, so one number, the tokens that a row has made which runs since the start, orders all
completions, and thousands of rows cost no more than their starts and ends.
"""

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from bench.planner.hardware import Rates
from pipeline.messages import Batch, Rollout, VersionSpan, WeightsNotice, Work

UNIT = 16  # tokens that one simulated token stands for: a sixteenth of the bytes of rollouts that nobody reads
LOGPROB = b"\x00\x00\x80\xbf"  # -1.0
EOS = bytes(4)


class SimulatedEngine:
    """Loads weights between two tokens; while it `holds`, what runs goes on and nothing new starts."""

    def __init__(self, name: str, slots: int, rates: Rates, length: Callable[[int], float]):
        self.name, self.slots = name, slots
        self.holds = False
        self._rates, self._length = rates, length
        self._waiting: deque[Work] = deque()
        self._rows: list[tuple[float, int, float, int, Work]] = []  # end, id, start, tokens, work
        self._progress = 0.0
        self._versions: list[tuple[float, int]] = []  # progress from which each version served
        self._pending: WeightsNotice | None = None
        self._now = self._stalled_until = 0.0
        self.row_s = self.busy_s = 0.0

    @property
    def num_in_flight(self) -> int:
        return len(self._rows) + len(self._waiting)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def submit(self, items: tuple[Work, ...]) -> None:
        self._waiting.extend(items)
        self._admit()

    def load(self, notice: WeightsNotice) -> None:
        """Begin to serve these weights; `advance` says that it does."""
        self._pending, self.holds = notice, False

    def next_event_s(self) -> float:
        """When something is due: a load, or the next completion."""
        if self._pending is not None:
            return self._now
        if not self._rows:
            return float("inf")
        left = (self._rows[0][0] - self._progress) * self._step_s()
        return max(self._now, self._stalled_until) + left

    def _step_s(self) -> float:
        return UNIT * self._rates.decode_s(len(self._rows))

    def advance(self, now: float) -> tuple[list[Rollout], int | None]:
        """What has ended by `now`, and the version that was loaded, if one was."""
        ended: list[Rollout] = []
        while True:
            loaded = self._load_if_due()
            if loaded is not None:
                self._admit()
                return ended, loaded
            due = self.next_event_s()
            if due > now:
                break
            self._run_until(due)
            self._progress = self._rows[0][0]  # where it is, without the rounding of seconds
            while self._rows and self._rows[0][0] <= self._progress:
                ended.append(self._finish(*heapq.heappop(self._rows)))
            self._admit()
        self._run_until(now)
        return ended, None

    def _run_until(self, time_s: float) -> None:
        working = max(0.0, time_s - max(self._now, self._stalled_until))
        if self._rows:
            self._progress += working / self._step_s()
            self.busy_s += working
            self.row_s += working * len(self._rows)
        self._now = max(self._now, time_s)

    def _load_if_due(self) -> int | None:
        if self._pending is None:
            return None
        version, self._pending = self._pending.policy_version, None
        self._versions.append((self._progress, version))
        self._stalled_until = max(self._now, self._stalled_until) + self._rates.load_s
        return version

    def _admit(self) -> None:
        if not self._versions or self.holds:
            return
        while self._waiting and len(self._rows) < self.slots:
            work = self._waiting.popleft()
            tokens = max(1, round(self._length(work.attempt_id) / UNIT))
            start = self._progress
            heapq.heappush(self._rows, (start + tokens, work.attempt_id, start, tokens, work))

    def _finish(self, end: float, attempt_id: int, start: float, tokens: int, work: Work) -> Rollout:
        begins = [progress for progress, _ in self._versions]
        first = max(bisect_right(begins, start) - 1, 0)
        spans: list[VersionSpan] = []
        for progress, version in self._versions[first:]:
            token = max(0, round(progress - start))
            if spans and spans[-1].start >= token:
                spans.pop()  # a version that no token of this row came from
            if token < tokens:
                spans.append(VersionSpan(token, version))
        ids = bytes([1, 0, 0, 0]) * (tokens - 1) + EOS
        return Rollout(
            work.attempt_id,
            work.chain_id,
            work.round,
            EOS,
            ids,
            LOGPROB * tokens,
            tuple(spans),
            "stop",
            "",
            self.name,
            0,
            round(1e9 * self._now),
        )


class SimulatedLearner:
    """Takes a batch, and so long as the rates say of its tokens."""

    def __init__(self, devices: int, rates: Rates):
        self._devices, self._rates = devices, rates
        self.batch: Batch | None = None
        self.ends_s = float("inf")
        self.busy_s = 0.0

    def start(self, batch: Batch, now: float) -> None:
        tokens = UNIT * sum(rollout.num_tokens for group in batch.groups for rollout in group.rollouts)
        takes = self._rates.train_step_s + tokens * self._rates.train_token_s / self._devices + self._rates.publish_s
        self.batch, self.ends_s = batch, now + takes
        self.busy_s += takes

    def finish(self) -> Batch:
        assert self.batch is not None
        batch, self.batch, self.ends_s = self.batch, None, float("inf")
        return batch
