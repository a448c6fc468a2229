"""Several processes as one learner: the same gradient, the same figures, checkpoints that any number can go on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_samples import keep_float64
from namespaces import Machine, why_not_permitted
from ports import free_port
from rank_worker import CASES, NUM_STEPS, STEPS_CONFIG, gradient_and_metrics, make_learner, take_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.checkpoint import MODEL, load_checkpoint
from learner.learner import Learner

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def alone():
    """What one process makes of every case."""
    return {name: gradient_and_metrics(name, None) for name in CASES}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Where the groups of `rank_worker` left what they made."""
    out = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "tests" / "support" / "rank_worker.py")
    done = subprocess.run([sys.executable, script, str(out)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("job", ["copies_2", "copies_4", "shards_2"])
def test_gradient_figures_and_steps_are_those_of_one_process(job, jobs, alone):
    out = jobs / job
    assert not any(json.loads((out / "statuses.json").read_text())), (out / "rank_0.log").read_text()
    gradients = load_file(out / "gradients.safetensors")
    figures = json.loads((out / "figures.json").read_text())
    for name, (gradient, metrics) in alone.items():
        assert (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm(), name
        assert figures[name] == pytest.approx(metrics, rel=1e-6, abs=1e-9), name

    straight = make_learner(STEPS_CONFIG, None)
    take_steps(straight)
    saved = AutoModelForCausalLM.from_pretrained(out / "checkpoint" / MODEL, dtype=torch.float64).eval()
    keep_float64(saved)
    resumed = Learner(saved, STEPS_CONFIG, 1.0)
    load_checkpoint(out / "checkpoint", resumed)
    assert resumed.policy_version == straight.policy_version
    for learner in (straight, resumed):
        take_steps(learner, first=10)
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_ranks_on_other_hosts_begin_from_what_the_first_has(jobs):
    out = jobs / "nodes_4"
    assert not any(json.loads((out / "statuses.json").read_text())), [p.read_text() for p in out.glob("*.log")]
    first, *others = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(4)]
    assert first["version"] == 2 * NUM_STEPS and first["left"] == []
    assert others == [first] * 3


def test_ranks_of_two_hosts_meet_over_the_network_between_them(closing):
    if reason := why_not_permitted():
        pytest.skip(f"network namespaces: {reason}")
    machine = Machine()
    closing.append(machine)
    port, script = free_port(), str(ROOT / "tests" / "support" / "far_rank.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = [
        [sys.executable, script, "0", f"tcp://127.0.0.1:{port}"],
        machine.argv(sys.executable, script, "1", f"tcp://{machine.here}:{port}"),
    ]
    ranks = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for argv in commands]
    said = [rank.communicate()[0] for rank in ranks]
    assert said == [f"{machine.cable} 3.0\n", "eth0 3.0\n"]


def test_a_rank_that_says_nothing_fails_the_others(jobs):
    out = jobs / "silent"
    assert json.loads((out / "statuses.json").read_text())[0] == 1
    assert "Timed out" in (out / "rank_0.log").read_text()
