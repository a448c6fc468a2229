"""Groups of learner ranks, for tests: `python rank_worker.py OUT`.

`copies` and `shards` take every step of `CASES`, then a few real ones, and save what the first rank has; `nodes` stands
for two hosts of two ranks, of which one has no file; in `silent` the last rank keeps the other waiting.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from learner_samples import random_groups, tiny_model, tiny_model_dir, tiny_tokenizer
from ports import free_port
from safetensors.torch import save_file

from learner import copies
from learner.adapters import add_adapters
from learner.checkpoint import open_learner, save_checkpoint
from learner.learner import Learner
from learner.model import shard_policy
from learner.ranks import Ranks, join_ranks, leave_ranks
from learner.sharding import gathered
from learner.shared_prompts import shares_prompts
from pipeline.config import parse_config
from pipeline.learner_config import (
    CispoConfig,
    CorrectionsConfig,
    CriticConfig,
    EntropyConfig,
    GspoConfig,
    IcePopMask,
    LearnerConfig,
    LoraConfig,
    M2poConfig,
    PpoConfig,
)
from pipeline.role import bind_to_parent

JOBS = {"copies_2": ("copies", 2), "copies_4": ("copies", 4), "shards_2": ("shards", 2)}
JOBS |= {"nodes_4": ("nodes", 4), "silent": ("silent", 2)}
MASKS = CorrectionsConfig(masks=(IcePopMask(low=0.9, high=1.1),))
BASE = {"lr": 1e-2, "warmup_steps": 0}
# (number of groups, config): one group of four rollouts leaves some of four ranks with a single row or none.
CASES: dict[str, tuple[int, LearnerConfig]] = {
    "rows_alone": (4, LearnerConfig(**BASE, micro_batch_tokens=1, entropy=EntropyConfig(coef=0.1))),
    "one_pass": (4, LearnerConfig(**BASE, micro_batch_tokens=10_000, loss=CispoConfig(aggregation="prompt"))),
    "fewer_rows_than_ranks": (1, LearnerConfig(**BASE, loss=PpoConfig(aggregation="sequence"))),
    "masks": (4, LearnerConfig(**BASE, micro_batch_tokens=17, corrections=MASKS)),
    "whole_rollouts": (3, LearnerConfig(**BASE, micro_batch_tokens=30, loss=GspoConfig())),
    "bound_of_the_batch": (4, LearnerConfig(**BASE, micro_batch_tokens=30, loss=M2poConfig(max_moment=1e-3))),
    "clipped": (4, LearnerConfig(**BASE, micro_batch_tokens=20, max_grad_norm=1e-3)),
    "critic": (4, LearnerConfig(**BASE, micro_batch_tokens=30, loss=PpoConfig(critic=CriticConfig(warmup_steps=0)))),
    "adapters": (4, LearnerConfig(**BASE, micro_batch_tokens=30, lora=LoraConfig(rank=2))),
    "nothing": (0, LearnerConfig(**BASE)),
}
NUM_STEPS = 3
STEPS_CONFIG = LearnerConfig(**BASE, micro_batch_tokens=24, weight_decay=0.01)


def groups_for(num_groups: int, seed: int = 5):
    return random_groups(tiny_model(), seed, num_groups=num_groups, drift=0.3)


def make_learner(config: LearnerConfig, ranks: Ranks | None) -> Learner:
    model = tiny_model()
    if config.lora.rank:
        add_adapters(model, config.lora)
    if ranks is not None and ranks.shards:
        shard_policy(model, ranks)
    learner = Learner(model, config, 1.0, ranks=ranks)
    assert shares_prompts(model), "however many ranks, prompts are read once"
    return learner


def gradient_and_metrics(name: str, ranks: Ranks | None) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped gradient of one case, flat, and the figures of its step; every rank must call it."""
    num_groups, config = CASES[name]
    learner = make_learner(config, ranks)
    seen = []

    def record():
        parameters = learner.model.parameters()
        seen.append(torch.cat([gathered(p.grad).flatten() for p in parameters if p.grad is not None]))

    learner.optimizer.step = record
    metrics = learner.step(groups_for(num_groups)).metrics
    metrics.pop("step_s")
    return (seen[0] if seen else torch.zeros(0)), metrics


def take_steps(learner: Learner, first: int = 0) -> None:
    for seed in range(first, first + NUM_STEPS):
        learner.step(groups_for(3, seed))


def run(ranks: Ranks, out: Path) -> None:
    gradients, figures = {}, {}
    for name in CASES:
        gradients[name], figures[name] = gradient_and_metrics(name, ranks)
    learner = make_learner(STEPS_CONFIG, ranks)
    take_steps(learner)
    save_checkpoint(out / "checkpoint", learner, tiny_tokenizer())
    if ranks.is_first:
        save_file(gradients, out / "gradients.safetensors")
        (out / "figures.json").write_text(json.dumps(figures))


def open_twice(ranks: Ranks, out: Path) -> None:
    """From a model, and after some steps from a checkpoint, of which two of four ranks know no path."""
    copies.PIECE_BYTES = 1000
    tempfile.tempdir = str(out)
    path, checkpoint = str(out.parent / "model"), out / "checkpoint"
    if ranks.rank >= ranks.per_node:
        path, checkpoint = "no model", Path("no checkpoint")
    config = parse_config({"model": {"path": path}, "learner": {"kl": {"coef": 0.1}, "lr": 1e-2}}, "test")
    learner, tokenizer = open_learner(config, None, ranks)
    take_steps(learner)
    save_checkpoint(checkpoint, learner, tokenizer)
    ranks.total(0.0)
    again, _ = open_learner(config, checkpoint, ranks)
    take_steps(again, first=10)
    ranks.total(0.0)
    flat = torch.cat([p.detach().flatten() for p in again.model.parameters()])
    left = [directory.name for directory in out.glob("ngu-learner-*")]
    found = {"version": again.policy_version, "weights": flat.tolist(), "left": left}
    (out / f"rank_{ranks.rank}.json").write_text(json.dumps(found))


def work(job: str, rank: int, size: int, out: Path, port: int) -> None:
    bind_to_parent()
    with (out / f"rank_{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        where, per_node = (f"tcp://127.0.0.1:{port}", 2) if job == "nodes" else (str(out / "meet"), 0)
        ranks = join_ranks(rank, size, where, 1.0 if job == "silent" else 60.0, per_node)
        if job == "nodes":
            open_twice(ranks, out)
        elif job == "silent":
            if rank == 1:
                time.sleep(600.0)
            ranks.total(1.0)
        else:
            run(Ranks(rank, size, ranks.device, shards=job == "shards"), out)
        leave_ranks(ranks)


def main() -> None:
    """All jobs one after the other, each in processes forked from this one, so that torch is imported once."""
    context = multiprocessing.get_context("fork")
    tiny_model_dir(Path(sys.argv[1]) / "model")
    for name, (job, size) in JOBS.items():
        (out := Path(sys.argv[1]) / name).mkdir()
        port = free_port()
        processes = [context.Process(target=work, args=(job, rank, size, out, port)) for rank in range(size)]
        for process in processes:
            process.start()
        # The first rank ends by itself in every job, and the others of a silent one do not.
        processes[0].join()
        for process in processes[1:]:
            process.kill() if job == "silent" else process.join()
            process.join()
        (out / "statuses.json").write_text(json.dumps([process.exitcode for process in processes]))


if __name__ == "__main__":
    main()
