"""The server behind an engine: a process group of our own, or one that somebody else runs at a URL."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pipeline.config import EnginesConfig
from pipeline.engines.sglang import launcher
from pipeline.engines.sglang.environment import find_python, has_gpu
from pipeline.logs import RoleLog
from pipeline.scratch import Scratch

STOP_GRACE_S = 2.0
# Enough cache on a machine without a GPU, where SGLang would take a share of the memory that others need.
MAX_CPU_CACHE_TOKENS = 1 << 16
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--sleep-on-idle"),
)
FLAGS = (
    # The learner's first weights replace random ones: nothing is read twice, and a restart needs no checkpoint.
    *("--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup"),
    *("--log-level", "warning"),
    # The overlapping one labels the first token after an update with the version of the second.
    "--disable-overlap-schedule",
    # A request that is sent just before an update would start after it from prompts cached under the weights before.
    "--disable-radix-cache",
)


class Server(Protocol):
    """What the engine needs to know of its server besides HTTP."""

    url: str
    is_owned: bool

    def start(self) -> None:
        """Begin to start it, if it is ours; it answers some time later."""
        ...

    def settle(self) -> None:
        """Told once it answers."""
        ...

    def why_dead(self, wait_s: float = 0.0) -> str:
        """How the process ended, if it does so within `wait_s`; empty while it lives, or when that cannot be known."""
        ...

    def stop(self) -> None:
        """End it, with all its children, if it is ours."""
        ...


class AttachedServer:
    is_owned = False

    def __init__(self, url: str):
        self.url = url

    def start(self) -> None: ...

    def settle(self) -> None: ...

    def why_dead(self, wait_s: float = 0.0) -> str:
        return ""

    def stop(self) -> None: ...


class OwnedServer:
    """Started by `python launcher.py`; killed with its worker, its scratch files removed with it, or by the next one.

    Among them is the shared memory that it maps: SGLang never removes it, and a killed server cannot be asked for it.
    """

    is_owned = True

    def __init__(self, config: EnginesConfig, model_dir: str, index: int, seed: int):
        self._python = find_python(config)
        self._config = config
        self._model_dir = model_dir
        self._index = index
        self._seed = seed % (1 << 31)
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Scratch | None = None
        self._segments: set[Path] = set()
        self._is_settled = False
        self._log: RoleLog | None = None
        self.url = ""

    def start(self) -> None:
        """A free port each time: the old one may linger in a closing state."""
        self.stop()
        self._scratch, self._segments, self._is_settled = Scratch("ngu-sglang-"), set(), False
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [self._python, launcher.__file__, *self._flags(port)],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        # In a run the logs of all its processes lie here; elsewhere the last lines are all that is ever read of it.
        directory = Path("logs").absolute() if Path("logs").is_dir() else self._scratch.path
        self._log = RoleLog(directory, f"engine-{self._index}-server")
        self._log.follow(self._process)

    def _flags(self, port: int) -> list[str]:
        config = self._config
        flags = ["--model-path", self._model_dir, "--host", "127.0.0.1", "--port", str(port), *FLAGS]
        # One more than the slots: the canary must not wait until a rollout ends.
        flags += ["--max-running-requests", str(config.slots + 1), "--tp-size", str(config.tp)]
        flags += ["--random-seed", str(self._seed)]
        if not has_gpu():
            tokens = min(MAX_CPU_CACHE_TOKENS, (config.slots + 1) * _max_positions(self._model_dir))
            flags += [*CPU_FLAGS, "--max-total-tokens", str(tokens)]
        return [*flags, *config.flags]

    def _environment(self) -> dict[str, str]:
        assert self._scratch is not None
        ours = {launcher.PARENT_ENV: str(os.getpid()), "TMPDIR": str(self._scratch.path), "HF_HUB_OFFLINE": "1"}
        # A server answers requests of this project only; the interpreter is another than ours.
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        if has_gpu():
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._config.gpus_of(self._index)))
        return kept | ours

    def why_dead(self, wait_s: float = 0.0) -> str:
        assert self._process is not None
        if not self._is_settled:  # it is asked again and again while it starts
            self._find_segments(self._process.pid)
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
        return f"the SGLang server {how} ({self._last_words()})"

    def _last_words(self) -> str:
        assert self._log is not None
        lines = self._log.last_lines()
        errors = [line for line in lines if "Error" in line and "freeze_gc" not in line]  # it asks too early, always
        return (errors or lines or [f"nothing in {self._log.path}"])[-1].strip()[:300]

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._find_segments(process.pid)
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert self._log is not None
            self._log.last_lines()  # its reader may still write into the scratch directory
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def settle(self) -> None:
        assert self._process is not None
        self._find_segments(self._process.pid)
        self._is_settled = True

    def _find_segments(self, process_group: int) -> None:
        assert self._scratch is not None
        if new := shared_memory_of(process_group) - self._segments:
            self._segments |= new
            self._scratch.take_over(sorted(new))


def shared_memory_of(process_group: int) -> set[Path]:
    """SGLang's files in /dev/shm that processes of the group have mapped (Linux)."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(process.name)) == process_group:
                mapped = (process / "maps").read_text().split()
                found |= {Path(word) for word in mapped if word.startswith("/dev/shm/sglang_")}
    return found


def make_server(config: EnginesConfig, model_dir: str, index: int, seed: int) -> Server:
    """Raises ConfigError when this machine has no SGLang to start."""
    return AttachedServer(config.urls[index]) if config.urls else OwnedServer(config, model_dir, index, seed)


def _max_positions(model_dir: str) -> int:
    config: Mapping[str, int] = json.loads(Path(model_dir, "config.json").read_text())
    return config.get("max_position_embeddings") or MAX_CPU_CACHE_TOKENS


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
