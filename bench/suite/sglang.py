"""A real SGLang server as a side of the benchmarks, where there is one: in a run's place, with a run's environment."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from bench.suite.base import Say
from pipeline.config import EnginesConfig
from pipeline.engines.sglang.engine import SGLangEngine
from pipeline.engines.sglang.push import PushKind
from pipeline.engines.sglang.server import AttachedServer, OwnedServer
from pipeline.errors import ConfigError, NguError
from pipeline.role import ROLE_ENV
from pipeline.tokenization import PromptCodec

PATIENCE_S = 300.0  # a server's first answer on a busy machine
METRICS = "--enable-metrics"
COUNTER = "sglang:realtime_tokens_total"


class SGLangServer:
    """One server, started with `flags` besides those of a run, and engines attached to it."""

    def __init__(self, model_dir: Path, slots: int, flags: tuple[str, ...]):
        os.environ |= ROLE_ENV  # the server inherits it, as it does from the engine's process in a run
        self._config = EnginesConfig(kind="sglang", slots=slots, flags=flags)
        self._server = OwnedServer(self._config, str(model_dir), 0, seed=0)
        self._server.start()

    @contextmanager
    def engine(self, codec: PromptCodec, push: PushKind) -> Iterator[SGLangEngine]:
        config = EnginesConfig(
            kind="sglang", slots=self._config.slots, urls=(self._server.url,), push=push, hang_s=PATIENCE_S
        )
        engine = SGLangEngine(config, codec, AttachedServer(self._server.url), "bench")
        try:
            yield engine
        finally:
            engine.close()

    def count(self, *modes: str) -> int:
        """Tokens computed since the server's start by the count of its scheduler, which the flag `METRICS` switches on:
        "prefill_compute" are those that it has read, "decode" those that it has sampled after the first of a request.

        Raises NguError when it does not say.
        """
        with urlopen(f"{self._server.url}/metrics", timeout=PATIENCE_S) as answer:
            found = read_counts(answer.read().decode())
        return sum(found.get(mode, 0) for mode in modes)

    def close(self) -> None:
        self._server.stop()


def read_counts(metrics: str) -> dict[str, int]:
    """Tokens by mode, as an answer of `/metrics` has them. Raises NguError when they are not there."""
    found = re.findall(rf'^{COUNTER}{{.*mode="(\w+)".*}} (\S+)$', metrics, re.MULTILINE)
    if not found:
        raise NguError(f"this SGLang has no counter {COUNTER}; install the version that `just sglang` does")
    return {mode: round(float(count)) for mode, count in found}


def start_sglang(model_dir: Path, slots: int, say: Say, *flags: str) -> SGLangServer | None:
    """None, and a note, on a machine without SGLang."""
    try:
        return SGLangServer(model_dir, slots, flags)
    except ConfigError:
        say("SGLang: not installed, so not measured; run `just sglang`")
        return None


def family_cpu_s() -> float:
    """Processor seconds of this process and of those that it started and that still run, theirs included (Linux)."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(stat.parent.name)
        # User and system time, its own and that of children it has waited for.
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family, size = {os.getpid()}, 0
    while size != len(family):
        size = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    others = sum(ticks[pid] for pid in family if pid != os.getpid())
    return time.process_time() + others / os.sysconf("SC_CLK_TCK")
