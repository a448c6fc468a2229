"""`ngu bench e2e`: the figures of whole runs, side by side."""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from bench.files import read_results
from bench.study.curves import crossing
from bench.suite.base import Benchmark, Row, Say, figure, ratio
from bench.suite.e2e import ours, trl
from bench.suite.e2e.runs import Run, Trained
from bench.suite.e2e.trl import TrlConfig
from bench.suite.peers import find_python, say_missing
from bench.suite.results import commit
from pipeline.errors import ConfigError, NguError
from pipeline.sections import PositiveInt

Arm = Literal["async", "sync", "fixed", "ray", "trl"]
SETTINGS: dict[Arm, list[str]] = {
    "async": [],
    "sync": ["staleness.max_lag=0"],
    "fixed": ["sampler.kind=fixed", "sampler.num_rollouts=8"],
    "ray": ["cluster.kind=ray"],
}
THRESHOLDS = (0.3, 0.6)
Cost = Literal["seconds", "rollouts"]
COSTS: tuple[tuple[Cost, str], ...] = (("seconds", "s"), ("rollouts", "rollouts"))
ROLLOUTS_PER_STEP = 384


class E2EBench(Benchmark, frozen=True):
    """Each seed runs every arm in turn: `async` (as `ngu train` does it, with `settings`), `sync` (at max_lag 0, with
    `sync_settings`, since what is best for one need not be for the other), `fixed` (`async` with eight rollouts a
    problem, as TRL's), `ray` (`async` with its engine on a Ray cluster) and `trl`.

    `steps` optimizer steps of 384 rollouts; `trl.steps` and the rest of `trl` are those of TRL. Weights are put aside
    every `every_steps` and judged by `rollouts` rollouts of each of the 72 hard problems, at the end `final_rollouts`
    of all 360. `out` keeps a line for every run; the same command at the same commit goes on with what is missing.
    """

    arms: tuple[Arm, ...] = ("async", "sync", "trl")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: PositiveInt = 31
    settings: tuple[str, ...] = ()
    sync_settings: tuple[str, ...] = ()
    trl: TrlConfig = TrlConfig()
    every_steps: PositiveInt = 2
    rollouts: PositiveInt = 4
    final_rollouts: PositiveInt = 4
    out: str = "runs/bench-e2e"

    def run(self, say: Say) -> list[Row]:
        out = Path(self.out)
        python = find_python("trl") if "trl" in self.arms else None
        if "trl" in self.arms and python is None:
            say(say_missing("TRL"))
        arms: list[Arm] = [arm for arm in self.arms if arm != "trl" or python is not None]
        if not arms or not self.seeds:
            raise ConfigError("e2e: no arm or no seed to run")
        file = out / "runs.jsonl"
        done = {run.key: run for run in read_results(file, Run)}
        runs = []
        for seed in self.seeds:
            for arm in arms:
                key = self._key(arm, seed)
                if key not in done:
                    run = self._run(arm, seed, key, out / f"{arm}-{seed}", python)
                    with file.open("ab") as lines:
                        lines.write(msgspec.json.encode(run) + b"\n")
                    done[key] = run
                runs.append(done[key])
                say(_line(done[key]))
        return _rows(runs, arms, say)

    def _key(self, arm: Arm, seed: int) -> str:
        """Of whatever could change the result: the code too."""
        of_arm = self.trl if arm == "trl" else (self.steps, *self._settings(arm))
        text = f"{commit()} {arm} {seed} {of_arm} {self.every_steps} {self.rollouts} {self.final_rollouts}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _run(self, arm: Arm, seed: int, key: str, directory: Path, python: Path | None) -> Run:
        if arm == "trl":
            assert python is not None
            trained = trl.train(python, directory, seed, self.trl, self.every_steps)
        else:
            limits = [f"max_rollouts={self.steps * ROLLOUTS_PER_STEP}"]
            trained = ours.train(directory, seed, [*limits, *self._settings(arm)], self.every_steps)
        _check(arm, trained)
        return _judged(key, arm, seed, trained, self.rollouts, self.final_rollouts)

    def _settings(self, arm: Arm) -> list[str]:
        return [*(self.sync_settings if arm == "sync" else self.settings), *SETTINGS[arm]]


def _judged(key: str, arm: Arm, seed: int, trained: Trained, num_rollouts: int, num_final: int) -> Run:
    from bench.suite.e2e.judging import judge  # torch: only where something was trained

    return judge(key, arm, seed, trained, num_rollouts, num_final)


def _check(arm: Arm, trained: Trained) -> None:
    if len(trained.marks) < 2 or not trained.models:
        raise NguError(f"{arm}: the run took no step, or left no weights; raise steps")


# --- figures of one run ---


