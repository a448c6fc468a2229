"""What the processes of a run print, as `RUN/logs/ROLE.log`: one JSON object a line, rotated by size.

`{"time": unix seconds, "role": "engine-0", "pid": 123, "level": "info" | "warning" | "error", "text": "..."}`. The
supervisor reads the pipes of its roles and writes the files, so nothing that a role or a library under it prints is
lost when a file is rotated, and a role cannot fill the disk.
"""

import contextlib
import io
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

MAX_LOG_BYTES = 16 << 20
KEPT_LOGS = 3  # rotated files: ROLE.log.1 is the newest of them
MAX_LINE_BYTES = 1 << 16  # a longer line becomes several
LAST_LINES = 64
_DRAIN_S = 1.0

Level = Literal["info", "warning", "error"]


class Line(msgspec.Struct, frozen=True):
    time: float
    role: str
    pid: int
    level: Level
    text: str


class RoleLog:
    """The log of one role over all its processes; a thread for each process reads what it prints."""

    def __init__(self, directory: Path, role: str):
        self.path = directory / f"{role}.log"
        self._role = role
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._num_lost = 0  # lines, since the last that could be written
        self._lock = threading.Lock()  # a process that was killed may leave children that still print
        self._reader: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Write what `process` prints into its stdout, a pipe, from now on until it ends."""
        self._reader = threading.Thread(target=self._copy, args=(process,), name=f"log-{self._role}", daemon=True)
        self._reader.start()

    def last_lines(self) -> list[str]:
        """What the process that ended last said last, without empty lines; all that it wrote is in the file then."""
        if self._reader is not None:
            self._reader.join(_DRAIN_S)
        with self._lock:
            return list(self._last)

    def write(self, pid: int, text: str) -> None:
        """A line that the disk has no room for is counted: an error here would end the role by its broken pipe, or the
        supervisor.
        """
        with self._lock:
            if text.strip():
                self._last.append(text)
            try:
                if self._num_lost:
                    self._append(pid, f"warning: {self._num_lost} lines were lost here, which could not be written")
                self._num_lost = 0
                self._append(pid, text)
            except OSError:
                self._num_lost += 1

    def _append(self, pid: int, text: str) -> None:
        line = msgspec.json.encode(Line(time.time(), self._role, pid, _level(text), text)) + b"\n"
        if self.path.exists() and self.path.stat().st_size + len(line) > MAX_LOG_BYTES:
            self._rotate()
        with self.path.open("ab") as file:
            file.write(line)

    def _copy(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for raw in iter(lambda: pipe.readline(MAX_LINE_BYTES), b""):
                self.write(process.pid, raw.decode(errors="replace").rstrip("\r\n"))

    def _rotate(self) -> None:
        for i in range(KEPT_LOGS, 0, -1):
            older = rotated(self.path, i)
            newer = rotated(self.path, i - 1) if i > 1 else self.path
            if newer.exists():
                newer.replace(older)


class LogStream(io.TextIOBase):
    """Stands in for the `sys.stdout` and `sys.stderr` of a process that keeps its own log."""

    def __init__(self, log: RoleLog):
        self._log = log
        self._begun = ""  # a line without its end yet

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log.write(os.getpid(), line)
        return len(text)


def rotated(path: Path, age: int) -> Path:
    return path.with_name(f"{path.name}.{age}")


class LogTail:
    """Reads a log from its oldest kept line on, and goes on across rotations."""

    def __init__(self, path: Path):
        self._names = [path, *(rotated(path, age) for age in range(1, KEPT_LOGS + 1))]  # newest first
        self._file = self._oldest()
        self._begun = b""  # a line without its end yet

    def read(self, final: bool) -> Iterator[str]:
        """The lines added since the last call, as `show` gives them; a last one without its end only when `final`."""
        while self._file is not None:
            newer = self._newer(self._file)  # before reading: a file that has a newer one is complete
            *lines, self._begun = (self._begun + self._file.read()).split(b"\n")
            yield from map(show, lines)
            if newer is None:
                break
            self._file.close()
            self._file = newer
        if final and self._begun:
            yield show(self._begun)
            self._begun = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _newer(self, file: BinaryIO) -> BinaryIO | None:
        """The file after this one; None while this one is written, or between the steps of a rotation."""
        held = os.fstat(file.fileno())
        for age, path in enumerate(self._names):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(held, path.stat()):
                    return self._names[age - 1].open("rb") if age else None
        return self._oldest()

    def _oldest(self) -> BinaryIO | None:
        for path in reversed(self._names):
            with contextlib.suppress(FileNotFoundError):
                return path.open("rb")
        return None


def show(line: bytes) -> str:
    """`22:04:05 text` of a structured line; any other is shown as it is."""
    try:
        entry = msgspec.json.decode(line, type=Line)
    except msgspec.DecodeError:
        return line.decode(errors="replace")
    return f"{time.strftime('%H:%M:%S', time.localtime(entry.time))} {entry.text}"


def _level(text: str) -> Level:
    if text.startswith("warning:"):
        return "warning"
    return "error" if text.startswith(("error:", "Traceback (most recent call last)")) else "info"
