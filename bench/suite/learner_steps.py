"""Optimizer steps of our learner on demand: `python -m bench.suite.learner_steps GROUPS MICRO_BATCH_TOKENS [padded]`.

GROUPS is a file of groups as the learner gets them. At a learning rate of 0 every step does the same work. `padded`
gives each rollout a row of its own with its whole prompt, as for models that cannot share prompts.
"""

import sys
from pathlib import Path

import msgspec
import torch

from bench.peers.metering import Meter
from learner.learner import Learner
from learner.model import load_model
from pipeline.learner_config import GrpoConfig, LearnerConfig
from pipeline.messages import Group

MODEL = "builtin"


def main(file: Path, micro_batch_tokens: int, is_padded: bool) -> None:
    meter = Meter()
    torch.set_num_threads(1)
    groups = msgspec.msgpack.decode(file.read_bytes(), type=list[Group])
    config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, lr=0.0, loss=GrpoConfig())
    learner = Learner(load_model(MODEL)[0], config, temperature=1.0)
    if is_padded:
        learner.model.set_attn_implementation("sdpa")
    while meter.wait():
        learner.step(groups)
        meter.answer()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["padded"])
