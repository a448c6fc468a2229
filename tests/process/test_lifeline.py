"""Who holds a run's lifeline ends with its supervisor, and does not wait for the process between."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.engines.sglang import launcher
from pipeline.lifeline import LIFELINE_ENV, tie

SUPERVISOR = """
import subprocess, sys
from pathlib import Path
from pipeline.lifeline import tie
tie(Path("lifeline"))
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.read()
"""
# A child that ignores its parent's death, and one of its own that holds the lifeline.
CHILD = """
import os, subprocess, sys, time
held = subprocess.Popen([sys.executable, "-c", '''HOLD
import time; print("held", flush=True); time.sleep(60)'''])
print(os.getpid(), held.pid, flush=True)
time.sleep(60)
"""
HOLDS = {
    "a role": "from pipeline import lifeline; lifeline.hold()",
    "a server of SGLang": f"import runpy; runpy.run_path({launcher.__file__!r})['hold_lifeline']()",
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS.keys())
def test_a_grandchild_ends_with_the_supervisor_while_its_parent_lives(tmp_path: Path, hold: str):
    env = os.environ | {LIFELINE_ENV: str(tmp_path / "lifeline")}
    argv = [sys.executable, "-c", SUPERVISOR, CHILD.replace("HOLD", hold)]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        lines = sorted(top.stdout.readline() for _ in range(2))
        child, held = map(int, lines[0].split())
        try:
            assert lines[1] == "held\n" and is_running(held)
            top.kill()
            while is_running(held):
                time.sleep(0.01)
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_that_comes_too_late_ends_at_once(tmp_path: Path):
    late = [sys.executable, "-c", f"{HOLDS['a role']}; print('lives')"]
    env = os.environ | {LIFELINE_ENV: str(tmp_path / "lifeline")}
    end = tie(tmp_path / "lifeline")
    assert subprocess.run(late, env=env, capture_output=True, check=False).stdout == b"lives\n"
    os.close(end)
    done = subprocess.run(late, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    (tmp_path / "lifeline").unlink()
    assert subprocess.run(late, env=env, capture_output=True, check=False).returncode == 1


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
