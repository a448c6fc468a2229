"""Versions are exact bytes: published whole, read whole, or refused."""

import fcntl
import itertools
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import njit
from safetensors.torch import load_file, save

from pipeline.errors import WeightError
from pipeline.streaming import _copy, stream_copy
from pipeline.weights import WeightPublisher, WeightsReader, map_weights, read_weights, weights_checksum

STATE = {
    "half": torch.arange(6, dtype=torch.float16).view(2, 3),
    "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "wide": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).t(),
    "ids": torch.tensor([3, 4], dtype=torch.int64),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def publisher(tmp_path):
    made = WeightPublisher(tmp_path / "shm")
    yield made
    made.close()


def publish(publisher, version=0, state=STATE):
    return publisher.publish(state, version, "model", [5, 6, 7], [-0.5, -0.25])


READER = WeightsReader()


def streamed(notice, multiple=1, reader=READER):
    """Tensors put together from the parts of a stream; those without bytes have none."""
    found = {}
    with reader.open(notice) as weights:
        shapes = {entry.name: entry.shape for entry in weights.entries}
        for name, row, rows in weights.parts(multiple):
            before = found.setdefault(name, [])
            assert row == sum(map(len, before)) and row % multiple == 0
            before.append(rows.clone())
    return {name: torch.cat(parts).view(shapes[name]) for name, parts in found.items()}


def test_a_file_that_another_writer_has_described_is_read(publisher):
    notice = publish(publisher)
    data = save(load_file(notice.path), metadata={"format": "pt"})
    path = Path(notice.path).with_name("described")
    path.write_bytes(data)
    checksum = xxhash.xxh3_64_hexdigest(data)
    described = msgspec.structs.replace(notice, path=str(path), checksum=checksum, num_bytes=len(data))
    for tensors in (read_weights(described), streamed(described)):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, STATE[name])
    path.unlink()


