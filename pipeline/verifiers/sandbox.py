"""Running a program that nobody trusts: in Linux namespaces, with limits, for one test.

The judge stays outside: the program gets an input and its output is read, bounded; whatever it does to its own
sandbox is gone with it.
"""

import contextlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.errors import VerifierError
from pipeline.verifiers import sandbox_init

OUTPUT_BYTES = 1 << 20
TMP_BYTES = 16 << 20
END_S = 1.0
_READ_BYTES = 1 << 16
# Reads secrets, opens a socket, forks too often, would outlive its judge: each must fail for the sandbox to be trusted.
_PROBE = """
import ctypes, os, socket
leaks = [n for n in ("home", "etc", "proc", "var") if os.path.exists("/" + n)]
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError as e:
    leaks += [] if e.errno == 101 else ["network"]
try:
    for _ in range(8):
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)
    leaks.append("processes")
except OSError:
    pass
if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0:
    leaks.append("orphans")
print("contained" if not leaks else "not contained: " + ", ".join(leaks), end="", flush=True)
os._exit(0)
"""


class Limits(NamedTuple):
    """Of one program: `cpu_s` seconds of a core, `wall_s` of time, memory of each process, processes at once."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    processes: int


class Ran(NamedTuple):
    """How a program ended: `ok` (status 0), `failed` (any other), `time` or `output` (killed at that limit)."""

    end: Literal["ok", "failed", "time", "output"]
    output: bytes


def run_sandboxed(program: str, stdin: str, limits: Limits) -> Ran:
    """Run Python source with this input; raises VerifierError when there is no sandbox to run it in."""
    give_up = time.monotonic() + limits.wall_s
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", sandbox_init.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        try:
            with contextlib.suppress(BrokenPipeError):  # it died, and has said why
                process.stdin.write(_job(program, stdin, limits))
            ran = _follow(process, process.stdout.fileno(), give_up)
        finally:
            _end(process)
        if trouble := process.stderr.read(_READ_BYTES):
            raise VerifierError(f"the sandbox failed: {trouble.decode(errors='replace')}")
    return ran


def refusal() -> str | None:
    """Why programs cannot be run safely on this machine, or None: tried out, not guessed."""
    if not sys.platform.startswith("linux"):
        return "programs are run in Linux namespaces, and this is not Linux"
    try:
        ran = run_sandboxed(_PROBE, "", Limits(cpu_s=5, wall_s=20, memory_bytes=256 << 20, processes=4))
    except VerifierError as e:
        return e.message
    if ran.output == b"contained":
        return None
    return f"the sandbox leaks: {ran.output[:200].decode(errors='replace') or f'its probe ended with {ran.end}'}"


def _job(program: str, stdin: str, limits: Limits) -> bytes:
    job = {
        "program": program,
        "input": stdin,
        # The interpreter behind a virtual environment: its standard library is all that a program may import.
        "python": str(Path(sys.executable).resolve()),
        "shown": ["/usr", "/lib", "/lib64", "/bin", *([] if sys.base_prefix.startswith("/usr") else [sys.base_prefix])],
        "cpu_s": max(1, math.ceil(limits.cpu_s)),
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "tmp_bytes": TMP_BYTES,
    }
    payload = json.dumps(job).encode()
    return struct.pack("<I", len(payload)) + payload


def _end(process: subprocess.Popen[bytes]) -> None:
    """Everything in the sandbox ends with the process that made it, by its own hand or else by the kernel's."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _follow(process: subprocess.Popen[bytes], fd: int, give_up: float) -> Ran:
    """Read what it writes until it ends or has to be ended."""
    output = bytearray()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(max(0.0, 1000 * (give_up - time.monotonic()))):
        chunk = os.read(fd, _READ_BYTES)
        output += chunk
        if len(output) > OUTPUT_BYTES:
            return Ran("output", bytes(output))
        if not chunk:
            try:
                status = process.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            killed = status == 128 + signal.SIGKILL  # nobody but the kernel's CPU limit kills it before us
            return Ran("ok" if status == 0 else "time" if killed else "failed", bytes(output))
    return Ran("time", bytes(output))
