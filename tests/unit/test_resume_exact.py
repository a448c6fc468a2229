"""A run that was killed ten times ends with the bytes of one that never was: coordinator, sampler and a real learner.

It can be so where nothing depends on which of two machines was faster, hence `staleness.max_lag = 0`. With lag the
attempts that were in flight are run again under newer weights, as they must be.
"""

import random
from pathlib import Path

import torch
from fakes import Simulation
from learner_samples import tiny_model_dir

from learner.checkpoint import open_learner, save_checkpoint
from pipeline.checkpoints import latest
from pipeline.config import Config, parse_config
from pipeline.engines.fake import FakeScript
from pipeline.messages import Batch

NUM_STEPS, NUM_KILLS = 14, 10
SCRIPT = FakeScript(lambda problem: 0.7 if problem.level == "easy" else 0.1)


class Trained(Simulation):
    """Its learner takes real steps and writes real checkpoints."""

    def __init__(self, run_dir: Path, config: Config, resume: Path | None):
        self.learner, self.tokenizer = open_learner(config, resume)
        super().__init__(run_dir, config, script=SCRIPT, resume=resume)

    def learn(self, batch: Batch) -> dict[str, float]:
        return self.learner.step(batch.groups, batch.num_attempts).metrics

    def write_part(self, directory: Path) -> None:
        save_checkpoint(directory, self.learner, self.tokenizer)

    def kill(self) -> None:
        self.ledger._db.close()  # rolls back what was not committed


def config(path: Path) -> Config:
    tiny_model_dir(path / "model")
    return parse_config(
        {
            "seed": 3,
            "max_steps": NUM_STEPS,
            "max_rollouts": 0,
            "model": {"path": str(path / "model")},
            "engines": {"slots": 64},
            "learner": {"batch_size": 24, "lr": 1e-2},
            "staleness": {"max_lag": 0},
            "eval": {"every_steps": 0, "final_num_rollouts": 1},
            "daemon": {"checkpoint_every_steps": 3},
        },
        "test",
    )


def end_state(run: Trained) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    run.ledger.close()
    assert run.coordinator.state == "finished" and run.version == NUM_STEPS
    return run.learner.state_dict(), run.coordinator.sampler.state()


def test_a_run_killed_ten_times_ends_with_the_weights_of_one_that_never_was(tmp_path):
    cfg = config(tmp_path)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run, num_turns = Trained(tmp_path / "whole", cfg, None), 0
    before = {name: tensor.clone() for name, tensor in run.learner.state_dict().items()}
    while not run.coordinator.ended:
        run.turn()
        num_turns += 1
    weights, sampler_state = end_state(run)
    assert any(not torch.equal(weights[name], before[name]) for name in weights)

    kills = sorted(random.Random(1).sample(range(20, num_turns - 10), NUM_KILLS))
    run = Trained(tmp_path / "killed", cfg, None)
    for begin, end in zip([0, *kills], kills, strict=False):
        for _ in range(end - begin):
            run.turn()
        assert not run.coordinator.ended
        run.kill()
        run = Trained(tmp_path / "killed", cfg, latest(tmp_path / "killed"))
    run.run()
    again, again_state = end_state(run)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    assert again_state == sampler_state
