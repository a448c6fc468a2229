"""`ngu ctl RUN engines add N` and `engines remove NAME`: engines of this machine come and go while a run trains.

The supervisor answers, since the processes are its own. The change holds while it lives: `ngu resume` begins with
`engines.count` again.
"""

import os
from pathlib import Path
from typing import Protocol

from pipeline.config import Config
from pipeline.control import SUPERVISOR, ControlSocket, Reply, Request

USAGE = "write `engines add N` or `engines remove NAME`"


class Processes(Protocol):
    """The engines of a supervisor, by name."""

    config: Config

    def engines(self) -> list[str]:
        """Those that run, or will be started again; without any that are leaving."""
        ...

    def is_alive(self, name: str) -> bool: ...

    def add_engine(self, name: str) -> None: ...

    def remove_engine(self, name: str) -> None:
        """Tell it to give its work back and end."""
        ...


class EngineControl:
    """A socket beside the coordinator's, open as long as the processes of one start of a run live."""

    def __init__(self, run_dir: Path, processes: Processes):
        self._processes = processes
        self._directory = os.open(run_dir / "ipc", os.O_RDONLY | os.O_DIRECTORY)
        # By descriptor: a Unix socket path must stay under 108 bytes, wherever the run lives.
        endpoint = f"ipc:///proc/self/fd/{self._directory}/{SUPERVISOR}"
        self._socket = ControlSocket(endpoint, run_dir / "control.jsonl")

    def serve(self) -> None:
        self._socket.serve(self._handle)

    def close(self) -> None:
        self._socket.close()
        os.close(self._directory)

    def _handle(self, request: Request) -> Reply:
        match request.setting.split():
            case ["add", number] if number.isdecimal() and int(number):
                return self._add(int(number))
            case ["remove", name]:
                return self._remove(name)
        return Reply(False, USAGE)

    def _add(self, number: int) -> Reply:
        engines = self._processes.config.engines
        most = engines.count if engines.kind == "sglang" else 10_000
        free = [name for i in range(most) if not self._processes.is_alive(name := f"engine-{i}")][:number]
        if len(free) < number:
            return Reply(False, "engines.gpus or engines.urls has no place for more SGLang engines; see `ngu worker`")
        for name in free:
            self._processes.add_engine(name)
        return Reply(True, f"starting {', '.join(free)}")

    def _remove(self, name: str) -> Reply:
        known = self._processes.engines()
        if name not in known:
            return Reply(False, f"{name!r} is no engine of this machine; there are {', '.join(known)}")
        if len(known) == 1 and not self._processes.config.daemon.listen:
            return Reply(False, f"{name} is the only engine; add another first, or `ngu ctl RUN pause`")
        self._processes.remove_engine(name)
        return Reply(True, f"{name} gives its work back and ends")
