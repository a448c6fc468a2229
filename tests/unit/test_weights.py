"""Versions are exact bytes: published whole, read whole, or refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import WeightError
from pipeline.weights import WeightPublisher, read_weights

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


def test_what_was_published_is_read_back(publisher):
    notice = publish(publisher)
    tensors = read_weights(notice)
    assert tensors.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert (notice.policy_version, notice.model_dir) == (0, "model")
    assert notice.canary_ids == b"\5\0\0\0\6\0\0\0\7\0\0\0"
    assert len(notice.canary_logprobs) == 8


def test_tied_weights_are_saved_once_under_their_first_name(publisher):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert read_weights(publish(publisher, state=model.state_dict())).keys() == {"0.weight", "0.bias", "1.bias"}


def test_the_last_two_versions_stay(publisher):
    notices = [publish(publisher, v) for v in range(4)]
    assert sorted(p.name for p in publisher.directory.iterdir()) == ["2.safetensors", "3.safetensors"]
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


def test_a_mapped_version_outlives_its_file(publisher):
    tensors = read_weights(publish(publisher, 0))
    for version in (1, 2, 3):
        publish(publisher, version)
    assert torch.equal(tensors["half"], STATE["half"])
    tensors["half"].zero_()  # private to this process, and allowed


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
