"""The time between two optimizer steps, idle shares and lag, for each way of placing generation and training.

- `synchronous`: engines and learner have devices of their own and take turns
- `colocated`: all devices generate, then all train
- `fused`: colocated, but training begins on the devices that have run out of rollouts (stage fusion)
- `one_step_off`: engines generate the next batch while the learner trains this one, and both wait for each other
- `in_flight`: nobody waits, weights change between two tokens (PipelineRL, arXiv 2509.19128)
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from bench.lag_model import Lag, Load, predict
from bench.planner.hardware import Rates
from bench.planner.work import ALGORITHMS, Job

Placement = Literal["synchronous", "colocated", "fused", "one_step_off", "in_flight"]
PLACEMENTS: tuple[Placement, ...] = ("synchronous", "colocated", "fused", "one_step_off", "in_flight")
SHARING: tuple[Placement, ...] = ("colocated", "fused")  # put engines and learner on the same devices
DRAWN = 1 << 14  # rollouts in the batches over which the time of the longest is averaged
ROUNDS = 1000  # drawn to see how long a round of rollouts takes
PASSES = 10  # until rows and period agree


class Split(NamedTuple):
    """`engines` of `tp` devices with `slots` rows each, and `learners` devices; `max_lag` as in [staleness]."""

    engines: int
    tp: int
    slots: int
    learners: int
    max_lag: int


class Period(NamedTuple):
    """Seconds between two optimizer steps. `engine_idle` is the share of an engine's time in which it has no row and,
    in flight, where it always has some, of its slots that are empty; `learner_idle` the share of its time that a
    learner waits.
    """

    placement: Placement
    split: Split
    period_s: float
    engine_idle: float
    learner_idle: float
    lag: Lag


def drain_s(lengths: Sequence[float] | np.ndarray, slots: int, rates: Rates) -> float:
    """How long one engine takes for these completions, started in this order, with nothing to follow them.

    Rows are as many processors of a greedy schedule, so with T the time at full rows, T <= W / slots + longest row
    (Brent's bound).
    """
    waiting = iter(lengths)
    running = list(islice(waiting, slots))
    heapq.heapify(running)
    progress, time_s = 0.0, len(lengths) * rates.prefill_s
    while running:
        end = running[0]
        time_s += (end - progress) * rates.decode_s(len(running))
        progress = end
        following = next(waiting, None)
        if following is None:
            heapq.heappop(running)
        else:
            heapq.heapreplace(running, end + following)
    return time_s


@lru_cache(maxsize=4096)  # placements and bounds on lag are tried at the same splits
def batch_drain_s(job: Job, engines: int, slots: int, rates: Rates) -> tuple[float, float]:
    """A batch dealt over the engines: when the last has finished, and when they have in the mean."""
    batches = job.lengths.draw((max(4, DRAWN // job.batch), job.batch))
    used = range(min(engines, job.batch))
    by_batch = np.array([[drain_s(batch[i::engines], slots, rates) for i in used] for batch in batches])
    return float(by_batch.max(1).mean()), float(by_batch.mean()) * by_batch.shape[1] / engines


def train_s(job: Job, learners: int, rates: Rates) -> float:
    """Training, with the passes of other models over the batch, a third of the cost of a trained token each."""
    algorithm = ALGORITHMS[job.algorithm]
    passes = job.trained_share * job.epochs * algorithm.trained + algorithm.forward / 3
    return rates.train_step_s + job.step_tokens * passes * rates.train_token_s / learners


def period_of(placement: Placement, job: Job, split: Split, rates: Rates) -> Period:
    if placement == "in_flight" and split.max_lag > 0:
        return _in_flight(job, split, rates)
    learns_s = train_s(job, split.learners, rates)
    ends_s, mean_s = batch_drain_s(job, split.engines, split.slots, rates)
    update_s = rates.publish_s + rates.load_s
    lag = Lag(0.0, 0.0, 0)
    match placement:
        case "one_step_off":
            period_s = max(ends_s, learns_s + rates.publish_s) + rates.load_s
            lag = Lag(1.0, 1.0, 1)
        case "fused":
            # What all devices have to do, but no less than the longest rollouts take.
            period_s = max(ends_s, mean_s + learns_s) + update_s
        case _:
            period_s = ends_s + learns_s + update_s
    if placement in SHARING:  # idle is whoever neither generates nor trains
        idle = 1 - (mean_s + learns_s) / period_s
        return Period(placement, split, period_s, idle, idle, lag)
    return Period(placement, split, period_s, 1 - mean_s / period_s, 1 - learns_s / period_s, lag)


def _in_flight(job: Job, split: Split, rates: Rates) -> Period:
    """Engines always full, as far as admission lets them be.

    Admission lets `(max_lag + 1) batch` rollouts exist, each from its launch to the end of the step that trains it. So
    by Little's law a rollout may exist for `max_lag + 1` periods, in which its round ends, its batch becomes full (half
    a period) and is trained. Where that takes longer it is the period that grows, and launches wait for steps.
    """
    learns_s = train_s(job, split.learners, rates) + rates.publish_s
    running, stretch = float(split.engines * split.slots), 1.0
    row_s = generates_s = held_s = period_s = 0.0
    for _ in range(PASSES):
        rows = running / split.engines
        decode_s = rates.decode_s(rows) + rows * rates.prefill_s / job.lengths.mean  # each row is followed by another
        row_s = stretch * decode_s  # engines stand still while they load
        generates_s = job.step_tokens / running * decode_s + rates.load_s
        held_s = (_round_tokens(job, running) * row_s + learns_s) / (split.max_lag + 0.5)
        period_s = max(generates_s, learns_s, held_s)
        stretch = period_s / (period_s - rates.load_s)
        # Engines that are held, or wait for a learner, run fewer rows, each of them faster.
        fewer = min(split.engines * split.slots, job.step_tokens * stretch * decode_s / period_s)
        running = (running + fewer) / 2
    if rates.shares_cores:
        busy_s = split.engines * generates_s + split.learners * learns_s + job.batch * rates.host_rollout_s
        period_s = max(period_s, busy_s / (split.engines * split.tp + split.learners))
    is_held = max(held_s, learns_s) >= generates_s
    lag = _lag(job, split, running, learns_s / period_s, is_held)
    if is_held:
        lag = lag._replace(token=_held_token_lag(job, split, row_s / period_s), launch=float(split.max_lag))
    row_idle = 1 - running / (split.engines * split.slots)
    return Period("in_flight", split, period_s, row_idle, 1 - learns_s / period_s, lag)


def _lag(job: Job, split: Split, running: float, learner_busy: float, is_held: bool) -> Lag:
    ended, ended_tokens = _waiting_for_round(job, running)
    # When a version is published the next batch has filled for as long as the step took; where launches are held,
    # whatever admission allows is there.
    batches = max(0.0, split.max_lag - (running + ended) / job.batch) if is_held else learner_busy
    load = Load(
        running=running,
        ended=ended,
        ended_tokens=ended_tokens,
        batches=batches,
        most_batches=batches,
        step_attempts=job.batch,
        step_tokens=job.step_tokens,
        mean=1.0,
        cv2=job.lengths.cv2,
        longest=job.lengths.largest / job.lengths.mean,
    )
    return predict(load)


def _held_token_lag(job: Job, split: Split, periods_per_token: float) -> float:
    """Where launches are held they come in bursts after each step, `max_lag` versions before they are trained.

    So a token is younger than its rollout's first by whole versions, and a rollout of a long round is older than the
    mean when it is trained, which counts for more where that rollout is long itself.
    """
    spans = job.lengths.tokens * periods_per_token
    whole = np.floor(spans)
    younger = (whole * (spans - (whole + 1) / 2)).mean() / spans.mean()  # floor(x), integrated from 0 to the span
    lengths = _rounds(job)
    ends = lengths.max(1)
    later = ((lengths * ends[:, None]).mean() / lengths.mean() - ends.mean()) * periods_per_token
    return max(split.max_lag - float(younger) + float(later), 0.0)


@lru_cache(maxsize=16)
def _rounds(job: Job) -> np.ndarray:
    """Lengths of rounds of rollouts, [ROUNDS, group]."""
    return job.lengths.draw((ROUNDS, job.group), seed=1)


def _round(job: Job, running: float) -> tuple[np.ndarray, np.ndarray]:
    """When rollouts of rounds start and end, in tokens of a row: a round starts as slots become free."""
    starts = np.arange(job.group) * job.lengths.mean / running
    return starts, starts + _rounds(job)


def _round_tokens(job: Job, running: float) -> float:
    """From a rollout's start to the end of the last of its round, in the mean."""
    starts, ends = _round(job, running)
    return float(ends.max(1).mean() - starts.mean())


def _waiting_for_round(job: Job, running: float) -> tuple[float, float]:
    """Attempts that have ended while their round has not, and their tokens, in the mean over time (Little's law)."""
    starts, ends = _round(job, running)
    waits = ends.max(1, keepdims=True) - ends
    per_token = running / job.lengths.mean  # attempts that start in the time of one token
    return per_token * float(waits.mean()), per_token * float((waits * (ends - starts)).mean())
