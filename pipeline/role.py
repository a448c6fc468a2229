"""What every role process does first: die with its supervisor, leave the terminal's signals to it."""

import ctypes
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline import lifeline
from pipeline.errors import NguError

PARENT_ENV = "NGU_PARENT_PID"
# Two torch threads in each of several processes on few cores stall each other, by a factor of a hundred.
ROLE_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
# Unlike the 1 and 2 of expected errors, so that a supervisor can tell a crash (worth a restart) from a refusal.
EXIT_CRASH = 70
# Asks an engine to give its work back and end. Not SIGTERM, by which a run is ended whose coordinator may be gone, so
# that nobody would hear a farewell.
LEAVE_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_MAX_FILES = 1 << 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BYTES, _KEPT_BYTES = 32 << 20, 256 << 20  # of one block, of all
# Net new objects before the young ones are looked at, which a loop that frees as it makes never gets to: a look at a
# tenth of them holds the coordinator up for 5 ms or more. And how many such looks go by before older ones are.
_COLLECT = (200_000, 50, 50)


def bind_to_parent() -> None:
    """Be killed when the process that started this one dies, or the run's supervisor, however they die (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(PARENT_ENV)
    if parent and os.getppid() != int(parent):  # it died before the line above took effect
        os._exit(1)
    lifeline.hold()


def _raise_file_limit() -> None:
    """A thousand workers are three thousand sockets; the usual limit is a thousand, and ZeroMQ aborts beyond it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def keep_freed_memory() -> None:
    """For a process through which large messages go: memory that it has freed stays with it, up to `_KEPT_BYTES`, or
    every message would be written to pages fresh from the kernel, with a fault for each (glibc; elsewhere nothing).
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextmanager
def few_collections() -> Iterator[None]:
    """Inside, Python looks for cycles rarely, and never at what exists already: for a loop that makes many objects and
    hardly a cycle, each look is in vain.
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def run_role(main: Callable[[], int | None]) -> None:
    """Run a role's main function as this process; exits with its status, one line for an expected error."""
    bind_to_parent()
    _raise_file_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = main() or 0
    except NguError as e:
        print(f"error: {e.message}", file=sys.stderr, flush=True)
        status = e.exit_status
    except Exception:
        traceback.print_exc()
        status = EXIT_CRASH
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
