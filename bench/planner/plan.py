"""A plan: each placement at its best split, which of them to take, and how sure that is."""

import math
from typing import NamedTuple

import msgspec

from bench.planner.hardware import BYTES, KINDS, Gpus, Rates, data_sheet_rates
from bench.planner.placements import PLACEMENTS, SHARING, Period, Placement, Split, period_of
from bench.planner.work import Job, Work, depth_s, engine_rows, learner_bytes, work_of
from pipeline.errors import ConfigError

# Two periods this near are one: then the smaller lag decides.
SAME = 0.05
MAX_SLOTS = 512
SPLITS = 12  # numbers of engines tried


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one device: weights and cache of an engine with these rows, state of a learner."""

    engine: float
    learner: float
    available: float


class SystemPlan(msgspec.Struct, frozen=True):
    work: Work
    depth_s: float
    memory: Memory
    rates: Rates
    periods: list[Period]
    best: Period
    concurrency: int
    says: list[str]
    settings: list[str]


class Machine(NamedTuple):
    """`rates` is None where only the data sheet is known."""

    gpus: Gpus
    rates: Rates | None


def make_plan(job: Job, machine: Machine, max_lag: int) -> SystemPlan:
    """The best split for every placement; raises ConfigError when the model does not fit the devices.

    `max_lag` bounds the mean age of a batch in versions, and with it how much is in flight.
    """
    tp, min_learners = least_devices(job, machine)
    rates = rates_of(job, machine, tp)
    rows = max_rows(job, machine, tp)
    fit = tp, min_learners, rows
    periods = [best_of(p, job, rates, _splits(p, job, machine.gpus.num, fit, max_lag), max_lag) for p in PLACEMENTS]
    own = [p for p in periods if p.placement not in SHARING]  # what `ngu train` can be told to do
    best = min(own, key=lambda p: (round(math.log(p.period_s) / SAME), p.lag.token))
    split = best.split
    cached = split.slots * job.context * job.model.kv_bytes(BYTES)
    memory = Memory(
        engine=(job.model.weight_bytes(BYTES) + cached) / split.tp,
        learner=learner_bytes(job) / split.learners,
        available=KINDS[machine.gpus.kind].memory if machine.gpus.kind in KINDS else math.inf,
    )
    concurrency = split.engines * split.slots
    settings = {
        "engines.count": split.engines,
        "engines.slots": split.slots,
        "engines.tp": split.tp,
        "learner.num_processes": split.learners,
        "learner.batch_size": job.batch,
        "staleness.max_lag": split.max_lag,
    }
    if split.tp == 1:
        del settings["engines.tp"]
    says = _says(job, machine, rates, best, periods)
    lines = [f"{name}={value}" for name, value in settings.items()]
    return SystemPlan(work_of(job), depth_s(job, rates), memory, rates, periods, best, concurrency, says, lines)


def rates_of(job: Job, machine: Machine, tp: int) -> Rates:
    if machine.rates is not None:
        return machine.rates
    return data_sheet_rates(machine.gpus.kind, job.model, job.context, job.train_token_flops, tp)


def least_devices(job: Job, machine: Machine) -> tuple[int, int]:
    """Devices an engine needs, and devices the learner needs at least."""
    if machine.gpus.kind not in KINDS:
        if machine.rates is None:
            raise ConfigError("--gpus CPU has no data sheet: give --measured FILE, which `ngu plan measure` writes")
        return 1, 1
    memory = KINDS[machine.gpus.kind].memory
    tp = 1
    while job.model.weight_bytes(BYTES) > 0.6 * memory * tp:
        tp *= 2
    learners = math.ceil(learner_bytes(job) / (0.9 * memory))
    if tp + learners > machine.gpus.num:
        raise ConfigError(
            f"{machine.gpus.kind}x{machine.gpus.num}: an engine needs {tp} and the learner {learners} devices for "
            f"their memory; take more of them, or larger ones"
        )
    return tp, learners


def max_rows(job: Job, machine: Machine, tp: int) -> int:
    if machine.gpus.kind not in KINDS:
        return MAX_SLOTS
    rows = engine_rows(job, KINDS[machine.gpus.kind].memory * tp)
    if rows < 1:
        raise ConfigError(f"{machine.gpus.kind}: no cache is left beside the weights for one completion")
    return min(rows, MAX_SLOTS)


def best_of(placement: Placement, job: Job, rates: Rates, splits: list[Split], max_lag: int) -> Period:
    """The fastest of some splits, in flight with the smallest bound on lag that costs little."""
    tried = [period_of(placement, job, split, rates) for split in splits]
    best = min(tried, key=lambda p: (round(math.log(p.period_s) / SAME), p.split.engines * p.split.slots))
    if placement != "in_flight":
        return best
    split = best.split._replace(max_lag=_least_lag(job, best.split, rates, max_lag))
    return period_of(placement, job, split, rates)


def _least_lag(job: Job, split: Split, rates: Rates, max_lag: int) -> int:
    """The smallest bound under which engines are as busy as under the largest, by a twentieth."""
    best_s = period_of("in_flight", job, split._replace(max_lag=max_lag), rates).period_s
    for lag in range(1, max_lag):
        if period_of("in_flight", job, split._replace(max_lag=lag), rates).period_s <= (1 + SAME) * best_s:
            return lag
    return max_lag


def slots_up_to(rows: int) -> list[int]:
    return [1 << i for i in range(rows.bit_length()) if 1 << i <= rows]


def _splits(placement: Placement, job: Job, devices: int, fit: tuple[int, int, int], max_lag: int) -> list[Split]:
    tp, min_learners, rows = fit
    slots = slots_up_to(rows)
    most = devices // tp
    shared = placement in SHARING
    if shared:
        counts = [most]
    else:
        most = (devices - min_learners) // tp
        counts = sorted({max(1, round(most * i / SPLITS)) for i in range(1, SPLITS + 1)})
    lag = {"one_step_off": 1, "in_flight": max_lag}.get(placement, 0)
    return [
        Split(n, tp, h, devices if shared else devices - n * tp, lag)
        for n in counts
        for h in slots
        # More rows than this are never filled where a batch is generated at a time.
        if placement == "in_flight" or h == slots[0] or n * h < 2 * job.batch
    ]


def _says(job: Job, machine: Machine, rates: Rates, best: Period, periods: list[Period]) -> list[str]:
    by_name = {p.placement: p for p in periods}
    gain = by_name["synchronous"].period_s / best.period_s
    bound = "the engines" if best.engine_idle < best.learner_idle else "the learner"
    says = [f"{best.placement.replace('_', ' ')} is {gain:.2f} times synchronous; {bound} set the pace"]
    sharing = min((by_name[placement] for placement in SHARING), key=lambda p: p.period_s)
    if sharing.period_s < (1 - SAME) * best.period_s:
        says.append(
            f"{sharing.placement} would be {best.period_s / sharing.period_s:.2f} times as fast as that, but "
            "`ngu train` gives engines and learner devices of their own"
        )
    if machine.rates is None:
        says.append(
            f"rates are not measured ({rates.source}): a third more or less is likely; `ngu plan measure` knows"
        )
    else:
        says.append(f"rates are measured ({rates.source})")
    if not job.lengths.is_measured:
        says.append(
            f"lengths are a guess from mean and limit (log-normal, CV^2 {job.lengths.cv2:.2f}); give a run or file"
        )
    if job.rounds > 1:
        rollouts = job.rounds * job.group
        says.append(
            f"a problem gets {job.rounds:.2f} rounds, {rollouts:.1f} rollouts, in the mean; those of an earlier round "
            f"are about {best.lag.launch:.1f} versions older for each round that followed"
        )
    if best.lag.largest > 8:
        says.append(
            f"single tokens are up to {best.lag.largest} versions old: see `ngu stability` for losses that bear it"
        )
    return says
