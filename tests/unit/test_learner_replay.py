"""`ngu replay`: recorded steps taken again, bit for bit; other settings from the very same place."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from learner_samples import random_groups, tiny_model_dir

from learner.checkpoint import open_learner, save_checkpoint
from learner.recording import REFUSED_KEPT, Recorder, StepRecord, keep_refused, read_record, recorded_steps
from learner.replay import plan
from pipeline.cli import main
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError, NguError
from pipeline.messages import Batch
from pipeline.rundir import write_config
from pipeline.weights import weights_checksum


class RecordedRun:
    """`num_steps` steps of a tiny learner, recorded as the learner process does; a checkpoint after step 2."""

    def __init__(self, path: Path, num_steps: int = 4, limit_gib: float = 1.0, **learner: object):
        torch.manual_seed(0)
        self.dir = path / "run"
        self.dir.mkdir()
        model_dir = tiny_model_dir(path / "start")
        self.config = self._config(str(model_dir), learner)
        write_config(self.dir, self.config)
        learner, tokenizer = open_learner(self.config, None)
        self.recorder = Recorder(self.dir, limit_gib, learner.policy_version)
        for step in range(1, num_steps + 1):
            batch = Batch(tuple(random_groups(learner.model, seed=step, num_groups=3)), 12, False)
            learner.step(batch.groups, batch.num_attempts)
            checksum = weights_checksum(learner.model.state_dict())
            self.recorder.write(StepRecord(step, batch, learner.config, checksum))
            if step == 2:
                (checkpoint := self.dir / "checkpoints" / "step_000002").mkdir(parents=True)
                save_checkpoint(checkpoint, learner, tokenizer)

    @staticmethod
    def _config(model_path: str, learner: dict) -> Config:
        raw = {"model": {"path": model_path}, "learner": {"lr": 1e-2, "warmup_steps": 2} | learner}
        return parse_config(raw, "test")

    def path_of(self, step: int) -> Path:
        return self.dir / "steps" / f"{step:06d}.msgpack"


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path)


def replayed(run: RecordedRun, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict]:
    code = main(["replay", str(run.dir), "--json", *args])
    return code, json.loads(capsys.readouterr().out)


def test_every_step_is_repeated_bit_for_bit_from_the_start_and_from_a_checkpoint(run, capsys):
    for steps, base, count in (("1..4", 0, 4), ("2..3", 0, 2), ("3..4", 2, 2), ("4", 2, 1)):
        code, report = replayed(run, capsys, "--steps", steps)
        assert code == 0 and report["is_identical"] and report["from_step"] == base
        assert len(report["steps"]) == count and all(s["is_identical"] for s in report["steps"])
        assert all(s["variant"] is None for s in report["steps"])


def test_weights_that_differ_are_told_and_exit_1(run, capsys):
    record = read_record(run.dir, 3)
    run.recorder.write(StepRecord(3, Batch(record.batch.groups[:2], 12, False), record.config, record.checksum))
    code, report = replayed(run, capsys, "--steps", "3..4")
    assert code == 1 and not report["is_identical"]
    assert main(["replay", str(run.dir), "--steps", "3..4"]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 2


def test_another_loss_is_taken_from_the_same_place_and_leaves_the_run_as_it_was(run, capsys):
    code, report = replayed(run, capsys, "--steps", "2..4", "learner.loss.kind=asymre")
    assert code == 0, "the original stays identical although each step was also taken otherwise"
    for step in report["steps"]:
        variant = step["variant"]
        assert variant["metrics"]["loss"] != pytest.approx(step["metrics"]["loss"], rel=1e-3)
        assert variant["metrics"]["ess"] == step["metrics"]["ess"], "the same tokens from the same weights"
        assert 0.0 < variant["gradient_cosine"] < 1.0 - 1e-4
        assert 0.0 < variant["update_cosine"] < 1.0 - 1e-4
    code, report = replayed(run, capsys, "--steps", "3", "learner.max_grad_norm=1e9")
    assert report["steps"][0]["variant"]["gradient_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert main(["replay", str(run.dir), "--steps", "3", "learner.lr=0.0"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "identical" in shown[2] and shown[3].split()[-1] == "-", "an update of zero has no direction"


def test_the_same_settings_give_the_same_step(run, capsys):
    _, report = replayed(run, capsys, "--steps", "3..4", "learner.lr=1e-2")
    for step in report["steps"]:
        own = {k: v for k, v in step["metrics"].items() if k != "step_s"}
        assert own == {k: v for k, v in step["variant"]["metrics"].items() if k != "step_s"}
        assert step["variant"]["update_cosine"] == pytest.approx(1.0, abs=1e-12)


def test_a_run_with_a_reference_is_also_taken_under_another(tmp_path, capsys):
    run = RecordedRun(tmp_path, num_steps=2, kl={"coef": 0.5})
    other = tiny_model_dir(tmp_path / "other", seed=7)
    _, report = replayed(run, capsys, "--steps", "1", f"learner.kl.reference={other}")
    step = report["steps"][0]
    assert step["is_identical"] and step["metrics"]["kl_ref"] == 0.0, "step 1 starts from its own reference"
    assert step["variant"]["metrics"]["kl_ref"] > 0.1


def test_a_critic_can_be_tried_with_settings_of_its_own(run, capsys):
    _, report = replayed(run, capsys, "--steps", "3", "learner.loss.kind=ppo", "learner.loss.critic.warmup_steps=0")
    assert "critic/loss" in report["steps"][0]["variant"]["metrics"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--steps", "4..5"], "4..5 cannot be replayed; those that can are 1..4"),
        (["--steps", "0..2"], "a..b with 1 <= a <= b"),
        (["--steps", "3..2"], "a..b with 1 <= a <= b"),
        (["--steps", "all"], "a..b with 1 <= a <= b"),
        (["--steps", "3", "sampler.kind=fixed"], "'sampler.kind' has no part"),
        (["--steps", "3", "learner.batch_size=3"], "'learner.batch_size' has no part"),
        (["--steps", "3", "learner.lora.rank=4"], "'learner.lora.rank' has no part"),
        (["--steps", "3", "learner.num_processes=2"], "'learner.num_processes' has no part"),
        (["--steps", "3", "learner.loss.kind=nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_replayed_exits_2_in_one_line(run, capsys, args, words):
    assert main(["replay", str(run.dir), *args]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_plan_needs_every_step_between_its_start_and_the_last(run):
    assert plan(run.dir, 2, 4).base == 0
    run.path_of(1).unlink()
    assert plan(run.dir, 3, 4).base == 2
    with pytest.raises(ConfigError, match=r"those that can are 3\.\.4"):
        plan(run.dir, 2, 4)
    run.path_of(3).unlink()
    with pytest.raises(ConfigError, match="no step is recorded"):
        plan(run.dir, 4, 4)


def test_a_torn_record_and_a_torn_checkpoint_are_found(run, capsys):
    (run.dir / "checkpoints" / "step_000002" / "optimizer.safetensors").write_bytes(b"torn")
    assert plan(run.dir, 3, 4).checkpoint is None
    data = run.path_of(2).read_bytes()
    run.path_of(2).write_bytes(data[:-1])
    with pytest.raises(NguError, match="step 2"):
        read_record(run.dir, 2)
    assert main(["replay", str(run.dir), "--steps", "3"]) == 1
    assert "unusable record of step 2" in capsys.readouterr().err


def test_records_are_bounded_and_those_of_a_dead_learner_are_dropped(run):
    record = read_record(run.dir, 4)
    two = 2.5 * run.path_of(4).stat().st_size / 2**30
    Recorder(run.dir, two, policy_version=4).write(StepRecord(5, record.batch, record.config, ""))
    assert recorded_steps(run.dir) == [4, 5]
    Recorder(run.dir, two, policy_version=4)
    assert recorded_steps(run.dir) == [4], "the resumed learner will take step 5 again"
    Recorder(run.dir, 0.0, policy_version=4).write(StepRecord(5, record.batch, record.config, ""))
    assert recorded_steps(run.dir) == [4]
    for number in (999_999, 1_000_000):
        Recorder(run.dir, two, policy_version=number).write(msgspec.structs.replace(record, step=number))
    assert recorded_steps(run.dir) == [999_999, 1_000_000]
    refused = [keep_refused(run.dir, step, record.batch) for step in range(REFUSED_KEPT + 2)]
    assert [path.exists() for path in refused] == [False] * 2 + [True] * REFUSED_KEPT
