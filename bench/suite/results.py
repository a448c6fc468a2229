"""What a benchmark leaves behind: its rows, and where and with what they were measured."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from bench.files import read_results
from bench.suite.base import Row
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "transformers", "pyzmq", "msgspec", "numpy", "math-verify")


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str


class Result(msgspec.Struct, frozen=True):
    """One run of one benchmark. `load` is the load average of the last minute before it began and when it ended: above
    the number of cores, absolute figures are those of a busy machine. `changed`: the parameters that were not those the
    targets are about, its defaults.
    """

    key: str
    benchmark: str
    parameters: dict[str, Any]
    rows: list[Row]
    notes: list[str]
    seconds: float
    load: tuple[float, float]
    commit: str
    machine: Machine
    versions: dict[str, str]
    changed: dict[str, Any] = {}

    @property
    def taken(self) -> str:
        """When, as YYYY-MM-DDTHH:MM:SSZ."""
        return self.key.rpartition("@")[2]


def new_key(benchmark: str) -> str:
    return f"{benchmark}@{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def load_average() -> float:
    return os.getloadavg()[0]


def commit() -> str:
    """The commit of the checkout this runs from, with + and a digest of how files differ from it, so that runs of other
    code are not taken for the same; empty for an installed package.
    """
    try:
        name, difference = [
            subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, check=True).stdout.strip()
            for args in (["rev-parse", "--short", "HEAD"], ["diff", "HEAD"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return name.decode() + (f"+{hashlib.blake2b(difference, digest_size=3).hexdigest()}" if difference else "")


def machine() -> Machine:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return Machine(
        names[0] if names else platform.machine(),
        len(os.sched_getaffinity(0)),
        round(memory_kib / (1 << 20), 1),
        f"{platform.system()} {platform.release()}",
        platform.python_version(),
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def make_history(directory: Path) -> None:
    """Before minutes of measuring, not after. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{directory}: cannot be created: {e.strerror}; choose another --results") from None


def append(directory: Path, result: Result) -> Path:
    """Add a line to DIRECTORY/BENCHMARK.jsonl. Raises ConfigError when it cannot be written."""
    path = directory / f"{result.benchmark}.jsonl"
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}; choose another --results") from None
    return path


def read_history(directory: Path) -> dict[str, list[Result]]:
    """Every recorded run by benchmark, oldest first. Raises ConfigError for a file of something else."""
    return {path.stem: read_results(path, Result, repair=False) for path in sorted(directory.glob("*.jsonl"))}


def write_json(path: Path, results: Iterable[Result]) -> None:
    """Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(list(results))) + b"\n")
    except OSError as e:
        raise ConfigError(f"{path}: cannot be written: {e.strerror}; choose another --json") from None
