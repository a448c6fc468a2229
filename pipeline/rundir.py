"""A run is a directory: what creates it, who holds it, and how its small files are read and replaced.

The supervisor holds a lock on `RUN/lock` for as long as it lives, so "is it running" is a question to the kernel and
not to a pid file that outlives its process.
"""

import contextlib
import fcntl
import json
import os
import secrets
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from pipeline.config import Config, dump_config, parse_config
from pipeline.errors import ConfigError, NguError
from pipeline.init_config import render_config
from pipeline.manifest import sync

END_STATES = ("finished", "failed", "stopped")
# A probe by `is_running` holds a shared lock for microseconds; a starting supervisor must not mistake it for a rival.
LOCK_PATIENCE_S = 1.0
# SQLite opens no file whose absolute path has 512 bytes or more, and gives the longest of its own a suffix.
MAX_PATH_BYTES = 511 - len("/ledger.sqlite-journal")


class RunLock:
    """The held lock of a run; the kernel drops it with the process, however that ends."""

    def __init__(self, fd: int):
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def create(run_dir: Path | None, config: Config) -> Path:
    """Make the directory of a new run and return its absolute path.

    Raises ConfigError if the directory holds a run or anything else, is in use, or cannot be written. `config.json` is
    written last and atomically: a directory without it is not a run.
    """
    path = Path(run_dir).absolute() if run_dir else _default_dir(config)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_PATH_BYTES} bytes; choose a shorter --run-dir")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_running(path):
            raise _in_use(path)
        _refuse_occupied(path)  # before the lock, which would leave its file in a directory that is not ours
        with lock(path):
            _refuse_occupied(path)  # again: another process may have filled it before the lock was ours
            path.chmod(0o700)
            write_atomic(path / "run_id", secrets.token_hex(6).encode())
            write_config(path, config)
    except OSError as e:
        raise ConfigError(f"{path}: cannot create the run directory: {e.strerror}; choose another --run-dir") from None
    return path


def write_config(run_dir: Path, config: Config) -> None:
    """`config.json` last: a directory without it is not a run. `ngu ctl` replaces it in a run of weeks."""
    write_atomic(run_dir / "config.toml", render_config(config).encode(), is_lasting=True)
    encoded = msgspec.json.format(msgspec.json.encode(dump_config(config)))
    write_atomic(run_dir / "config.json", encoded, is_lasting=True)


def find(run_dir: str | Path) -> Path:
    """The absolute path of an existing run; raises ConfigError for anything else."""
    path = Path(run_dir).absolute()
    try:
        if not (path / "config.json").is_file():
            what = "is not a run directory (it has no config.json)" if path.is_dir() else "no such directory"
            raise ConfigError(f"{run_dir}: {what}; `ngu train` prints where its run lives")
    except OSError as e:  # a name that is too long, a directory that may not be entered
        raise ConfigError(f"{run_dir}: {e.strerror}; `ngu train` prints where its run lives") from None
    return path


def lock(run_dir: Path) -> RunLock:
    """Hold the run until `release`; raises ConfigError when another process holds it."""
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return RunLock(fd)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise _in_use(run_dir) from None
            time.sleep(0.02)


def is_running(run_dir: Path) -> bool:
    """Whether a supervisor holds the run now."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def supervisor_pid(run_dir: Path) -> int | None:
    """The process that holds the run, from `daemon.pid`, or None.

    The file alone proves nothing (a dead run leaves it behind and pids are reused), so the process must have the run's
    lock file open; on a system without /proc the held lock is all the evidence there is.
    """
    if not is_running(run_dir):
        return None
    try:
        pid = int((run_dir / "daemon.pid").read_text())
    except (OSError, ValueError):
        return None
    fds = Path(f"/proc/{pid}/fd")
    if Path("/proc/self/fd").is_dir() and not any(_same_file(fd, run_dir / "lock") for fd in _listdir(fds)):
        return None
    return pid


def read_config(run_dir: Path) -> Config:
    path = run_dir / "config.json"
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path}: damaged ({e}); start a new run") from None
    return parse_config(raw, str(path))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that others replace by rename; empty while it does not exist."""
    try:
        return json.loads(path.read_bytes())  # unlike msgspec it reads NaN, which a gauge may well be
    except FileNotFoundError:
        return {}
    except ValueError as e:
        raise NguError(f"{path}: not a JSON object ({e})") from None


def read_status(run_dir: Path) -> dict[str, Any]:
    """Empty before it is written, and where a power loss has torn it, which must keep nobody from going on."""
    with contextlib.suppress(NguError):
        return read_json(run_dir / "status.json")
    return {}


def write_atomic(path: Path, data: bytes, is_lasting: bool = False) -> None:
    """Replace `path` so that a reader sees the old bytes or the new ones, never a part; if it `is_lasting`, after a
    power loss as well.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        if is_lasting:
            sync(partial)
        partial.replace(path)
        if is_lasting:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_last(path: Path, data: bytes) -> None:
    """The same for what has to be said even if there is no room for another file: then over the old one."""
    try:
        write_atomic(path, data)
    except OSError:
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()


def _default_dir(config: Config) -> Path:
    resolved = dump_config(config)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("runs").absolute() / f"{stamp}-{resolved['task']['kind']}-{resolved['sampler']['kind']}"
    path, n = base, 1
    while path.exists():
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path


def _in_use(run_dir: Path) -> ConfigError:
    return ConfigError(f"{run_dir} is in use by a running run; see `ngu status {run_dir}`")


def _refuse_occupied(path: Path) -> None:
    if (path / "config.json").exists():
        raise ConfigError(f"{path} already holds a run; use `ngu resume {path}` or another --run-dir")
    if any(entry.name != "lock" for entry in path.iterdir()):
        raise ConfigError(f"{path} is not empty; choose another --run-dir")


def _listdir(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(path.iterdir())
    return []


def _same_file(a: Path, b: Path) -> bool:
    with contextlib.suppress(OSError):
        return a.samefile(b)
    return False
