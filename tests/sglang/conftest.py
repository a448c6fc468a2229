"""One real SGLang server for all tests here, on the CPU; without its environment they are skipped, and say so."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang_bench import MAX_POSITIONS, SLOTS, SGLangBench
from tiny_models import save_model_dir

from pipeline.config import EnginesConfig
from pipeline.engines.sglang.environment import find_python
from pipeline.engines.sglang.server import OwnedServer
from pipeline.errors import ConfigError

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def environment() -> None:
    try:
        find_python(EnginesConfig(kind="sglang"))
    except ConfigError as e:
        pytest.skip(e.message)


@pytest.fixture(scope="session")
def qwen2_server(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and model directory of a server whose completions have no end token."""
    model_dir = tmp_path_factory.mktemp("qwen2") / "model"
    save_model_dir(model_dir, "qwen2", has_eos=False, max_positions=MAX_POSITIONS)
    server = OwnedServer(EnginesConfig(kind="sglang", slots=SLOTS), str(model_dir), 0, seed=1)
    server.start()
    yield server.url, model_dir
    server.stop()


@pytest.fixture
def attach(qwen2_server: tuple[str, Path], tmp_path: Path):
    """Makes the engine at the session's server, with settings of its own."""
    made: list[SGLangBench] = []

    def make(**settings: str) -> SGLangBench:
        url, model_dir = qwen2_server
        config = EnginesConfig(kind="sglang", slots=SLOTS, urls=(url,), hang_s=100.0, **settings)  # type: ignore[arg-type]
        made.append(SGLangBench(tmp_path, model_dir, "qwen2", config))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
