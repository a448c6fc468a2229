"""What the contract of the `Engine` seam runs over: every kind of engine on a tiny model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import publish, save_model_dir, tiny_model

from pipeline.config import EnginesConfig
from pipeline.engines.base import Engine
from pipeline.engines.registry import make_engine
from pipeline.messages import WeightsNotice
from pipeline.weights import WeightPublisher

SLOTS = 4
REAL = [
    ("embedded", "qwen2"),
    ("embedded", "qwen3"),
    ("embedded", "llama"),
    ("transformers", "gpt2"),
    ("transformers", "mistral"),
]
ALL = [*REAL, ("fake", "qwen2")]


class Bench:
    """An engine with the publisher that feeds it."""

    def __init__(self, directory: Path, engine_kind: str, model_kind: str):
        self.model_dir = save_model_dir(directory / "model", model_kind)
        self.model = tiny_model(model_kind, seed=0)
        self.publisher = WeightPublisher(directory / "weights")
        self.engine: Engine = make_engine(
            EnginesConfig(kind=engine_kind, slots=SLOTS), str(self.model_dir), 7, "auto", "engine-9"
        )
        self.report = self.engine.load_weights(self.notice(0))

    def notice(self, version: int) -> WeightsNotice:
        return publish(self.publisher, self.model, version, self.model_dir)

    def drain(self) -> list[Any]:
        """Step until nothing is in flight; what ended."""
        ended = []
        while self.engine.num_in_flight:
            ended += self.engine.step()
            assert self.engine.stats()["slots_used"] <= SLOTS
        return ended


def bench_fixture(kinds: Sequence[tuple[str, str]]) -> Any:
    """A fixture that opens a `Bench` for each (engine, model) of `kinds` and closes its engine."""

    @pytest.fixture(params=kinds, ids="-".join)
    def bench(request: pytest.FixtureRequest, tmp_path: Path):
        made = Bench(tmp_path, *request.param)
        yield made
        made.engine.close()

    return bench
