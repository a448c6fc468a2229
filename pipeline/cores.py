"""Which of this machine's cores each role of a run may use."""

import contextlib
import os

from pipeline.config import EnginesConfig
from pipeline.errors import ConfigError


class Cores:
    """With `engines.own_cores` a core for each of the engines that a run begins with, and the rest for all other roles,
    engines that are added later among them. Without it every role may use all cores.
    """

    def __init__(self, engines: EnginesConfig):
        """Raises ConfigError where no core would be left."""
        self._by_engine: dict[str, int] = {}
        if not engines.own_cores:
            return
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) <= engines.count:
            raise ConfigError(
                f"engines.own_cores: {engines.count} engines and the other roles take {engines.count + 1} cores, and "
                f"there are {len(cores)}; set it to false or engines.count lower"
            )
        self._rest = cores[engines.count :]
        self._by_engine = {f"engine-{i}": core for i, core in enumerate(cores[: engines.count])}

    def place(self, name: str, pid: int) -> None:
        """Keep a process that has just been started, and with it all that it will start, on the cores of its role."""
        if self._by_engine:
            own = self._by_engine.get(name)
            with contextlib.suppress(ProcessLookupError):  # it has died already, which the supervisor will see
                os.sched_setaffinity(pid, self._rest if own is None else [own])
