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
from typing import Any, NamedTuple

import numpy as np

from pipeline import rundir
from pipeline.errors import ConfigError, NguError
from pipeline.metrics import Record, current_records, read_records


class Load(NamedTuple):
    """Means over the time of a run, in attempts, tokens and batches.

    `running`: attempts in engine slots. `ended`, `ended_tokens`: attempts that wait for a verdict or for the rest of
    their round, and their tokens. `batches`: full batches not yet trained, the one in training included. A step takes
    `step_attempts` and `step_tokens`, also what trains nothing. `cv2` is the squared coefficient of variation of
    lengths, `longest` the longest over the mean.
    """

    running: float
    ended: float
    ended_tokens: float
    batches: float
    step_attempts: float
    step_tokens: float
    cv2: float
    longest: float


class Lag(NamedTuple):
    """Versions between sampling and training: mean over tokens, mean over first tokens of rollouts, the largest."""

    token: float
    launch: float
    largest: float


def predict(load: Load) -> Lag:
    """Lag by Little's law, counting time in optimizer steps (PipelineRL, arXiv 2509.19128, has the largest lag alone).

    With H attempts running, B a step and Q waiting: a rollout's first token is (H + Q)/B steps old when it is trained.
    A token is sampled at a uniform point of a length-biased rollout, so half of the mean remaining time
    (H/B)(1 + CV^2) is left to it: (H/2B)(1 + CV^2) + Q/B, Q weighted by tokens. The longest rollout is L_max/E[L] times
    as old as the mean one. The batch that is being filled does not count: it makes the fraction of a version that a
    whole number of steps leaves out. Holds for rounds that are each trained on their own, at constant load, and out of
    step with each other: rollouts of one and the same length end in waves, and where admission holds launches they come
    in bursts after each step, at a launch lag of exactly max_lag.
    """
    steps = load.running / load.step_attempts
    waiting = load.ended / load.step_attempts + load.batches
    return Lag(
        token=steps / 2 * (1 + load.cv2) + load.ended_tokens / load.step_tokens + load.batches,
        launch=steps + waiting,
        largest=math.ceil(steps * load.longest + load.batches),
    )


def load_of(steps: Sequence[Record], lengths: Sequence[int]) -> Load:
    """The load between the first and the last of the step records, with lengths in tokens of judged attempts."""
    first, last = steps[0], steps[-1]
    metrics = [record["metrics"] for record in steps]
    seconds = np.diff([m["wall_s"] for m in metrics])

    def mean(name: str) -> float:
        return float(np.average([m[f"queue/mean_{name}"] for m in metrics[1:]], weights=seconds))

    sizes = np.asarray(lengths, dtype=np.float64)
    num_steps = last["step"] - first["step"]
    return Load(
        running=mean("running"),
        ended=mean("ended"),
        ended_tokens=mean("ended_tokens"),
        batches=mean("batches"),
        step_attempts=(last["rollouts"] - first["rollouts"]) / num_steps,
        step_tokens=(last["tokens"] - first["tokens"]) / num_steps,
        cv2=float(sizes.var() / sizes.mean() ** 2),
        longest=float(sizes.max() / sizes.mean()),
    )


def compare(run_dir: Path, skip: int) -> tuple[Lag, Lag]:
    """Measured and predicted lag of a run after its first `skip` steps; raises ConfigError when it is too short."""
    records = current_records(read_records(run_dir / "metrics.jsonl"))
    steps = [r for r in records if r["kind"] == "step" and r["step"] > skip]
    if len(steps) < 4:
        raise ConfigError(f"{run_dir}: {len(steps)} steps after the first {skip}; at least 4 are needed")
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        trained = "fate = (SELECT code FROM fates WHERE name = 'trained') AND step > ? AND num_tokens > 0"
        launch = db.execute(f"SELECT avg(step - 1 - oldest_version) FROM attempts WHERE {trained}", (skip,)).fetchone()
        rows = db.execute("SELECT num_tokens FROM attempts WHERE num_tokens > 0 AND step > ?", (skip,)).fetchall()
    metrics = [record["metrics"] for record in steps[1:]]
    tokens = [m["num_tokens"] for m in metrics]
    measured = Lag(
        token=float(np.average([m["lag_mean"] for m in metrics], weights=tokens)),
        launch=launch[0],
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
