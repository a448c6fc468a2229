"""A run that was killed ten times ends with the bytes of one that never was: coordinator, sampler and a real learner.
So does one whose learner alone was killed again and again.

It can be so where nothing depends on which of two machines was faster, hence `staleness.max_lag = 0`. With lag the
attempts that were in flight are run again under newer weights, as they must be.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from fakes import Simulation, notice
from learner_samples import tiny_model_dir

from learner.checkpoint import open_learner, save_checkpoint
from pipeline.checkpoints import latest, partial_dir
from pipeline.config import Config, parse_config
from pipeline.engines.fake import FakeScript
from pipeline.messages import Batch, NewWeights, WeightsNotice, WorkItems
from pipeline.weights import weights_checksum

NUM_STEPS, NUM_KILLS, NUM_DEATHS = 14, 10, 20
SCRIPT = FakeScript(lambda problem: 0.7 if problem.level == "easy" else 0.1)


class Trained(Simulation):
    """Its learner takes real steps and writes real checkpoints."""

    def __init__(self, run_dir: Path, config: Config, resume: Path | None):
        self.checksums: dict[int, str] = {}
        self.learner, self.tokenizer = open_learner(config, resume)
        super().__init__(run_dir, config, script=SCRIPT, resume=resume, make_notice=self.publish)

    def publish(self, version: int) -> WeightsNotice:
        checksum = weights_checksum(self.learner.state_dict())
        assert self.checksums.setdefault(version, checksum) == checksum, f"version {version} came out otherwise"
        return msgspec.structs.replace(notice(version), checksum=checksum)

    def start_learner(self) -> None:
        self.learner, self.tokenizer = open_learner(self.config, latest(self.run_dir))
        super().start_learner()

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


class Whole(NamedTuple):
    """What a run that nobody disturbs comes to."""

    config: Config
    num_turns: int
    weights: dict[str, torch.Tensor]
    sampler: dict[str, object]
    checksums: dict[int, str]
    launched: int


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("whole")
    cfg = config(path)
    run, num_turns = Trained(path, cfg, None), 0
    while not run.coordinator.ended:
        run.turn()
        num_turns += 1
    assert len(set(run.checksums.values())) == NUM_STEPS + 1, "every step changes the weights"
    return Whole(cfg, num_turns, *end_state(run), run.checksums, run.ledger.counts["launched"])


def test_a_run_killed_ten_times_ends_with_the_weights_of_one_that_never_was(tmp_path, whole):
    (tmp_path / "killed").mkdir()
    cfg, weights = whole.config, whole.weights
    kills = sorted(random.Random(1).sample(range(20, whole.num_turns - 10), NUM_KILLS))
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
    assert again_state == whole.sampler


def sent(run: Simulation, kind: type) -> list[Any]:
    """To engines, in order."""
    return [message for name, message in run.sent if name in run.engines and isinstance(message, kind)]


def test_a_learner_killed_twenty_times_catches_up_alone(tmp_path, whole):
    """It dies in steps, between them, while it catches up and with a checkpoint half written; nobody else notices."""
    rng = random.Random(2)
    run, deaths, newest, was_behind = Trained(tmp_path, whole.config, None), 0, 0, 0
    while not run.coordinator.ended:
        run.turn()
        run.check_books()
        assert run.coordinator.policy_version >= newest, "the books go back"
        newest = run.coordinator.policy_version
        was_behind += (run.coordinator.lineage.version or newest) < newest
        if deaths < NUM_DEATHS and rng.random() < 0.1:
            deaths += 1
            run.kill_learner()
            (partial_dir(tmp_path, newest + 1) / "model").mkdir(parents=True, exist_ok=True)
            for _ in range(rng.randrange(6)):
                run.turn()
            run.start_learner()
    assert deaths == NUM_DEATHS and was_behind > 10
    weights, sampler_state = end_state(run)
    assert all(torch.equal(weights[name], whole.weights[name]) for name in weights)
    assert sampler_state == whole.sampler and run.checksums == whole.checksums
    assert [record["step"] for record in run.sink.of_kind("step")] == list(range(1, NUM_STEPS + 1))
    attempts = [work.attempt_id for message in sent(run, WorkItems) for work in message.items]
    assert len(attempts) == len(set(attempts)), "an attempt was launched again"
    assert run.ledger.counts["launched"] == whole.launched
    versions = [message.notice.policy_version for message in sent(run, NewWeights)]
    assert versions == list(range(NUM_STEPS + 1)), "engines hear of each version once: its bytes stay the same"
    assert not list((tmp_path / "checkpoints").glob(".step_*"))
