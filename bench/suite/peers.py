"""The environment in which other people's libraries are measured: `just peers` makes it from bench/peers/lock.txt."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.suite.results import ROOT
from pipeline.errors import NguError
from pipeline.role import ROLE_ENV

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
# Its cluster is on this machine and ends with the benchmark; a token would be left in the home directory.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
HOW = "run `just peers`"
PATIENCE_S = 60  # a server or a cluster of its own takes a while to end
INTERRUPTED_S = 15


def find_python(*packages: str) -> Path | None:
    """The interpreter of the environment, if it is there and has the packages."""
    if not PYTHON.exists():
        return None
    probe = f"from importlib.util import find_spec; raise SystemExit(any(find_spec(n) is None for n in {packages!r}))"
    return PYTHON if subprocess.run([PYTHON, "-c", probe], check=False).returncode == 0 else None


def environment(num_threads: int = 1) -> dict[str, str]:
    """For a child that may import this checkout without having it installed."""
    own = {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return os.environ | ROLE_ENV | own | {"TOKENIZERS_PARALLELISM": "false", **RAY}


class Measurer:
    """A child that measures on demand: a line of JSON in, a line of JSON out (`bench.peers.serving`)."""

    def __init__(self, python: Path | str, module: str, *arguments: str, env: dict[str, str] | None = None):
        self._what = " ".join((module, *arguments))
        argv = [str(python), "-m", module, *arguments]
        # Its own error output is shown: it says why a child that ends early did so. Ctrl-C reaches the benchmark alone,
        # whose end is the end of the child's input: it then removes what it has made.
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment() | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises NguError when the child has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise NguError(f"{self._what} ended with status {self._process.wait()}; its last lines are above")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # `Popen` closes the pipes and waits; the child reads to the end of its input and leaves in order.
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(PATIENCE_S if kind is None else INTERRUPTED_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def say_missing(what: str) -> str:
    """The note for figures that are left out."""
    return f"{what}: not installed, so not measured; {HOW}"


THIS_PYTHON = sys.executable
