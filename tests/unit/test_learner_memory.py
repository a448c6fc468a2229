"""What a step may cost: the peak of a pass, activations computed twice, and layers in lower precision."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_samples import random_groups, tiny_model, tiny_model_dir

from learner.checkpoint import open_learner
from learner.model import checkpoint_layers
from learner.packing import shares
from pipeline.config import parse_config
from pipeline.errors import ConfigError

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


def test_the_peak_with_a_large_vocabulary_is_the_one_of_its_chunks():
    """4,096 tokens over 32,768 words: their logits alone would be 512 MiB, several times over."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "support" / "peak_memory.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, estimate = map(int, done.stdout.split())
    assert 0.5 * estimate < peak <= 1.2 * estimate


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shares_hold_every_row_once_and_weigh_alike(num_ranks):
    lengths = [5, 9, 1, 7, 7, 3, 2, 8, 30, 4, 6]
    dealt = shares(lengths, num_ranks)
    assert sorted(i for share in dealt for i in share) == list(range(len(lengths)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    tokens = [sum(lengths[i] for i in share) for share in dealt]
    assert max(tokens) - min(tokens) <= max(lengths)
