"""Logs of roles: structured, bounded, and read in one piece across rotations."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec
import pytest

from pipeline import logs
from pipeline.logs import KEPT_LOGS, Line, LogStream, LogTail, RoleLog


def texts(lines) -> list[str]:
    return [line.split(" ", 1)[1] for line in lines]


@pytest.fixture
def small(monkeypatch) -> int:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 400)
    return 400


def test_what_a_process_prints_anywhere_is_a_line_with_time_role_and_level(tmp_path):
    code = r"""
import os, sys
print("ready")
sys.stdout.flush()
os.write(2, b"warning: by the C library\n\xff torn")
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        log = RoleLog(tmp_path, "engine-0")
        log.follow(process)
        process.wait()
        assert log.last_lines() == ["ready", "warning: by the C library", "\ufffd torn"]
    lines = [msgspec.json.decode(line, type=Line) for line in log.path.read_bytes().splitlines()]
    assert [(e.role, e.pid, e.level, e.text) for e in lines] == [
        ("engine-0", process.pid, "info", "ready"),
        ("engine-0", process.pid, "warning", "warning: by the C library"),
        ("engine-0", process.pid, "info", "\ufffd torn"),
    ]
    assert lines[0].time <= lines[-1].time


def test_a_log_is_bounded_and_reads_as_one(tmp_path, small):
    log = RoleLog(tmp_path, "learner")
    for i in range(100):
        log.write(1, f"line {i}")
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["learner.log", *(f"learner.log.{i}" for i in range(1, KEPT_LOGS + 1))]
    assert all(f.stat().st_size <= small for f in files)
    tail = LogTail(log.path)
    read = texts(tail.read(final=True))
    assert read == [f"line {i}" for i in range(100 - len(read), 100)] and len(read) > 3 * KEPT_LOGS
    tail.close()


def test_what_a_process_prints_into_its_own_log_is_whole_lines_and_bounded(tmp_path, small, monkeypatch):
    stream = LogStream(RoleLog(tmp_path, "daemon"))
    for i in range(40):
        print("line", i, file=stream, flush=True)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        traceback.print_exc(file=stream)
    newest = [msgspec.json.decode(line, type=Line) for line in (tmp_path / "daemon.log").read_bytes().splitlines()]
    assert newest[-1].text == "RuntimeError: boom" and newest[-1].pid == os.getpid()
    tail = LogTail(tmp_path / "daemon.log")
    assert "line 39" in texts(tail.read(final=True))
    tail.close()
    assert all(f.stat().st_size <= small for f in tmp_path.iterdir())


def test_a_full_disk_costs_lines_and_nobody_who_prints_them(tmp_path):
    log = RoleLog(tmp_path / "logs", "learner")
    log.write(1, "one")
    log.write(1, "two")
    assert log.last_lines() == ["one", "two"], "the supervisor's reason for a death"
    (tmp_path / "logs").mkdir()
    log.write(1, "three")
    tail = LogTail(log.path)
    assert texts(tail.read(final=True)) == ["warning: 2 lines were lost here, which could not be written", "three"]
    tail.close()


@pytest.mark.parametrize("every", [1, 3, 7])
def test_following_misses_nothing_and_repeats_nothing_across_rotations(tmp_path, small, every):
    log, seen = RoleLog(tmp_path, "learner"), []
    log.write(1, "line 0")
    tail = LogTail(log.path)
    for i in range(1, 60):
        if i % every == 0:
            seen += texts(tail.read(final=False))
        log.write(1, f"line {i}")
    seen += texts(tail.read(final=True))
    tail.close()
    assert seen == [f"line {i}" for i in range(60)]


def test_a_reader_left_behind_goes_on_with_the_oldest_that_is_kept(tmp_path, small):
    log = RoleLog(tmp_path, "learner")
    log.write(1, "line 0")
    tail = LogTail(log.path)
    assert texts(tail.read(final=False)) == ["line 0"]
    for i in range(1, 200):
        log.write(1, f"line {i}")
    seen = [int(text.removeprefix("line ")) for text in texts(tail.read(final=True))]
    tail.close()
    (gap,) = [i for i in range(1, len(seen)) if seen[i] != seen[i - 1] + 1]
    assert seen[0] == 1 and seen[-1] == 199, "the file at hand to its end, then what is kept"
    assert len(seen) - gap > 3 * KEPT_LOGS


def test_a_line_that_is_torn_or_not_ours_is_shown_as_it_is(tmp_path: Path):
    (tmp_path / "daemon.log").write_bytes(b'plain\n{"time": 1.0, "ro')
    tail = LogTail(tmp_path / "daemon.log")
    assert list(tail.read(final=False)) == ["plain"]
    assert list(tail.read(final=True)) == ['{"time": 1.0, "ro']
    tail.close()
