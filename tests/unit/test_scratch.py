"""Scratch directories go with their owner: at once where it can, else with the next of their kind."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.scratch import Scratch

OWNER = """
import sys, time
from pathlib import Path
from pipeline.scratch import Scratch
scratch = Scratch("ngu-test-")
(scratch.path / "file").write_text("x")
scratch.take_over([Path(sys.argv[1])])
print(scratch.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_a_killed_owner_left_is_removed_by_the_next_and_nothing_else_is(directory):
    elsewhere = directory / "segment"
    elsewhere.write_text("x")
    argv = [sys.executable, "-c", OWNER, str(elsewhere)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        mine = Scratch("ngu-test-")
        assert (left / "file").exists() and elsewhere.exists(), "its owner lives"
        (directory / "ngu-test-file").write_text("no directory")
        owner.kill()
    Scratch("ngu-other-").close()
    assert (left / "file").exists(), "of another kind"
    again = Scratch("ngu-test-")
    assert not left.exists() and not elsewhere.exists()
    assert mine.path.exists()
    mine.close()
    again.close()
    assert [p.name for p in directory.iterdir()] == ["ngu-test-file"]
