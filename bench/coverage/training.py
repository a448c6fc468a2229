"""How the pass@1 of problems spread out over the training of a run, from its own evaluations."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.scaling.reshaping import Interference, thinned_interference
from pipeline.metrics import Record, current_records, read_records


class Snapshot(msgspec.Struct, frozen=True):
    """One evaluation, as if every problem had had `num_rollouts`: the fewest that an evaluation of the run gave most
    problems.
    """

    rollouts: int
    num_rollouts: int
    pass_at_1: Interference


def snapshots(run_dir: Path) -> list[Snapshot]:
    """Every evaluation of a run; none where it recorded no distribution."""
    found = [r for r in current_records(read_records(run_dir / "metrics.jsonl")) if _has_distribution(r)]
    if not found:
        return []
    fewest = min(int(max(r["solved"], key=lambda n: sum(r["solved"][n]))) for r in found)
    return [Snapshot(r["rollouts"], fewest, thinned_interference(r["solved"], fewest)) for r in found]


def _has_distribution(record: Record) -> bool:
    return record["kind"] == "eval" and bool(record.get("solved"))


class Course(msgspec.Struct, frozen=True):
    """The snapshots of one run of a method."""

    method: str
    seed: int
    snapshots: Sequence[Snapshot]
