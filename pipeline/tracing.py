"""What each process of a run does when, as one trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

A process writes Chrome trace events to a part of its own, and `merge` makes one file of the parts. All times are of
CLOCK_MONOTONIC, which counts from the boot of the machine and so is the same in every process on it. Without `start`
nothing is recorded, and a span costs a function call.

Perfetto draws complete events ("X") of one thread only if they nest, so what may overlap gets a track of its own.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import getpid
from pathlib import Path
from typing import Any

import msgspec

PARTS, MERGED = "trace", "trace.json"
MAX_BYTES = 64 << 20  # a process: several hours of the learner, half an hour of an engine's steps
FLUSH_NS = 1_000_000_000
COUNTER_NS = 10_000_000  # between two values of a counter: finer than this nobody can see
MIN_SPAN_NS = 10_000  # shorter ones are the parts of an idle turn, and would fill the trace

_NOTHING: AbstractContextManager[None] = nullcontext()
_encode = msgspec.json.Encoder().encode


class Tracer:
    """One process's part; used from one thread."""

    def __init__(self, run_dir: Path, name: str, max_bytes: int = MAX_BYTES):
        directory = run_dir / PARTS
        directory.mkdir(exist_ok=True)
        self.pid = getpid()
        self._file = (directory / f"{name}-{self.pid}.jsonl").open("ab")
        self._bytes_left = max_bytes
        self._flushed_ns = 0
        self._tracks: set[int] = set()
        self._counted_ns: dict[str, int] = {}
        self._metadata("process_name", self.pid, name)

    def complete(self, name: str, start_ns: int, end_ns: int, args: dict[str, Any], track: tuple[int, str]) -> None:
        """Something that lasted; `track` is (id, name) of the line it is drawn in."""
        if track[0] not in self._tracks:
            self._tracks.add(track[0])
            self._metadata("thread_name", track[0], track[1])
        duration = (end_ns - start_ns) / 1000
        self._write({"name": name, "ph": "X", "tid": track[0], "ts": start_ns / 1000, "dur": duration, "args": args})

    def counter(self, name: str, values: Mapping[str, float]) -> None:
        now = time.monotonic_ns()
        if now >= self._counted_ns.get(name, 0) + COUNTER_NS:
            self._counted_ns[name] = now
            self._write({"name": name, "ph": "C", "tid": self.pid, "ts": now / 1000, "args": values})

    def _metadata(self, kind: str, track: int, name: str) -> None:
        self._write({"name": kind, "ph": "M", "tid": track, "ts": 0, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        if self._bytes_left <= 0:
            return
        line = _encode(event | {"pid": self.pid}) + b"\n"
        self._bytes_left -= len(line)
        if self._bytes_left <= 0:
            now = time.monotonic_ns() / 1000
            full = {"name": "the trace of this process is full", "ph": "i", "s": "p", "tid": self.pid, "ts": now}
            line = _encode(full | {"pid": self.pid}) + b"\n"
        self._file.write(line)
        now_ns = time.monotonic_ns()
        if now_ns >= self._flushed_ns + FLUSH_NS or self._bytes_left <= 0:  # a killed process loses a second at most
            self._flushed_ns = now_ns
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Span:
    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]):
        self._tracer, self._name, self._args = tracer, name, args

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = time.monotonic_ns()
        if end_ns >= self._start_ns + MIN_SPAN_NS:
            self._tracer.complete(self._name, self._start_ns, end_ns, self._args, (self._tracer.pid, "main"))


_tracer: Tracer | None = None


def start(run_dir: Path, name: str) -> None:
    """Record this process from now on."""
    global _tracer
    _tracer = Tracer(run_dir, name)


def stop() -> None:
    """Record nothing more; what was recorded is in the file."""
    global _tracer
    if _tracer is not None:
        _tracer.close()
    _tracer = None


def is_on() -> bool:
    return _tracer is not None


def span(name: str, **args: Any) -> AbstractContextManager[None]:
    """The time spent in a `with` block of the process's main thread; blocks may nest."""
    return _NOTHING if _tracer is None else _Span(_tracer, name, args)


def since(name: str, start_s: float, track: tuple[int, str], **args: Any) -> None:
    """Something that began at `start_s` of `time.monotonic` and ends now, on a track (id, name) of its own."""
    if _tracer is not None:
        _tracer.complete(name, round(start_s * 1e9), time.monotonic_ns(), args, track)


def counter(name: str, values: Mapping[str, float]) -> None:
    """Values that hold until the next ones, each drawn as a line."""
    if _tracer is not None:
        _tracer.counter(name, values)


def merge(run_dir: Path) -> Path | None:
    """Write `trace.json` from the parts of all processes, restarted ones too; None when the run has no trace."""
    parts = sorted((run_dir / PARTS).glob("*.jsonl"))
    if not parts:
        return None
    path, partial = run_dir / MERGED, run_dir / f".{MERGED}.partial"
    with partial.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for i, line in enumerate(line for part in parts for line in _whole_lines(part)):
            out.write((b",\n" if i else b"\n") + line)
        out.write(b"\n]}\n")
    partial.replace(path)
    return path


def _whole_lines(part: Path) -> Iterator[bytes]:
    with part.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # else the process is writing it, or was killed in the middle of it
                yield line[:-1]
