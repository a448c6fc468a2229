"""Optimizer steps of our learner on demand: `python -m bench.suite.learner_steps GROUPS MICRO_BATCH_TOKENS [packed]`.

GROUPS is a file of groups as the learner gets them. At a learning rate of 0 every step does the same work.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from bench.peers.metering import Meter
from learner.learner import Learner
from learner.model import load_model
from learner.packing import TokenBatch
from pipeline.learner_config import GrpoConfig, LearnerConfig
from pipeline.messages import Group

MODEL = "builtin"


class PackedLearner(Learner):
    """The rollouts of a pass follow one another in one row without padding. Each sees only itself: the library makes
    that mask of positions that begin again at 0.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._position_ids: Tensor | None = None
        self.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"position_ids": self._position_ids}), with_kwargs=True
        )

    def _collate(self, rows: Any) -> TokenBatch:
        padded = super()._collate(rows)
        places = torch.arange(padded.input_ids.shape[1]).expand_as(padded.input_ids)
        is_input = places < torch.tensor([[row.num_inputs] for row in rows])
        self._position_ids = places[is_input][None]
        index = is_input.flatten().cumsum(0) - 1  # of each input in the one row
        return TokenBatch(padded.input_ids[is_input][None], index[padded.positions], padded.targets)


def main(file: Path, micro_batch_tokens: int, is_packed: bool) -> None:
    meter = Meter()
    torch.set_num_threads(1)
    groups = msgspec.msgpack.decode(file.read_bytes(), type=list[Group])
    config = LearnerConfig(micro_batch_tokens=micro_batch_tokens, lr=0.0, loss=GrpoConfig())
    kind = PackedLearner if is_packed else Learner
    learner = kind(load_model(MODEL)[0], config, temperature=1.0)
    while meter.wait():
        learner.step(groups)
        meter.answer()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["packed"])
