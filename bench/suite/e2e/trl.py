"""TRL's GRPOTrainer on the built-in job, in the peers' environment (`bench.peers.grpo`)."""

import json
import shutil
from pathlib import Path

import msgspec

from bench.suite.e2e.runs import Mark, Trained, run_to_end
from bench.suite.peers import environment
from bench.suite.results import ROOT
from pipeline.sections import PositiveInt, Section


class TrlConfig(Section, frozen=True):
    """`steps` of 384 rollouts: more than ours, since eight rollouts a problem need more to get as far. `processes` of
    `threads` share a step (data parallel, gloo). `micro_batch`: rollouts a forward pass of one of them.
    `generate_batch`: rollouts a call of `generate` in all of them, in whose place `continuous_batching` puts that of
    transformers.
    """

    steps: PositiveInt = 48
    processes: PositiveInt = 2
    threads: PositiveInt = 1
    micro_batch: PositiveInt = 192
    generate_batch: PositiveInt = 384
    continuous_batching: bool = False


def train(python: Path, directory: Path, seed: int, config: TrlConfig, every_steps: int) -> Trained:
    """Run to its end in `directory`, which is emptied first. Raises NguError when the run fails."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    settings = msgspec.to_builtins(config) | {"seed": seed, "save_every": every_steps}
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.processes}"]
    argv = [str(python), *launch, "-m", "bench.peers.grpo", str(directory.absolute()), json.dumps(settings)]
    wall_s = run_to_end(argv, directory, cwd=ROOT, env=environment(config.threads))
    found = json.loads((directory / "figures.json").read_bytes())
    marks = [Mark(0, 0.0, 0, 0, 0.0), *(Mark(**mark) for mark in found["marks"])]
    models = {int(path.name): path for path in (directory / "models").iterdir()}
    train_s = marks[-1].seconds
    # Every process does both in turn, so each side of it waits for the other.
    return Trained(marks, models, wall_s - train_s, 1 - found["generate_s"] / train_s, 1 - found["learn_s"] / train_s)
