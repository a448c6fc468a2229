"""The meter of the learner benchmark's sides, which are processes of their own, so that each has its own peak memory.

A side takes one optimizer step for each line of its input and answers with a line of JSON. Only the standard library is
imported here, as the sides run in different environments.
"""

import json
import os
import re
import sys
import time
from pathlib import Path


class Meter:
    """Processor seconds of a step, and the bytes by which the process grew at its worst moment over what it held before
    its first step: gradients, activations and the optimizer's state, but neither program nor model (Linux).
    """

    def __init__(self) -> None:
        # Libraries print what they like; what is asked for goes where they cannot write.
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._at_first: int | None = None
        self._started = 0.0

    def wait(self) -> bool:
        """Until a step is asked for, which begins now; False when no more will be."""
        if not sys.stdin.readline():
            return False
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far
        if self._at_first is None:
            self._at_first = _status_bytes("VmRSS")
        self._started = time.process_time()
        return True

    def answer(self) -> None:
        """The step has ended."""
        assert self._at_first is not None
        found = {"cpu_s": time.process_time() - self._started, "bytes": _status_bytes("VmHWM") - self._at_first}
        print(json.dumps(found), file=self._answers, flush=True)


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
