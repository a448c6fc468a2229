"""Optimizer steps of TRL's GRPOTrainer on demand: `python -m bench.peers.grpo_step GROUPS MICRO_BATCH`.

GROUPS is a file of groups as the learner gets them, MICRO_BATCH a number of rollouts. What is metered is the trainer's
own loop from the beginning of a step to its end, without sampling and scoring, which have happened already.
"""

# Installed in the peers' environment only.
# pyright: reportMissingImports=false

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer

from bench.peers.grpo import GROUP_SIZE, Settings, arguments
from bench.peers.metering import Meter
from pipeline.config import Config
from pipeline.messages import Group
from pipeline.model_path import model_for_task, resolve_model_path

STEPS = 1 << 20  # more than will be asked for


class OnDemand(TrainerCallback):
    def __init__(self, meter: Meter):
        self._meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._meter.wait():
            sys.exit()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.answer()


def sampled(groups: list[Group], pad: int) -> dict[str, torch.Tensor]:
    """The batch as the trainer's own sampling leaves it: prompts padded on the left, completions on the right."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompt_ids, prompt_mask = _padded([r.prompt_array() for r in rollouts], pad, left=True)
    completion_ids, completion_mask = _padded([r.completion_array() for r in rollouts], pad, left=False)
    rewards = np.array([group.chain_rewards for group in groups])
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, keepdims=True)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(advantages.ravel(), dtype=torch.float32),
        "num_items_in_batch": completion_mask.sum(),
    }


def _padded(rows: list[np.ndarray], pad: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.from_numpy(row.astype(np.int64)), 1
    return ids, mask


def main(file: Path, micro_batch: int) -> None:
    meter = Meter()
    torch.set_num_threads(1)
    groups = msgspec.msgpack.decode(file.read_bytes(), type=list[Group])
    num_rollouts = len(groups) * GROUP_SIZE
    config = Config()
    learner = msgspec.structs.replace(config.learner, batch_size=num_rollouts, lr=0.0)
    config = msgspec.structs.replace(config, learner=learner)
    settings = Settings(
        seed=0,
        save_every=STEPS,
        steps=STEPS,
        processes=1,
        threads=1,
        micro_batch=micro_batch,
        generate_batch=num_rollouts,
        continuous_batching=False,
    )
    path = resolve_model_path(model_for_task(config.model.path, "show_your_work"))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    with tempfile.TemporaryDirectory(prefix="ngu-bench-") as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),  # it wants one, and never calls it
            args=arguments(settings, config, Path(scratch)),
            train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(64 * len(groups))]),
            callbacks=[OnDemand(meter)],
        )
        batch = sampled(groups, tokenizer.pad_token_id)
        trainer._generate_and_score_completions = lambda prompts: dict(batch)
        trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
