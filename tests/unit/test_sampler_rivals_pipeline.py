"""Every sampler in the coordinator with fake peers: the run ends by itself and no attempt is lost."""

from pathlib import Path
from typing import get_args

import pytest
from fakes import Simulation

from pipeline.checkpoints import latest
from pipeline.config import Config, parse_config
from pipeline.engines.fake import FakeScript
from samplers.base import Problem
from samplers.registry import SamplerConfig

HISTORY = {"cool_down": 1, "retire_at": 0.95, "retire_min_attempts": 8}
SAMPLERS = [{"kind": option.__struct_config__.tag} for option in get_args(SamplerConfig)]
SAMPLERS += [
    {"kind": "reinforce_ada", "rule": "est"},
    {"kind": "reinforce_ada", "rule": "seq_pos"},
    {"kind": "fixed", "drop_zero_variance": False},
]


def config(sampler: dict[str, object], batch_by: str, batch_size: int) -> Config:
    raw = {
        "max_rollouts": 400,
        "sampler": sampler,
        "engines": {"slots": 32},
        "learner": {"batch_by": batch_by, "batch_size": batch_size},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 2},
    }
    return parse_config(raw, "test")


def pass_rate(problem: Problem) -> float:
    return 0.7 if problem.level == "easy" else 0.1


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: "-".join(str(v) for v in s.values()))
@pytest.mark.parametrize(("batch_by", "batch_size"), [("attempts", 64), ("completions", 16)])
def test_a_run_ends_by_itself_whatever_the_sampler(
    tmp_path: Path, sampler: dict[str, object], batch_by: str, batch_size: int
):
    cfg = config(sampler | {"history": HISTORY}, batch_by, batch_size)
    run = Simulation(tmp_path, cfg, num_problems=30, script=FakeScript(pass_rate, max_tokens=8))
    run.run()
    assert run.coordinator.state == "finished"
    assert run.ledger.num_open == 0
    run.ledger.commit()
    stored = run.ledger.stored_counts()
    assert sum(stored.values()) == run.ledger.counts["launched"] >= 400
    assert stored["trained"] == sum(len(g.rollouts) for b in run.batches for g in b.groups) > 0
    run.ledger.close()


@pytest.mark.parametrize("kind", ["knapsack", "greso", "speed", "isocompute"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, kind: str):
    cfg = config({"kind": kind}, "attempts", 64)
    script = FakeScript(pass_rate, max_tokens=8)
    first = Simulation(tmp_path, cfg, num_problems=30, script=script)
    while first.version < 2:
        first.turn()
    first.coordinator.stop_requested = True
    first.run()
    first.ledger.close()
    checkpoint = latest(tmp_path)
    assert checkpoint is not None and first.coordinator.state == "stopped"

    again = Simulation(tmp_path, cfg, num_problems=30, script=script, resume=checkpoint)
    again.run()
    assert again.coordinator.state == "finished"
    assert again.ledger.num_open == 0
    assert again.coordinator.tally.counters["launched"] >= 400
    again.ledger.close()
