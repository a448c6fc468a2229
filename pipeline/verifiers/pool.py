"""A pool of warm, killable child processes behind an inline fast path: exactly one verdict for every job.

The clock is the parent's. A child that has not answered within the deadline is killed with SIGKILL and replaced, and
its job's verdict is `unknown`; so is the verdict of a job whose child dies. Starting up does not count against a job's
deadline, nor does waiting for a free child.
"""

import select
import time
from collections import Counter, deque

import numpy as np

from pipeline import tracing
from pipeline.config import Config, ExtractRule
from pipeline.errors import VerifierError
from pipeline.messages import Verdict, VerifyJob
from pipeline.tasks.registry import CodeConfig, ReasoningGymConfig
from pipeline.verifiers.child import Setup
from pipeline.verifiers.code import longest_judgement_s
from pipeline.verifiers.registry import Scoring
from pipeline.verifiers.triage import Question, WholeText, shown, triage
from pipeline.verifiers.worker import Worker
from samplers.base import Problem

START_DEADLINE_S = 120.0
MAX_FAILED_STARTS = 3
LATENCY_WINDOW = 512


class VerifierPool:
    """Use from one thread that lives as long as the pool; `submit` never blocks, `poll` returns what is judged."""

    def __init__(
        self,
        num_workers: int,
        deadline_s: float,
        extract: ExtractRule = "auto",
        scoring: Scoring = None,
        reward: str = "",
    ):
        """`scoring` and `reward` as `make_judge` takes them; a run's own pool is `VerifierPool.of_run`."""
        self._deadline_s = deadline_s
        self._extract: ExtractRule = extract
        self._setup = Setup(scoring, reward)
        self._waiting: deque[tuple[int, Question | WholeText]] = deque()
        self._in_flight: set[int] = set()
        self._done: list[tuple[int, Verdict]] = []
        self._counts: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=LATENCY_WINDOW)
        self._failed_starts = 0
        self._workers = [Worker(self._setup) for _ in range(num_workers)]

    @classmethod
    def of_run(cls, config: Config) -> "VerifierPool":
        """The pool that a run with this config judges with."""
        settings, task = config.verifier, config.task
        scoring = task if isinstance(task, ReasoningGymConfig | CodeConfig) else None
        deadline_s = settings.deadline_s
        if isinstance(task, CodeConfig) and not settings.reward:
            deadline_s = max(deadline_s, longest_judgement_s(task))  # a slow program is wrong, not unknown
        return cls(settings.num_workers, deadline_s, settings.extract, scoring, settings.reward)

    # --- what a caller does ---

    def submit(self, job: VerifyJob) -> None:
        """Take a job; a job that is here already (the coordinator asked twice) is not judged twice."""
        if job.attempt_id not in self._in_flight:
            started = time.perf_counter()
            if self._setup.reward:
                found = WholeText(job.problem, job.text, job.truncated)
            else:
                found = triage(job.problem, job.text, job.truncated, self._extract)
            self.put(job.attempt_id, found, time.perf_counter() - started)

    def put(self, attempt_id: int, found: Verdict | Question | WholeText, elapsed_s: float = 0.0) -> None:
        """Take a job that is triaged already (in `elapsed_s`); the id must be new."""
        assert attempt_id not in self._in_flight
        self._in_flight.add(attempt_id)
        if isinstance(found, Verdict):
            self._counts["fast"] += 1
            self._finish(attempt_id, found, elapsed_s)
        else:
            self._waiting.append((attempt_id, found))
            self._dispatch()

    def poll(self, timeout_s: float) -> list[tuple[int, Verdict]]:
        """Verdicts ready now, waiting up to `timeout_s` for the first; [] when there is none.

        Raises VerifierError when the children cannot be started.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if self._done else max(0.0, min(give_up - time.monotonic(), self.wait_s()))
            self._read(wait_s)
            self._expire()
            self._dispatch()
            if self._done or time.monotonic() >= give_up:
                done, self._done = self._done, []
                self._in_flight.difference_update(attempt_id for attempt_id, _ in done)
                return done

    def verify(self, problem: Problem, text: str, truncated: bool) -> Verdict:
        """One completion, waiting for its verdict; not while other jobs are in the pool."""
        assert not self._in_flight, "verify would swallow the verdicts of submitted jobs"
        self.submit(VerifyJob(0, problem, text, truncated))
        while not (done := self.poll(1.0)):
            pass
        return done[0][1]

    def filenos(self) -> list[int]:
        """Readable when `poll` has something to do; they change when a child is replaced."""
        return [worker.fileno() for worker in self._workers]

    def wait_s(self) -> float:
        """Seconds until `poll` must run even if nothing is readable: 0 with verdicts ready, else the next deadline."""
        if self._done:
            return 0.0
        now = time.monotonic()
        return max(0.0, min((self._expiry(w) - now for w in self._workers), default=0.0))

    def stats(self) -> dict[str, float]:
        """Totals since the start, the queue, and latencies of the last answers of children (milliseconds)."""
        judged = sum(self._counts[outcome] for outcome in ("correct", "incorrect", "unknown"))
        names = ("correct", "incorrect", "unknown", "kills", "crashes", "restarts")
        stats: dict[str, float] = {f"num_{name}": float(self._counts[name]) for name in names}
        stats["unknown_frac"] = self._counts["unknown"] / max(judged, 1)
        stats["fast_frac"] = self._counts["fast"] / max(judged, 1)
        stats["num_waiting"] = float(len(self._waiting))
        stats["num_children_ready"] = float(sum(worker.ready for worker in self._workers))
        p50, p99 = np.percentile(self._latencies_s, (50, 99)) if self._latencies_s else (0.0, 0.0)
        return stats | {"child_p50_ms": 1e3 * float(p50), "child_p99_ms": 1e3 * float(p99)}

    def child_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """Kill every child; jobs still in the pool get no verdict."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how it works ---

    def _dispatch(self) -> None:
        for worker in self._workers:
            while self._waiting and worker.idle:
                attempt_id, question = self._waiting.popleft()
                if not worker.ask(attempt_id, question):
                    self._finish(attempt_id, Verdict("unknown", 0.0, detail="oversize: too long for a verifier"), 0.0)

    def _read(self, wait_s: float) -> None:
        poller = select.poll()
        by_fd = {worker.fileno(): worker for worker in self._workers}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(1000 * wait_s):
            worker = by_fd[fd]
            answer = worker.read()
            if isinstance(answer, Verdict):
                assert worker.attempt_id is not None
                tracing.since("judge", worker.busy_since, (worker.pid, "child"), attempt=worker.attempt_id)
                attempt_id, worker.attempt_id = worker.attempt_id, None
                elapsed_s = time.monotonic() - worker.busy_since
                self._latencies_s.append(elapsed_s)
                self._finish(attempt_id, answer, elapsed_s)
            elif answer is False:
                self._counts["crashes"] += 1
                self._replace(worker, "its verifier process died")
            elif worker.ready:
                self._failed_starts = 0

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if now >= self._expiry(w)]:
            self._counts["kills"] += 1
            self._replace(worker, f"not judged within {self._deadline_s:g} s")

    def _expiry(self, worker: Worker) -> float:
        if not worker.ready:
            return worker.busy_since + START_DEADLINE_S
        return worker.busy_since + self._deadline_s if worker.attempt_id is not None else float("inf")

    def _replace(self, worker: Worker, reason: str) -> None:
        elapsed_s = time.monotonic() - worker.busy_since
        tracing.since(reason, worker.busy_since, (worker.pid, "child"), attempt=worker.attempt_id)
        status = worker.kill()
        self._workers.remove(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise VerifierError(
                    f"verifier processes do not start (last exit status {status}); their error output is above. "
                    "Is math-verify (or reasoning-gym, or what your reward function imports) installed?"
                )
        self._counts["restarts"] += 1
        self._workers.append(Worker(self._setup))
        if worker.attempt_id is not None:
            detail = f"{reason} (exit status {status})"
            self._finish(worker.attempt_id, Verdict("unknown", 0.0, detail=detail), elapsed_s)

    def _finish(self, attempt_id: int, verdict: Verdict, elapsed_s: float) -> None:
        self._counts[verdict.outcome] += 1
        judged = Verdict(verdict.outcome, verdict.reward, shown(verdict.extracted), round(elapsed_s, 6), verdict.detail)
        self._done.append((attempt_id, judged))
