"""What a step may cost: the peak of a pass, activations computed twice, and layers in lower precision."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_samples import random_groups, tiny_model, tiny_model_dir

from learner.checkpoint import MODEL, open_learner, save_checkpoint
from learner.learner import Learner
from learner.model import checkpoint_layers, load_model
from learner.packing import shares
from pipeline.config import parse_config
from pipeline.errors import ConfigError
from pipeline.learner_config import LearnerConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def step(model_dir, **settings):
    """Gradient, metrics and the bytes that were kept for the backward pass."""
    fields = {"model": {"path": str(model_dir)}, "learner": {"max_grad_norm": 1e9, **settings}}
    learner, _ = open_learner(parse_config(fields, "test"), None)
    gradients, kept = [], []
    learner.optimizer.step = lambda: gradients.extend(p.grad for p in learner.model.parameters())

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        report = learner.step(random_groups(tiny_model(), seed=3, drift=0.2))
    return torch.cat([g.flatten() for g in gradients]), report.metrics, sum(kept)


def test_activations_that_are_computed_twice_give_the_same_gradient_from_less_memory(model_dir):
    plain, _, kept = step(model_dir)
    again, _, kept_again = step(model_dir, gradient_checkpointing=True)
    assert torch.equal(again, plain)
    assert kept_again < 0.5 * kept


def test_a_model_whose_layers_cannot_be_told_is_refused():
    model = tiny_model()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.*qwen2"):
        checkpoint_layers(model)


def test_bfloat16_is_for_the_layers_and_weights_stay_float32(model_dir):
    exact, exact_metrics, _ = step(model_dir)
    rounded, metrics, _ = step(model_dir, dtype="bfloat16")
    assert rounded.dtype == torch.float32
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-6 < error < 0.05
    assert metrics["loss"] == pytest.approx(exact_metrics["loss"], abs=0.05)


def test_adapters_alone_are_trained_and_what_is_published_and_saved_is_the_policy(model_dir, tmp_path):
    fields = {"model": {"path": str(model_dir)}, "learner": {"lr": 1e-2, "warmup_steps": 0, "lora": {"rank": 2}}}
    config = parse_config(fields, "test")
    learner, tokenizer = open_learner(config, None)
    start = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    groups = random_groups(tiny_model(), seed=3, drift=0.2)
    for _ in range(3):
        learner.step(groups)
    trained = {name for name, p in learner.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    published = learner.state_dict()
    plain, _ = load_model(str(model_dir))
    plain.load_state_dict(published)
    moved = {name for name, tensor in published.items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name in start if name.endswith("proj.weight")}
    canary, theirs = learner.canary()[1], Learner(plain, LearnerConfig(), 1.0).canary()[1]
    torch.testing.assert_close(theirs, canary, rtol=0, atol=1e-5)

    save_checkpoint(tmp_path / "saved", learner, tokenizer)
    merged, _ = load_model(str(tmp_path / "saved" / MODEL))
    assert all(torch.equal(tensor, published[name]) for name, tensor in merged.state_dict().items())
    resumed, _ = open_learner(config, tmp_path / "saved")
    for each in (learner, resumed):
        each.step(groups)
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, learner.state_dict()[name]), name


def test_the_peak_with_a_large_vocabulary_is_the_one_of_its_chunks():
    """4,096 tokens over 32,768 words: their logits alone would be 512 MiB, several times over."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "support" / "peak_memory.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, estimate = map(int, done.stdout.split())
    assert 0.5 * estimate < peak <= 1.2 * estimate


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1), st.integers(1, 5))
def test_shares_hold_every_row_once_weigh_alike_and_part_few_prompts(rows, num_ranks):
    lengths = [length for _, length in rows]
    dealt = shares(lengths, [np.array([prompt]) for prompt, _ in rows], num_ranks)
    assert sorted(i for share in dealt for i in share) == list(range(len(rows)))
    for share in dealt:
        assert abs(sum(lengths[i] for i in share) - sum(lengths) / num_ranks) <= max(lengths)
    parts = sum(len({rows[i][0] for i in share}) for share in dealt)
    assert parts <= len({prompt for prompt, _ in rows}) + num_ranks - 1


def test_shares_of_fewer_rows_than_ranks_leave_some_without():
    assert sorted(shares([4], [np.array([7])], 3)) == [[], [], [0]]
    assert shares([], [], 2) == [[], []]
