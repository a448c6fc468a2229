"""What ties every process of a run to its supervisor: however that ends, the kernel kills them all at the same moment.

A parent-death signal reaches children only: what a verifier or a server has started would live until the kernel had
taken down the process between, and wait for a core to be told so. So the supervisor alone holds a FIFO open for
writing; when it is gone, the kernel signals whoever holds the other end, and the signal is SIGKILL.
"""

import fcntl
import os
import signal
import sys
from pathlib import Path

LIFELINE_ENV = "NGU_LIFELINE"
_F_SETSIG = 10  # Linux; Python has no name for it


def tie(path: Path) -> int:
    """Make the FIFO at `path`; it is cut when the descriptor that this returns is closed, or this process dies."""
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)  # for writing alone it would wait for a reader


def hold() -> None:
    """Be killed when the lifeline that the environment names is cut, now if it is already (Linux)."""
    path = os.environ.get(LIFELINE_ENV)
    if not path or not sys.platform.startswith("linux"):
        return
    try:
        end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(end, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
        os.read(end, 1)  # returns only where nobody holds the other end
    except BlockingIOError:
        return
    except FileNotFoundError:  # the run has ended, and its directory of sockets is gone
        pass
    os._exit(1)
