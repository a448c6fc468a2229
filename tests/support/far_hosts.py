"""Two hosts of two workers behind cables of 100 Mbit/s that delay by 20 ms and lose 1%: `python far_hosts.py SECONDS`.

Prints trajectories a second against what the cables carry.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from namespaces import FarMachine, why_not_permitted
from small_run import SmallRun

from pipeline import worker as engine_worker
from pipeline.cli import main as ngu
from pipeline.engines.base import Failure
from pipeline.engines.fake import EOS_ID, FIRST_ID, LOGPROB, PROMPT_IDS, FakeEngine
from pipeline.messages import Rollout, VersionSpan, Work, pack_ids, pack_logprobs

BIT_PER_S = 100e6
NUM_TOKENS = 2048
SLOTS = 256
WARM_UP_S = 3.0


class FarRun(SmallRun):
    """Its gateway listens everywhere; each host reaches it at an address of its own."""

    def __init__(self, machines: Sequence[FarMachine], *settings: str):
        super().__init__(*settings, "daemon.listen=tcp://0.0.0.0:0", "engines.count=0", "max_rollouts=1000000")
        self.machines = machines
        self.start("gateway", "pipeline.remote.gateway", str(self.dir))

    def start_workers(self, module: str, *arguments: str, per_host: int = 2) -> list[str]:
        """Their names as processes. Workers of a host have a $TMPDIR of their own, as they would there."""
        port, key, names = self.address().rpartition(":")[2], str(self.dir / "keys" / "worker.key"), []
        for host, machine in enumerate(self.machines):
            own = self.dir / f"host{host}"
            own.mkdir()
            inside = self._inside(machine, own)
            for number in range(per_host):
                names.append(f"host{host}-{number}")
                connect = ["worker", "--connect", f"tcp://{machine.here}:{port}", "--key", key]
                self.start(names[-1], module, *connect, *arguments, inside=inside)
        return names

    def _inside(self, machine: FarMachine, own: Path) -> Callable[..., list[str]]:
        return lambda *argv: machine.argv("env", f"TMPDIR={own}", *argv)


class WholeRollouts(FakeEngine):
    """Long completions, whole after one step: what they cost is their way to the run."""

    _ids = pack_ids([*[FIRST_ID] * (NUM_TOKENS - 1), EOS_ID])
    _logprobs = pack_logprobs([LOGPROB] * NUM_TOKENS)

    def step(self) -> list[Rollout | Failure]:
        assert self._version is not None
        ended: list[Rollout | Failure] = [self._whole(work, self._version) for work in self._waiting]
        self._waiting.clear()
        return ended

    def _whole(self, work: Work, version: int) -> Rollout:
        wrong = "1" * (work.attempt_id % 2)
        text, now = f"\\boxed{{{wrong}{work.problem.answer}}}", time.time_ns()
        spans = (VersionSpan(0, version),)
        ids = (pack_ids(PROMPT_IDS), self._ids, self._logprobs)
        return Rollout(work.attempt_id, work.chain_id, work.round, *ids, spans, "stop", text, self.engine_id, now, now)


def plain_tcp(machine: FarMachine, seconds: float) -> float:
    """Bits a second of one plain connection from there to here."""
    with socket.create_server((machine.here, 0)) as server:
        target = server.getsockname()
        code = f"import socket\ns = socket.create_connection({target!r})\nwhile True: s.sendall(bytes(65536))"
        with subprocess.Popen(machine.argv(sys.executable, "-S", "-c", code), stderr=subprocess.DEVNULL) as sender:
            stream, _ = server.accept()
            with stream:
                _drain(stream, 1.0)
                rate = _drain(stream, seconds)
            sender.kill()
    return 8 * rate


def _drain(stream: socket.socket, seconds: float) -> float:
    """Bytes a second that arrive."""
    began, num_bytes = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        num_bytes += len(stream.recv(1 << 16))
    return num_bytes / (time.monotonic() - began)


def measure(seconds: float) -> None:
    paths = (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # where the workers find this file
    with contextlib.ExitStack() as closing:
        machines = [closing.enter_context(contextlib.closing(FarMachine(BIT_PER_S))) for _ in range(2)]
        plain = [plain_tcp(machine, 3.0) for machine in machines]
        settings = ("learner.batch_size=512", "staleness.max_lag=4", f"sampling.max_new_tokens={NUM_TOKENS}")
        run = closing.enter_context(contextlib.closing(FarRun(machines, *settings)))
        run.start_workers("far_hosts", "--slots", str(SLOTS))
        run.until(lambda: len(run.by_engine) == 4, "four workers")
        run.go_on(WARM_UP_S)
        before = _counts(run)
        run.go_on(seconds)
        took, rollouts, versions, *arrived = (b - a for a, b in zip(before, _counts(run), strict=True))
        copies = run.gateway["copies"]
        run.finish()
    on_wire = sum(arrived) / rollouts
    share = 8 * sum(arrived) / took / (len(machines) * BIT_PER_S)
    tcp = sum(plain) / (len(machines) * BIT_PER_S)
    print(f"{rollouts / took:.0f} trajectories/s of {NUM_TOKENS} tokens, {versions / took:.1f} versions/s of 1 MiB")
    print(f"{on_wire:.0f} bytes each on the cables, which carry {rollouts / took / share:.0f}/s: {share:.0%}")
    print(f"one plain connection from each host: {tcp:.0%} of the cables; most copies of a version to a host: {copies}")


def _counts(run: SmallRun) -> list[float]:
    status = run.status()
    assert isinstance(run, FarRun)
    return [status["time"], status["rollouts"], status["step"], *(m.num_bytes_here() for m in run.machines)]


def _worker() -> None:
    engine_worker.make_engine = lambda config, model_dir, seed, template, name: WholeRollouts(config.slots, seed, name)
    sys.exit(ngu(sys.argv[1:]))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _worker()
    if reason := why_not_permitted(FarMachine):
        sys.exit(f"network namespaces: {reason}")
    measure(float(sys.argv[1]))
