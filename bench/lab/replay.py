"""What another sampler would have launched on a recorded run.

The problems, pass rates and lengths are those of the run's ledger and do not move: a recording cannot say how the
policy would have come out under other data. The run's own sampler is replayed beside the other one, so that what the
lab gets wrong is seen before what it predicts is believed.
"""

from pathlib import Path

import msgspec

from bench.lab.config import LabConfig, LearningConfig, LedgerConfig
from bench.lab.recorded import Record, read_ledger
from bench.lab.runner import simulate
from bench.lab.tally import Report
from pipeline import rundir
from pipeline.config import dump_config, parse_config
from samplers.registry import SamplerConfig


class LevelCounts(msgspec.Struct):
    """Rollouts launched and trained, and problems solved at least once."""

    launched: int = 0
    trained: int = 0
    solved: int = 0


class Replay(msgspec.Struct, frozen=True):
    """By level: what the run did, what the lab says that its sampler does, and what the other sampler would do."""

    recorded: dict[str, LevelCounts]
    same: dict[str, LevelCounts]
    other: dict[str, LevelCounts]
    same_report: Report
    other_report: Report


def replay(run: Path, sampler: SamplerConfig) -> Replay:
    """As many rollouts as the run launched, under the run's own batches and engines. Raises ConfigError."""
    path = rundir.find(run)
    records = read_ledger(path)
    raw = dump_config(rundir.read_config(path)) | {"max_rollouts": sum(r.launched for r in records), "max_steps": 0}
    own = parse_config(raw, str(run), LabConfig)
    assert isinstance(own, LabConfig)
    table = msgspec.structs.replace(
        own.lab, population=LedgerConfig(str(path)), learning=LearningConfig(own=0.0, level=0.0, shared=0.0)
    )
    own = msgspec.structs.replace(own, lab=table)
    same, other = simulate(own), simulate(msgspec.structs.replace(own, sampler=sampler))
    return Replay(_recorded(records), _simulated(same), _simulated(other), same, other)


def _recorded(records: list[Record]) -> dict[str, LevelCounts]:
    levels: dict[str, LevelCounts] = {}
    for record in records:
        counts = levels.setdefault(record.level, LevelCounts())
        counts.launched += record.launched
        counts.trained += record.trained
        counts.solved += record.correct > 0
    return dict(sorted(levels.items()))


def _simulated(report: Report) -> dict[str, LevelCounts]:
    return {name: LevelCounts(c["launched"], c["trained"], c["solved"]) for name, c in report.levels.items()}
