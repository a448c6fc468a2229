"""A file cut off at any byte: refused with a line that says what to do; the one before it is used if there is one."""

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from fakes import Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.checkpoints import latest, load
from pipeline.config import parse_config
from pipeline.errors import NguError, WeightError
from pipeline.ledger import Ledger
from pipeline.ledger_cli import ledger as ledger_verb
from pipeline.manifest import MANIFEST, write_manifest
from pipeline.weights import WeightPublisher, read_weights

WEIGHTS = "weights.bin"  # of the learner, as its part of a checkpoint
CONFIG = parse_config(
    {
        "max_rollouts": 320,
        "engines": {"slots": 8},
        "learner": {"batch_size": 32},
        "eval": {"every_steps": 0, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 3},
    },
    "test",
)


def cuts(size: int, num: int) -> Iterable[int]:
    """Every length near the ends, and `num` between."""
    return sorted({*range(min(20, size)), *range(0, size, max(size // num, 1)), *range(max(size - 20, 0), size)})


class WithWeights(Simulation):
    def write_part(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / WEIGHTS).write_bytes(random.Random(self.version).randbytes(5000))
        write_manifest(directory, [directory / WEIGHTS])


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    run = WithWeights(path, CONFIG)
    while run.version < 7 or run.coordinator.lineage.training is not None:
        run.turn()
    killed = path / "killed"
    shutil.copytree(path, killed)  # with its write-ahead log, which the last one to close a ledger takes into the file
    run.ledger.close()
    return killed


@pytest.fixture
def killed(ended, tmp_path) -> Path:
    """A copy of a run that was killed after two checkpoints."""
    shutil.copytree(ended, tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_cut_off_anywhere_leaves_the_one_before_it(killed):
    before, newest = sorted((killed / "checkpoints").iterdir())
    for path in (newest / "coordinator.msgpack", newest / MANIFEST, newest / WEIGHTS):
        whole = path.read_bytes()
        for length in cuts(len(whole), 60):
            path.write_bytes(whole[:length])
            assert latest(killed) == before, length
        path.write_bytes(whole)
    assert latest(killed) == newest
    (newest / "coordinator.msgpack").write_bytes((newest / "coordinator.msgpack").read_bytes()[:-1])
    with pytest.raises(NguError, match="delete the directory to resume from the one before"):
        load(newest)
    run = Simulation(killed, CONFIG, resume=latest(killed))
    run.run()
    run.ledger.close()
    assert run.coordinator.state == "finished"


@settings(max_examples=150)
@given(name=st.sampled_from(["coordinator.msgpack", MANIFEST, WEIGHTS]), place=st.floats(0, 1), bit=st.integers(0, 8))
def test_a_checkpoint_damaged_at_any_byte_leaves_the_one_before_it(ended, name, place, bit):
    """Cut off there (bit 8), or one bit of it turned."""
    before, newest = sorted((ended / "checkpoints").iterdir())
    path = newest / name
    whole = path.read_bytes()
    offset = min(int(place * len(whole)), len(whole) - 1)
    turned = bytes([whole[offset] ^ 1 << bit % 8]) + whole[offset + 1 :]
    path.write_bytes(whole[:offset] + (b"" if bit == 8 else turned))
    try:
        assert latest(ended) == before
    finally:
        path.write_bytes(whole)
    assert latest(ended) == newest


def test_a_ledger_cut_off_anywhere_is_refused_with_what_to_do(killed):
    path = killed / "ledger.sqlite"
    Ledger(path).close()  # everything in one file
    whole = path.read_bytes()
    refused = 0
    for length in cuts(len(whole), 30):
        path.write_bytes(whole[:length])
        try:
            Simulation(killed, CONFIG, resume=latest(killed)).ledger._db.close()
        except NguError as e:
            refused += 1
            assert f"{path}: damaged (" in e.message and "begin a new run at the last checkpoint" in e.message
        else:
            pytest.fail(f"{length} of {len(whole)} bytes were taken for a ledger")
        for leftover in killed.glob("ledger.sqlite-*"):
            leftover.unlink()
    assert refused > 50


def test_a_ledger_whose_log_is_cut_off_anywhere_is_refused_or_made_whole_by_the_journal(ended, tmp_path):
    size = (ended / "ledger.sqlite-wal").stat().st_size
    assert size > 1 << 16
    refused = 0
    for length in range(0, size + 1, size // 16):
        run_dir = tmp_path / str(length)
        shutil.copytree(ended, run_dir)
        with (run_dir / "ledger.sqlite-wal").open("r+b") as file:
            file.truncate(length)
        try:
            run = Simulation(run_dir, CONFIG, resume=latest(run_dir))
        except NguError as e:
            refused += 1
            assert "attempts of the checkpoint are missing" in e.message, length
            continue
        run.run()
        run.ledger.close()
        (run_dir / "config.json").write_text("{}")  # all that makes it a run for the verb
        assert run.coordinator.state == "finished" and ledger_verb(run_dir, verify=True) == 0, length
    assert 0 < refused < 16


def test_weights_cut_off_anywhere_are_refused(tmp_path):
    publisher = WeightPublisher(tmp_path / "weights")
    notice = publisher.publish({"a": torch.arange(40.0), "b": torch.ones(3, 2)}, 1, "model", [5, 6], [-0.5])
    path = Path(notice.path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightError, match="publish the version again"):
            read_weights(notice)
    path.write_bytes(whole)
    assert read_weights(notice)["a"][39] == 39
    publisher.close()
