"""What Ray starts on a node for each process of a run: an actor that has it as its child, and ends with it.

Nothing of ray is imported here: the class is made an actor where it is used.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline.lifeline import LIFELINE_ENV, tie
from pipeline.role import ROLE_ENV
from pipeline.scratch import Scratch

RESTART_S = 5.0


class Ended(NamedTuple):
    """How a process ended for good: its exit status (minus the signal that killed it), and its last line of output."""

    status: int
    last_line: str


class ProcessHost:
    """One process: this interpreter with `argv`, in a new directory that holds `files` (name -> content).

    Ray puts `name` before each line of its output that it forwards.
    """

    def __init__(self, name: str, argv: Sequence[str], files: Mapping[str, str]):
        self._name, self._argv, self._files = name, argv, files

    def __repr__(self) -> str:
        return self._name

    def serve(self) -> Ended:
        """Start it again until it has left (status 0), or would end the same way at every start (2)."""
        with self._directory() as directory:
            while (ended := self._once(directory)).status not in (0, 2):
                print(f"status {ended.status}: it is started again in {RESTART_S:g} s", file=sys.stderr, flush=True)
                time.sleep(RESTART_S)
            return ended

    def serve_once(self) -> Ended:
        """For a process that others count on: they are to hear of its end, whatever that is."""
        with self._directory() as directory:
            return self._once(directory)

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        scratch = Scratch("ngu-ray-process-")
        # However this process ends, the kernel kills the child, and the SGLang server that it may have, with it.
        lifeline = tie(scratch.path / "lifeline")
        try:
            yield scratch.path
        finally:
            os.close(lifeline)
            scratch.close()

    def _once(self, directory: Path) -> Ended:
        for name, content in self._files.items():
            (directory / name).touch(0o600)
            (directory / name).write_text(content)
        last_line = ""
        with subprocess.Popen(
            [sys.executable, *self._argv],
            cwd=directory,
            env=os.environ | ROLE_ENV | {LIFELINE_ENV: str(directory / "lifeline")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_line = line.strip() or last_line
                print(line, end="", file=sys.stderr, flush=True)
        return Ended(process.returncode, last_line.removeprefix("ngu: ").removeprefix("error: "))