@pytest.mark.parametrize(("piece_bytes", "stream_bytes"), [(8, 1 << 20), (8, 0), (24, 0), (1 << 20, 0)])
def test_what_was_published_is_read_back(publisher, monkeypatch, piece_bytes, stream_bytes):
    monkeypatch.setattr("pipeline.weights.STREAM_BYTES", stream_bytes)
    for module in ("pipeline.weights", "pipeline.weights_layout"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", piece_bytes)
    notice = publish(publisher)
    assert notice.checksum == weights_checksum(STATE)
    with_bytes = {name for name, tensor in STATE.items() if tensor.numel()}
    for tensors in (read_weights(notice), load_file(notice.path), streamed(notice), streamed(notice, multiple=2)):
        assert with_bytes <= tensors.keys() <= STATE.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == STATE[name].dtype
            assert torch.equal(tensor, STATE[name])
    assert (notice.policy_version, notice.model_dir) == (0, "model")
    assert notice.canary_ids == b"\5\0\0\0\6\0\0\0\7\0\0\0"
    assert len(notice.canary_logprobs) == 8


def test_a_copy_past_the_caches_is_one_whatever_its_place_and_size():
    source = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    for num, begin, at in itertools.product((0, 1, 31, 32, 128, 131, 4097), (0, 1, 40), (0, 3, 32)):
        target = np.zeros(5000, dtype=np.uint8)
        stream_copy(target[at : at + num], source[begin : begin + num])
        expected = np.zeros(5000, dtype=np.uint8)
        expected[at : at + num] = source[begin : begin + num]
        assert np.array_equal(target, expected), (num, begin, at)
    if platform.machine() == "x86_64":  # else there is nothing to recognise it by
        [code] = njit("void(u1[::1], u1[::1])")(_copy).inspect_asm().values()
        assert "movnt" in code, "else it is a slow way to copy"


def test_a_file_has_the_bytes_that_the_library_of_its_format_writes(publisher):
    state = {"b": torch.arange(6.0).view(2, 3), "a\u00e9": torch.ones(()), "c": torch.tensor([1], dtype=torch.int8)}
    assert Path(publish(publisher, state=state).path).read_bytes() == save(state)
    with pytest.raises(WeightError, match="complex64"):
        publish(publisher, 1, {"z": torch.zeros(2, dtype=torch.complex64)})
    assert [path.name for path in publisher.directory.iterdir()] == ["0.safetensors"]


def test_tied_weights_are_saved_once_under_their_first_name(publisher):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert read_weights(publish(publisher, state=model.state_dict())).keys() == {"0.weight", "0.bias", "1.bias"}


def test_the_last_two_versions_stay(publisher):
    notices = [publish(publisher, v) for v in range(4)]
    names = sorted(p.name for p in publisher.directory.iterdir())
    assert names == ["2.safetensors", "3.safetensors", "spare.safetensors"]
    for notice in notices[2:]:
        read_weights(notice)
    with pytest.raises(WeightError, match=r"1\.safetensors.*newer version"):
        read_weights(notices[1])


def test_a_version_published_again_is_replaced(publisher):
    old = publish(publisher, 1)
    new = publish(publisher, 1, {"other": torch.ones(2)})
    assert read_weights(new).keys() == {"other"}
    with pytest.raises(WeightError):
        read_weights(old)
    publish(publisher, 2)
    assert len(list(publisher.directory.iterdir())) == 2


def inode(notice):
    return Path(notice.path).stat().st_ino


def test_a_file_that_nobody_reads_is_written_over(publisher):
    first = publish(publisher)
    inodes = [inode(first)]
    for version in range(1, 6):
        state = {"other": torch.full((version,), float(version))}
        notice = publish(publisher, version, state)
        assert torch.equal(read_weights(notice)["other"], state["other"])
        assert torch.equal(streamed(notice)["other"], state["other"])
        inodes.append(inode(notice))
    assert len(set(inodes[:3])) == 3 and inodes[3:] == inodes[:3]


def test_a_reader_keeps_its_bytes_whatever_is_published(publisher):
    notice = publish(publisher, 0)
    whole = Path(notice.path).read_bytes()
    tensors, mapped = read_weights(notice), map_weights(notice)
    with READER.open(notice) as weights:
        for version in (1, 2, 3):
            publish(publisher, version, {"other": torch.zeros(64)})
        weights.check()
    assert mapped[:] == whole
    assert torch.equal(tensors["half"], STATE["half"])
    tensors["half"].zero_()  # private to this process, and allowed


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(600)
"""


def hold(notice):
    child = subprocess.Popen([sys.executable, "-c", HOLD, notice.path], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    return child


def kill(child):
    child.kill()
    child.communicate()


def test_a_reader_that_died_holds_nothing(publisher):
    """Three files are about, so a version is written over the one three versions before it."""
    first = publish(publisher, 0)
    of_first, reader = inode(first), hold(first)
    notices = [publish(publisher, version) for version in (1, 2, 3)]
    assert inode(notices[-1]) != of_first
    kill(reader)
    of_third, reader = inode(notices[-1]), hold(notices[-1])
    for version in (4, 5):
        publish(publisher, version)
    kill(reader)
    assert inode(publish(publisher, 6)) == of_third


def test_a_reader_that_comes_while_its_file_is_taken_is_refused(publisher, monkeypatch):
    notice = publish(publisher, 0)
    with Path(notice.path).open() as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        with pytest.raises(WeightError, match="newer version"):
            read_weights(notice)
    real = fcntl.flock

    def overtaken(fd, operation):
        """Opened under its name, and written over before it is locked, with the same bytes as it happens."""
        if operation & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", real)
            for version in (1, 2, 3):
                publish(publisher, version)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(WeightError, match="newer version"), READER.open(notice):
        pass


def test_a_file_that_somebody_moved_is_not_written_over(publisher):
    publish(publisher, 0)
    for version in (1, 2):
        publish(publisher, version)
    (publisher.directory / "spare.safetensors").unlink()
    (publisher.directory / "spare.safetensors").write_bytes(b"of somebody else")
    (publisher.directory / "1.safetensors").unlink()
    for version in range(3, 8):
        assert torch.equal(read_weights(publish(publisher, version))["half"], STATE["half"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), is_cut=st.booleans())
def test_any_damage_is_refused(publisher, position, is_cut):
    notice = publish(publisher)
    with Path(notice.path).open("r+b") as file:
        offset = int(position * notice.num_bytes)
        if is_cut:
            file.truncate(offset)
        else:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
    with pytest.raises(WeightError, match="publish the version again"):
        read_weights(notice)
    with pytest.raises(WeightError, match="publish the version again"):
        streamed(notice)
    with pytest.raises(WeightError, match="publish the version again"), READER.open(notice) as weights:
        weights.check()


def test_a_publisher_clears_what_a_killed_one_left(tmp_path):
    leftover = tmp_path / "shm" / "9.safetensors.partial"
    leftover.parent.mkdir()
    leftover.write_bytes(b"x")
    publisher = WeightPublisher(leftover.parent)
    assert not leftover.exists()
    publish(publisher)
    publisher.close()
    assert not leftover.parent.exists()
    publisher.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightError, match="weights directory"):
        WeightPublisher(tmp_path / "file" / "shm")
    publisher = WeightPublisher(tmp_path / "gone")
    publisher.close()
    with pytest.raises(WeightError, match="cannot write"):
        publish(publisher)