def cost_to(run: Run, threshold: float, of: Cost) -> float:
    """What training had cost when hard pass@1 first reached `threshold`; inf if it never did."""
    steps = sorted(run.hard)
    costs = [float(getattr(run.cost_at(step), of)) for step in steps]
    return crossing([0.0, *costs], [0.0, *(run.hard[step] for step in steps)], threshold)


def _line(run: Run) -> str:
    end = run.end
    return (
        f"{run.arm}, seed {run.seed}: {end.rollouts:,} rollouts in {end.seconds:.0f} s, hard pass@1 "
        f"{run.final_hard:.3f}, overall {run.final_overall:.3f}"
    )


# --- over seeds ---

PER_RUN: tuple[tuple[str, str, Callable[[Run], float], dict[str, dict[str, float]]], ...] = (
    ("rollouts a second", "rollouts/s", lambda r: r.end.rollouts / r.end.seconds, {}),
    ("tokens a second", "tokens/s", lambda r: r.end.tokens / r.end.seconds, {}),
    ("core-seconds a thousand rollouts", "core-s", lambda r: 1e3 * r.end.core_s / r.end.rollouts, {}),
    ("engines idle", "%", lambda r: 100 * r.engine_idle, {"async": {"at_most": 2.0}}),
    ("learner idle", "%", lambda r: 100 * r.learner_idle, {"async": {"at_most": 5.0}}),
    ("start-up and end", "s", lambda r: r.startup_s, {}),
    ("hard pass@1 at the end", "", lambda r: r.final_hard, {}),
    ("overall pass@1 at the end", "", lambda r: r.final_overall, {}),
)


def _rows(runs: Sequence[Run], arms: Sequence[Arm], say: Say) -> list[Row]:
    by_arm: dict[Arm, list[Run]] = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    rows = [
        figure(f"{arm}: {what}", unit, [of(run) for run in found], **aims.get(arm, {}))
        for what, unit, of, aims in PER_RUN
        for arm, found in by_arm.items()
    ]
    for threshold in THRESHOLDS:
        for arm, found in by_arm.items():
            rows += _crossings(arm, found, threshold, say)
    if "async" in by_arm:
        rows += _against(by_arm, "sync", {"rollouts": {"at_least": 1.5}}, say)
        rows += _against(by_arm, "ray", {"rollouts": {"at_most": 1 / 0.95}}, say)
        rows += _against(by_arm, "trl", {"rollouts": {"at_least": 3.0}, "time": {"at_most": 0.25}}, say)
    return rows


def _crossings(arm: Arm, runs: Sequence[Run], threshold: float, say: Say) -> list[Row]:
    """Medians over the seeds, counting one that never got there as infinite; no row when the median is."""
    rows = []
    for of, unit in COSTS:
        costs = [cost_to(run, threshold, of) for run in runs]
        reached = [c for c in costs if math.isfinite(c)]
        if math.isfinite(median(costs)) and len(reached) == len(costs):
            rows.append(figure(f"{arm}: {of} to hard pass@1 {threshold}", unit, reached))
        elif of == "seconds":
            got = ", ".join(f"{c:.0f} s" if math.isfinite(c) else "never" for c in costs)
            say(f"{arm}: to hard pass@1 {threshold}: {got}")
    return rows


def _against(by_arm: dict[Arm, list[Run]], other: Arm, aims: dict[str, dict[str, float]], say: Say) -> list[Row]:
    """`async` against another arm, seed by seed."""
    mine, theirs = by_arm["async"], by_arm.get(other)
    if not theirs:
        return []
    rates = [[run.end.rollouts / run.end.seconds for run in runs] for runs in (mine, theirs)]
    rows = [ratio(f"async against {other}: rollouts a second", *rates, **aims.get("rollouts", {}))]
    for name, of in (("hard", "final_hard"), ("overall", "final_overall")):
        gains = [getattr(a, of) - getattr(b, of) for a, b in zip(mine, theirs, strict=True)]
        rows.append(figure(f"async minus {other}: {name} pass@1 at the end", "", gains))
    times = [[cost_to(run, THRESHOLDS[0], "seconds") for run in runs] for runs in (mine, theirs)]
    if all(map(math.isfinite, times[0])):
        for run, seconds in zip(theirs, times[1], strict=True):
            if math.isinf(seconds):
                say(
                    f"{other}, seed {run.seed}: hard pass@1 {THRESHOLDS[0]} not reached in {run.end.seconds:.0f} s; "
                    "the ratio of times counts those, so it is at most what is shown"
                )
        known = [min(seconds, run.end.seconds) for seconds, run in zip(times[1], theirs, strict=True)]
        what = f"async against {other}: seconds to hard pass@1 {THRESHOLDS[0]}"
        rows.append(ratio(what, times[0], known, **aims.get("time", {})))
    return rows
