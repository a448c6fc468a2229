"""`ngu doctor`: what this machine can run, in words."""

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.config import EnginesConfig
from pipeline.engines.sglang.environment import find_python, has_gpu
from pipeline.errors import ConfigError

GIB = 1 << 30
VERSION_OF_SGLANG = "from importlib.metadata import version; print(version('sglang'))"


class Finding(NamedTuple):
    """`fail` means that `ngu train` will not run here; `warn` that it will, but something is worth knowing."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    words: str


def doctor() -> int:
    """Check this machine: Python, torch, cores, memory, sockets, GPU, SGLang."""
    worst_is_fail = False
    for check in CHECKS:
        for level, subject, words in check():
            print(f"{level:>4}  {subject:<12} {words}")
            worst_is_fail |= level == "fail"
    print("this machine cannot run `ngu train`: see the lines marked fail" if worst_is_fail else "ready: ngu train")
    return int(worst_is_fail)


def check_python() -> Iterator[Finding]:
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        yield Finding("warn", "python", f"{words}; only Linux is tested")
    else:
        yield Finding("ok", "python", words)


def check_packages() -> Iterator[Finding]:
    try:
        build = version("torch")
    except PackageNotFoundError:
        yield Finding("fail", "torch", "not installed; run `just setup`")
    else:
        yield Finding("ok", "torch", f"{build} ({'CPU only' if build.endswith('+cpu') else 'may use a GPU'})")
    missing = [n for n in ("transformers", "zmq", "safetensors", "math_verify", "xxhash") if find_spec(n) is None]
    if missing:
        yield Finding("fail", "packages", f"not installed: {', '.join(missing)}; run `just setup`")


def check_cores() -> Iterator[Finding]:
    cores = _usable_cores()
    if cores < 2:
        yield Finding("warn", "cores", f"{cores:g}; engine and learner take turns, so steps overlap with nothing")
    else:
        yield Finding("ok", "cores", f"{cores:g} usable")


def check_memory() -> Iterator[Finding]:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if free < 2 * GIB:
        yield Finding(
            "warn", "memory", f"only {free / GIB:.1f} GiB available, and the engine and the learner load torch"
        )
    else:
        yield Finding("ok", "memory", f"{free / GIB:.1f} GiB available")


def check_shared_memory() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if not (shm.is_dir() and os.access(shm, os.W_OK)):
        yield Finding("warn", "/dev/shm", "not writable; weights go through the run directory, which is slower")
        return
    free = shutil.disk_usage(shm).free
    words = f"{free / GIB:.2f} GiB free; three versions of the weights must fit"
    yield Finding("ok" if free > 64 << 20 else "warn", "/dev/shm", words)


def check_run_directory() -> Iterator[Finding]:
    """Unix sockets and file locks, both of which some network file systems refuse."""
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".ngu-doctor-") as scratch:
            with (Path(scratch) / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket(socket.AF_UNIX) as unix, contextlib.chdir(scratch):
                unix.bind("socket")  # relative, as the roles bind theirs, for the path limit of 107 bytes
    except OSError as e:
        yield Finding("fail", "directory", f"{Path.cwd()} cannot hold a run ({e.strerror}); use a local disk")
        return
    yield Finding(
        "ok", "directory", f"locks and sockets work; {shutil.disk_usage('.').free / GIB:.0f} GiB free on disk"
    )


def check_ports() -> Iterator[Finding]:
    try:
        with socket.socket() as tcp:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen(1)
            with socket.create_connection(tcp.getsockname(), timeout=2):
                pass
    except OSError as e:
        yield Finding("warn", "ports", f"no TCP on 127.0.0.1 ({e}); the run itself needs none, TensorBoard does")
        return
    yield Finding("ok", "ports", "TCP on 127.0.0.1 works")


def check_gpu() -> Iterator[Finding]:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        yield Finding("ok", "gpu", "none; training runs on the CPU")
        return
    if find_spec("torch") is None:
        yield Finding("warn", "gpu", "present, but torch is not installed")
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("warn", "gpu", f"present, but this torch ({torch.__version__}) cannot use it")
        return
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        yield Finding("ok", "gpu", f"{device.name}, {device.total_memory / GIB:.0f} GiB")


def check_sglang() -> Iterator[Finding]:
    try:
        python = find_python(EnginesConfig(kind="sglang"))
    except ConfigError:
        yield Finding("ok", "sglang", "not installed; for engines.kind=sglang run `just sglang` (1.6 GB)")
        return
    done = subprocess.run([python, "-c", VERSION_OF_SGLANG], capture_output=True, text=True, check=False)
    if done.returncode:
        yield Finding("warn", "sglang", f"{python} has none; run `just sglang` to install it again")
    elif has_gpu():
        yield Finding("ok", "sglang", f"{done.stdout.strip()} in {python}")
    else:
        yield Finding("ok", "sglang", f"{done.stdout.strip()} in {python}, on the CPU")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_cores,
    check_memory,
    check_shared_memory,
    check_run_directory,
    check_ports,
    check_gpu,
    check_sglang,
)


def _usable_cores() -> float:
    """Cores this process may use: its affinity, less a container's CPU quota."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.exists():
        quota, _, period = quota_file.read_text().partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores
