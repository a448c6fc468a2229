"""What Ray starts on a node for each engine: an actor that runs `ngu worker` as its child, and ends with it.

Nothing of ray is imported here: the class is made an actor where it is used.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from pipeline.lifeline import LIFELINE_ENV, tie
from pipeline.scratch import Scratch

RESTART_S = 5.0


class Ended(NamedTuple):
    """How a worker ended for good: its exit status, and the last line that it printed."""

    status: int
    last_line: str


class EngineHost:
    """One engine: its place among those of the run, where the run listens, and the text of the run's worker key."""

    def __init__(self, place: int, address: str, key: str):
        self._place, self._address, self._key = place, address, key
        self._ngu = [sys.executable, "-m", "pipeline.cli"]

    def __repr__(self) -> str:
        return f"engine {self._place}"  # Ray puts it before each line of output that it forwards

    def serve(self) -> Ended:
        """Return when the worker has left (status 0), or would end the same way at every start (2)."""
        scratch = Scratch("ngu-engine-")
        # However this process ends, the kernel kills the worker, and the SGLang server that it may have, with it.
        lifeline = tie(scratch.path / "lifeline")
        try:
            while (ended := self._serve_once(scratch.path)).status not in (0, 2):
                print(f"status {ended.status}: it is started again in {RESTART_S:g} s", file=sys.stderr, flush=True)
                time.sleep(RESTART_S)
            return ended
        finally:
            os.close(lifeline)
            scratch.close()

    def _serve_once(self, directory: Path) -> Ended:
        key_file = directory / "worker.key"
        key_file.touch(0o600)
        key_file.write_text(self._key)
        joins = ["worker", "--connect", self._address, "--key", str(key_file), "--place", str(self._place)]
        last_line = ""
        with subprocess.Popen(
            [*self._ngu, *joins],
            cwd=directory,
            env=os.environ | {LIFELINE_ENV: str(directory / "lifeline")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                last_line = line.strip() or last_line
                print(line, end="", file=sys.stderr, flush=True)
        return Ended(worker.returncode, last_line.removeprefix("ngu: error: "))
