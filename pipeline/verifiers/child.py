"""The child process that judges: `python -m pipeline.verifiers.child`, started and killed by the pool.

Frames (a 4-byte length, then msgpack) come on stdin and go out on the original stdout. The first frame is the `Setup`,
answered by one byte once the libraries are loaded and warm; after that every `Question` or `WholeText` is answered by
one `Verdict`.
"""

import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from pipeline.messages import Verdict
from pipeline.role import bind_to_parent
from pipeline.tasks.registry import CodeConfig
from pipeline.verifiers.registry import Scoring, make_judge
from pipeline.verifiers.triage import Question, WholeText

MEMORY_BYTES = 4 << 30
LENGTH = struct.Struct("<I")
READY = b"\x01"

# Raised on instead of obeyed: no scorer needs them, and an answer that got itself evaluated might try them.
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.",
    "socket.",
    "ctypes.dlopen",
)
_FORBIDDEN_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
)


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What this child judges with; see `make_judge`."""

    scoring: Scoring
    reward: str

    @property
    def only_answers(self) -> bool:
        """Whether nothing but answers is looked at; a user's function may open files, and programs need processes."""
        return not self.reward and not isinstance(self.scoring, CodeConfig)


def frame(message: Any) -> bytes:
    payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return LENGTH.pack(len(payload)) + payload


def main() -> None:
    bind_to_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions = sys.stdin.buffer
    sys.dont_write_bytecode = True
    with os.fdopen(os.dup(1), "wb", buffering=0) as verdicts:
        os.dup2(2, 1)  # whatever a library prints must not land between two frames
        setup = msgspec.msgpack.decode(_read_frame(questions), type=Setup)
        judge = make_judge(setup.scoring, setup.reward)
        if setup.only_answers:
            sys.addaudithook(_forbid)
        verdicts.write(frame(READY))
        decoder = msgspec.msgpack.Decoder(Question | WholeText)
        while payload := _read_frame(questions):
            verdict: Verdict = judge.judge(decoder.decode(payload))
            verdicts.write(frame(verdict))


def _read_frame(stream: BinaryIO) -> bytes:
    """The next frame's payload; empty when the parent closed the pipe."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


def _forbid(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN) or event.startswith(_FORBIDDEN_CHANGES):
        raise PermissionError(f"{event} is forbidden while an answer is judged")
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise PermissionError("writing a file is forbidden while an answer is judged")


if __name__ == "__main__":
    main()
