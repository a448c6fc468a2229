"""How old the tokens of a batch are, from what stands between launch and learner: the model, and runs against it.

`python -m bench.lag_model RUN… [--skip N]` compares finished runs with it.
"""

import argparse
import math
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from pipeline import rundir
from pipeline.errors import ConfigError, NguError
from pipeline.metrics import Record, current_records, read_records


class Load(NamedTuple):
    """What is untrained when a version is published, a mean over the versions of a run.

    `running`: attempts in engine slots. `ended`, `ended_tokens`: attempts that wait for a verdict or for the rest of
    their round, and their tokens. `batches`: what waits to be trained, in batches, without the one just trained, and
    `most_batches` the most of it that a version found. A step takes `step_attempts` and `step_tokens`, also what trains
    nothing. Of the lengths that are trained `mean` and `longest` are in units of the mean over all attempts, and `cv2`
    is the squared coefficient of variation.
    """

    running: float
    ended: float
    ended_tokens: float
    batches: float
    most_batches: float
    step_attempts: float
    step_tokens: float
    mean: float
    cv2: float
    longest: float


class Lag(NamedTuple):
    """Versions between sampling and training: mean over tokens, mean over first tokens of rollouts, the largest."""

    token: float
    launch: float
    largest: float


def predict(load: Load) -> Lag:
    """Lag by counting (PipelineRL, arXiv 2509.19128, has the largest lag alone).

    A published version makes everything that is sampled and untrained a version older, and a step trains B attempts: so
    with H running and Q waiting at those moments the mean lag of first tokens is (H + Q)/B, whatever the order, and in
    steady state Little's law gives the same. Of a running rollout only the tokens so far count: seen at a random moment
    it is length-biased and half done, E[L](1 + CV^2)/2 tokens, hence (H/2B)(1 + CV^2) + Q/B with Q in tokens. That half
    is the model; it fails where rollouts start together, in waves of one length. A rollout of L tokens takes L/E[L]
    times as many steps as the mean one: so the longest, which may then wait for the most batches; and so those trained
    where they are longer than those left out (a rule that leaves out what is all right leaves out short ones).
    """
    steps = load.running / load.step_attempts
    waiting = load.ended / load.step_attempts + load.batches
    return Lag(
        token=steps * load.mean / 2 * (1 + load.cv2) + load.ended_tokens / load.step_tokens + load.batches,
        launch=steps * load.mean + waiting,
        largest=math.ceil(steps * load.longest + load.most_batches),
    )


def load_of(steps: Sequence[Record], lengths: Sequence[int]) -> Load:
    """The load between the first and the last of the step records; `lengths` are of trained rollouts, in tokens."""
    first, last = steps[0], steps[-1]
    metrics = [record["metrics"] for record in steps]

    def of(name: str) -> list[float]:
        return [m[f"untrained/{name}"] for m in metrics[:-1]]  # the last version ages nothing trained here

    sizes = np.asarray(lengths, dtype=np.float64)
    num_steps = last["step"] - first["step"]
    num_attempts, num_tokens = (last[name] - first[name] for name in ("rollouts", "tokens"))
    mean_length = num_tokens / num_attempts
    return Load(
        running=fmean(of("running")),
        ended=fmean(of("ended")),
        ended_tokens=fmean(of("ended_tokens")),
        batches=fmean(of("batches")),
        most_batches=max(of("batches")),
        step_attempts=num_attempts / num_steps,
        step_tokens=num_tokens / num_steps,
        mean=float(sizes.mean() / mean_length),
        cv2=float(sizes.var() / sizes.mean() ** 2),
        longest=float(sizes.max() / mean_length),
    )


def compare(run_dir: Path, skip: int) -> tuple[Lag, Lag]:
    """Measured and predicted lag of a run after its first `skip` steps; raises ConfigError when it is too short."""
    records = current_records(read_records(run_dir / "metrics.jsonl"))
    steps = [r for r in records if r["kind"] == "step" and r["step"] > skip]
    if len(steps) < 4:
        raise ConfigError(f"{run_dir}: {len(steps)} steps after the first {skip}; at least 4 are needed")
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        trained = "fate = (SELECT code FROM fates WHERE name = 'trained') AND step > ? AND num_tokens > 0"
        launch = f"SELECT avg(step - 1 - oldest_version) FROM attempts WHERE {trained} GROUP BY step"
        launches = db.execute(launch, (steps[0]["step"],)).fetchall()
        rows = db.execute(f"SELECT num_tokens FROM attempts WHERE {trained}", (steps[0]["step"],)).fetchall()
    metrics = [record["metrics"] for record in steps[1:]]
    # Every step counts alike, as every version does in the model: steps of a run do not train equally many rollouts.
    measured = Lag(
        token=fmean(m["lag_mean"] for m in metrics),
        launch=fmean(lag for (lag,) in launches),
        largest=max(m["lag_max"] for m in metrics),
    )
    return measured, predict(load_of(steps, [n for (n,) in rows]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lag_model", description="Runs against the lag model.")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--skip", type=int, default=3, help="steps at the start that do not count (engines fill up)")
    args = parser.parse_args()
    print(f"{'run':40}" + "".join(f"{f'{name} lag, model':>22}" for name in Lag._fields))
    try:
        for run in args.runs:
            measured, predicted = compare(rundir.find(run), args.skip)
            cells: list[Any] = [f"{m:.3f}, {p:.3f}" for m, p in zip(measured, predicted, strict=True)]
            print(f"{Path(run).name:40}" + "".join(f"{cell:>22}" for cell in cells))
    except NguError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return e.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
