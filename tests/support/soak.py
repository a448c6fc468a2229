"""`just soak`: a simulated run at full rate for minutes; what grows in a run of weeks shows here.

The coordinator with its ledger, journal, checkpoints and metrics is the real one and writes real files. Engines,
verifier and learner are the fakes of the tests, in the same process.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from fakes import Simulation

from pipeline.config import parse_config
from pipeline.engines.fake import FakeScript
from pipeline.guards import tree_bytes
from pipeline.metrics import open_sinks

CONFIG = {
    "max_rollouts": 0,
    "max_steps": 1_000_000_000,
    "engines": {"slots": 512},
    "learner": {"batch_size": 384},
    "staleness": {"max_lag": 4},
    "eval": {"every_steps": 100, "final_num_rollouts": 1},
    "daemon": {"checkpoint_every_steps": 5, "ledger_keep_steps": 20},
}
SHORT = FakeScript(min_tokens=1, max_tokens=3)
NUM_SAMPLES = 12
WARM_UP = 4  # samples; the rest is compared half with half
TOLERANCE = 0.02
METRICS = ("metrics.jsonl", "tensorboard")  # the record of a run, which grows with its steps by intention


class Sample(NamedTuple):
    """The rate by wall time and by the CPU time of this process, fakes included, which a busy machine moves less."""

    attempts_per_s: float
    attempts_per_core_s: float
    memory_mib: float
    disk_mib: float
    metrics_bytes_per_step: float


class Soak(Simulation):
    """Forgets what a test would look at afterwards."""

    def turn(self) -> None:
        super().turn()
        self.sent.clear()
        self.batches.clear()
        self.taken.clear()


def size_bytes(path: Path) -> int:
    """Of a file or a directory; 0 for one that has just been replaced."""
    try:
        return sum(map(size_bytes, path.iterdir())) if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0


def observe(run: Soak, seconds: float) -> Sample:
    """Run for `seconds`: the mean of memory, and the maximum of the disk, which rises up to each checkpoint."""
    launched, step, metrics = run.ledger.counts["launched"], run.version, _metrics_bytes(run)
    memory, disk = [], []
    start = due = time.monotonic()
    cpu_start = time.process_time()
    while (now := time.monotonic()) < start + seconds:
        if now >= due:
            due = now + 0.5
            memory.append(tree_bytes(os.getpid()))
            disk.append(size_bytes(run.run_dir) - _metrics_bytes(run))
        run.turn()
    num = run.ledger.counts["launched"] - launched
    rates = num / (time.monotonic() - start), num / (time.process_time() - cpu_start)
    grown = (_metrics_bytes(run) - metrics) / max(run.version - step, 1)
    return Sample(*rates, mean(memory) / (1 << 20), max(disk) / (1 << 20), grown)


def _metrics_bytes(run: Soak) -> int:
    return sum(size_bytes(run.run_dir / name) for name in METRICS)


def changes(samples: list[Sample]) -> dict[str, float]:
    """Relative change of each figure between the halves of what follows the warm-up."""
    kept = samples[WARM_UP:]
    first, second = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    means = [[mean(values) for values in zip(*half, strict=True)] for half in (first, second)]
    return {name: b / a - 1 for name, a, b in zip(Sample._fields, *means, strict=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    seconds = 60 * parser.parse_args().minutes / NUM_SAMPLES
    with tempfile.TemporaryDirectory(prefix="ngu-soak-") as directory:
        path = Path(directory)
        config, sink = parse_config(CONFIG, "soak"), open_sinks(path)
        run = Soak(path, config, num_problems=1000, script=SHORT, step_turns=1, sink=sink)
        samples = []
        print(("%24s" * len(Sample._fields)) % Sample._fields)
        for _ in range(NUM_SAMPLES):
            samples.append(observe(run, seconds))
            print("".join(f"{value:24,.1f}" for value in samples[-1]), flush=True)
        run.check_books()
        print(f"{run.version} steps, {run.ledger.counts['launched']:,} attempts")
        run.ledger.close()
        run.sink.close()
    found = changes(samples)
    print("".join(f"{value:+24.1%}" for value in found.values()))
    grows = [name for name in ("memory_mib", "disk_mib") if found[name] > TOLERANCE]
    print(f"grows: {', '.join(grows)}" if grows else f"flat within {TOLERANCE:.0%}")
    return 1 if grows else 0


if __name__ == "__main__":
    sys.exit(main())
