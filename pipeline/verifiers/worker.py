"""The parent's handle on one child process: start it, ask it, read its answer, kill it."""

import contextlib
import fcntl
import os
import subprocess
import sys
import time

import msgspec

from pipeline.messages import Verdict
from pipeline.role import PARENT_ENV
from pipeline.verifiers.child import LENGTH, READY, Setup, frame
from pipeline.verifiers.triage import Question, WholeText

_READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20  # the most that Linux gives without privileges


class Worker:
    """One child; at most one question is with it. Must be made in a thread that outlives it (Linux ends the child with
    the thread that started it)."""

    def __init__(self, setup: Setup):
        # Started by argv, not forked: the child inherits no socket, no thread pool and no other child's pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.verifiers.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, PARENT_ENV: str(os.getpid()), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._received = bytearray()
        self.ready = False
        self.attempt_id: int | None = None
        self.busy_since = time.monotonic()  # of the start, until it is ready
        with contextlib.suppress(OSError):  # refused to a user who holds many large pipes
            fcntl.fcntl(self._stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._send(frame(setup))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._stdout.fileno()

    @property
    def idle(self) -> bool:
        return self.ready and self.attempt_id is None

    def ask(self, attempt_id: int, question: Question | WholeText) -> bool:
        """Put one question to an idle child; False when it does not fit the empty pipe, so that this never blocks."""
        data = frame(question)
        if len(data) > fcntl.fcntl(self._stdin, fcntl.F_GETPIPE_SZ):
            return False
        self.attempt_id = attempt_id
        self.busy_since = time.monotonic()
        self._send(data)
        return True

    def read(self) -> Verdict | bool:
        """What arrived: the verdict, True for nothing complete yet, False when the child is gone."""
        chunk = self._stdout.read(_READ_BYTES)
        if chunk == b"":
            return False
        self._received += chunk or b""
        if len(self._received) < LENGTH.size:
            return True
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return True
        payload = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        if payload == READY:
            self.ready = True
            return True
        return msgspec.msgpack.decode(payload, type=Verdict)

    def kill(self) -> int:
        """End the child at once, whatever it is doing; returns its exit status (negative: the signal)."""
        self._process.kill()
        self._stdin.close()
        self._stdout.close()
        return self._process.wait()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; the end of its output says so to `read`
            self._stdin.write(data)
