"""Checkpoints: exact resumption, and refusal of anything torn."""

import shutil

import numpy as np
import pytest
import torch
from learner_samples import random_groups, tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner import checkpoint as checkpoints
from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.model import load_model
from pipeline.config import LearnerConfig
from pipeline.errors import WeightError
from pipeline.manifest import MANIFEST, verify_manifest

CONFIG = LearnerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.01)


def weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def make_learner(path):
    model, tokenizer = load_model(str(path))
    return Learner(model, CONFIG, 1.0), tokenizer


@pytest.fixture
def saved(tmp_path):
    """A checkpoint after two steps, its directory, and the learner that wrote it."""
    learner, tokenizer = make_learner(tiny_model_dir(tmp_path / "start"))
    for seed in range(2):
        learner.step(random_groups(learner.model, seed, drift=0.1))
    directory = tmp_path / "step_2"
    directory.mkdir()
    save_checkpoint(directory, learner, tokenizer)
    return directory, learner


def resumed(directory):
    learner, _ = make_learner(directory / checkpoints.MODEL)
    load_checkpoint(directory, learner)
    return learner


def test_a_resumed_learner_takes_the_same_steps(saved):
    directory, straight = saved
    again = resumed(directory)
    assert again.policy_version == 2 and torch.equal(weights(again), weights(straight))
    for seed in range(2, 5):
        groups = random_groups(straight.model, seed, drift=0.1)
        first, second = straight.step(groups), again.step(groups)
        del first.metrics["step_s"], second.metrics["step_s"]
        assert first == second
    assert torch.equal(weights(again), weights(straight))


def test_counters_and_random_state_come_back(saved, tmp_path):
    directory, learner = saved
    learner.num_skipped, learner.num_skipped_in_a_row = 5, 2
    tokenizer = AutoTokenizer.from_pretrained(directory / checkpoints.MODEL)
    torch.manual_seed(123)
    save_checkpoint(directory, learner, tokenizer)  # over the one that is there, as after an interrupted try
    expected = torch.rand(3)
    again = resumed(directory)
    assert torch.equal(torch.rand(3), expected)
    assert (again.policy_version, again.num_skipped, again.num_skipped_in_a_row) == (2, 5, 2)


def test_a_learner_that_has_not_stepped_can_be_saved(tmp_path):
    learner, tokenizer = make_learner(tiny_model_dir(tmp_path / "start"))
    (tmp_path / "step_0").mkdir()
    save_checkpoint(tmp_path / "step_0", learner, tokenizer)
    assert resumed(tmp_path / "step_0").policy_version == 0


def test_the_model_part_is_an_ordinary_directory(saved):
    directory, learner = saved
    model = AutoModelForCausalLM.from_pretrained(directory / checkpoints.MODEL)
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), weights(learner))
    assert AutoTokenizer.from_pretrained(directory / checkpoints.MODEL).eos_token_id == 1


def files(directory):
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_flipped_byte_anywhere_is_refused(saved):
    directory, _ = saved
    rng = np.random.default_rng(0)
    verify_manifest(directory)
    for path in files(directory):
        whole = path.read_bytes()
        everywhere = range(len(whole)) if path.name == MANIFEST else rng.integers(0, len(whole), 25)
        for position in {0, len(whole) - 1, *(int(p) for p in everywhere)}:
            torn = bytearray(whole)
            torn[position] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(bytes(torn))
            with pytest.raises(WeightError, match="resume from another"):
                verify_manifest(directory)
        path.write_bytes(whole)
    verify_manifest(directory)


def test_a_file_cut_short_or_gone_is_refused(saved):
    directory, _ = saved
    for path in files(directory):
        whole = path.read_bytes()
        for size in {0, 1, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:size])
            with pytest.raises(WeightError, match="resume from another"):
                verify_manifest(directory)
        path.unlink()
        with pytest.raises(WeightError, match="resume from another"):
            verify_manifest(directory)
        path.write_bytes(whole)


def test_a_write_that_is_interrupted_leaves_nothing_valid(saved, monkeypatch):
    directory, learner = saved
    tokenizer = AutoTokenizer.from_pretrained(directory / checkpoints.MODEL)

    def full_disk(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(directory, learner, tokenizer)
    with pytest.raises(WeightError, match="unfinished"):
        verify_manifest(directory)


def test_an_optimizer_of_another_model_is_refused(saved):
    directory, learner = saved
    del learner.model.model.layers[1]
    with pytest.raises(WeightError, match="another model"):
        load_checkpoint(directory, learner)


def test_loading_verifies(saved, tmp_path):
    directory, _ = saved
    shutil.copytree(directory, tmp_path / "copy")
    optimizer = tmp_path / "copy" / checkpoints.OPTIMIZER
    whole = optimizer.read_bytes()
    optimizer.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    learner, _ = make_learner(directory / checkpoints.MODEL)
    before = learner.policy_version
    with pytest.raises(WeightError, match=r"optimizer\.safetensors"):
        load_checkpoint(tmp_path / "copy", learner)
    assert learner.policy_version == before
