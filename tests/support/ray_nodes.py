"""`ray_cluster.py` from a test: nodes of a Ray cluster that come and go."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RAY_CLUSTER = Path(__file__).with_name("ray_cluster.py")


class Nodes:
    """One node for each number of CPUs; the first is the cluster's head."""

    def __init__(self, *cpus: int):
        self._directory = tempfile.mkdtemp(prefix="ngu")  # short enough for Ray's sockets
        self._process = subprocess.Popen(
            [sys.executable, str(RAY_CLUSTER), *map(str, cpus)],
            env=os.environ | {"RAY_TMPDIR": self._directory, "TMPDIR": self._directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._answer()
        assert said, "no cluster came up"
        self.address, *self.ids = said.split()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _do(self, order: str) -> None:
        assert self._process.stdin is not None
        print(order, file=self._process.stdin, flush=True)
        assert self._answer() == order

    def kill(self, node: int) -> None:
        """As a power cut would."""
        self._do(f"kill {node}")

    def add(self, cpus: int) -> None:
        self._do(f"add {cpus}")

    def close(self) -> None:
        self._process.communicate()
        shutil.rmtree(self._directory, ignore_errors=True)  # what dies with the nodes may still clear up
