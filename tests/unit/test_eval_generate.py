"""Rollouts for an evaluation: each problem gets its number, what fails is tried again, nothing is waited for twice."""

import msgspec
import pytest

from learner.evaluation.generate import MAX_TRIES, QUEUED, Collector
from pipeline.config import InterruptionConfig, SamplingConfig
from pipeline.engines.fake import FakeEngine, FakeScript
from pipeline.messages import Verdict, WeightsNotice
from samplers.base import Problem

PROBLEMS = [Problem(f"p{i}", "tests", "?", str(i), level=f"L{i % 2}") for i in range(5)]
NOTICE = WeightsNotice(0, "", "", 0, "", b"", b"")


class InlinePool:
    """Judges at once; the first `num_unknown` answers to each problem are `unknown`."""

    def __init__(self, num_unknown: int = 0):
        self._num_unknown = num_unknown
        self._asked: dict[str, int] = {}
        self._done: list[tuple[int, Verdict]] = []

    def submit(self, job):
        asked = self._asked[job.problem.problem_id] = self._asked.get(job.problem.problem_id, 0) + 1
        right = job.text == f"\\boxed{{{job.problem.answer}}}"
        outcome = "unknown" if asked <= self._num_unknown else "correct" if right else "incorrect"
        self._done.append((job.attempt_id, Verdict(outcome, float(right))))

    def poll(self, timeout_s):
        done, self._done = self._done, []
        return done


class Watched(FakeEngine):
    """Remembers the most attempts it ever held and how many were submitted."""

    most = submitted = 0
    retryable = True

    def submit(self, work):
        super().submit(work)
        self.submitted += len(work)
        self.most = max(self.most, self.num_in_flight)

    def step(self):
        ended = super().step()
        return [e if hasattr(e, "text") else msgspec.structs.replace(e, retryable=self.retryable) for e in ended]


def collect(pool=None, num_rollouts: int = 6, script: FakeScript | None = None, problems=PROBLEMS, retryable=True):
    engine = Watched(3, seed=1, script=script)
    engine.retryable = retryable
    engine.load_weights(NOTICE)
    settled = []
    collector = Collector(engine, pool or InlinePool(), problems, num_rollouts, SamplingConfig())
    return collector.run(settled.append), engine, sum(settled)


def test_every_problem_gets_its_rollouts_in_order():
    outcomes, engine, settled = collect(script=FakeScript(pass_rate=lambda p: float(p.level == "L1"), max_tokens=9))
    assert [o.problem_id for o in outcomes] == [p.problem_id for p in PROBLEMS for _ in range(6)]
    assert settled == len(outcomes) == 30
    assert all(o.correct == (o.level == "L1") and o.reward == o.correct for o in outcomes)
    assert all(4 <= o.num_tokens <= 9 and not o.truncated and o.strategy == "" for o in outcomes)
    assert engine.most <= QUEUED * engine.slots


def test_a_run_that_interrupts_is_evaluated_with_interruptions():
    cut = InterruptionConfig(min_tokens=2, max_tokens=4, answer_tokens=2, phrase="say it now", thought_end="!")
    engine = Watched(3, seed=1, script=FakeScript(min_tokens=9))
    engine.load_weights(NOTICE)
    outcomes = Collector(engine, InlinePool(), PROBLEMS, 6, SamplingConfig(interruption=cut)).run()
    assert {o.num_tokens for o in outcomes} == {position + 3 + 2 for position in (2, 3, 4)}


def test_what_fails_is_tried_again():
    outcomes, engine, settled = collect(script=FakeScript(fail_frac=0.2))
    assert settled == 30
    assert 30 >= len(outcomes) > 25
    assert engine.submitted > 30


def test_what_always_fails_is_missing_after_a_few_tries():
    outcomes, engine, settled = collect(script=FakeScript(fail_frac=1.0))
    assert (outcomes, settled, engine.submitted) == ([], 30, 30 * MAX_TRIES)


def test_what_cannot_run_is_not_tried_again():
    outcomes, engine, settled = collect(script=FakeScript(fail_frac=1.0), retryable=False)
    assert (outcomes, settled, engine.submitted) == ([], 30, 30)


@pytest.mark.parametrize("num_unknown", [1, 10_000])
def test_an_unknown_verdict_is_never_counted(num_unknown: int):
    outcomes, engine, _ = collect(InlinePool(num_unknown))
    assert len(outcomes) == (30 if num_unknown == 1 else 0)
    assert engine.submitted == (35 if num_unknown == 1 else 30 * MAX_TRIES)


def test_the_built_in_task_names_its_strategies():
    problem = Problem("p", "show_your_work", "?", "1")
    outcomes, _, _ = collect(problems=[problem])
    assert {o.strategy for o in outcomes} == {"other"}
