"""The coordinator's process: `python -m pipeline.coordinator RUN_DIR [--resume CHECKPOINT]`."""

import argparse
import os
import signal
from pathlib import Path

from pipeline import checkpoints, control, tracing
from pipeline.channels import ENDPOINT, RouterSocket
from pipeline.coordinator.controls import Controls
from pipeline.coordinator.exporter import Exporter
from pipeline.coordinator.guarding import Guards
from pipeline.coordinator.loop import Coordinator
from pipeline.coordinator.status import StatusFile
from pipeline.errors import NguError
from pipeline.guards import ClockGuard, DiskGuard, MemoryGuard, tree_bytes
from pipeline.ledger import Ledger
from pipeline.metrics import open_sinks
from pipeline.role import few_collections, keep_freed_memory, run_role
from pipeline.rundir import read_config
from pipeline.tasks.registry import make_task
from samplers.registry import make_sampler

TURN_TIMEOUT_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    run_dir: Path = args.run_dir.absolute()
    os.chdir(run_dir)
    config = read_config(run_dir)
    keep_freed_memory()
    if config.telemetry.profile:
        tracing.start(run_dir, "coordinator")
    task = make_task(config.task, config.seed)
    sampler = make_sampler(config.sampler, task, config.seed)
    (run_dir / "ipc").mkdir(mode=0o700, exist_ok=True)
    transport, ledger, sink = RouterSocket(ENDPOINT), Ledger(run_dir / "ledger.sqlite"), open_sinks(run_dir)
    coordinator = Coordinator(run_dir, config, transport, task, sampler, ledger, sink)
    coordinator.recover(checkpoints.load(args.resume) if args.resume else None)
    ledger.checkpoint_in_background()
    socket, controls = control.ControlSocket(control.ENDPOINT, run_dir / "control.jsonl"), Controls(coordinator)

    def request_stop(signum: int, frame: object) -> None:
        coordinator.stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    status = StatusFile(run_dir)
    exporter = Exporter(config.telemetry) if config.telemetry.prometheus_port else None
    supervisor = os.getppid()
    memory = MemoryGuard(config.guards.memory_gib * (1 << 30), lambda: tree_bytes(supervisor))
    guards = Guards(coordinator, DiskGuard(run_dir), memory, ClockGuard())
    try:
        with few_collections():
            while not coordinator.ended:
                coordinator.turn(TURN_TIMEOUT_S)
                socket.serve(controls.handle)
                guards.look()
                status.update(coordinator)
                if exporter is not None:
                    exporter.update(coordinator)
        status.update(coordinator, coordinator.state)
    except Exception as e:
        # Of a crash too, after which the run goes on from its journal: what was measured in this step is in no other.
        coordinator.peers.record_failure(e.message if isinstance(e, NguError) else f"{type(e).__name__}: {e}")
        if isinstance(e, NguError):
            status.update(coordinator, "failed", e.message)
        raise
    finally:
        # A late `ngu stop` must not kill this process while it exits, when Python has put the default handlers back:
        # the supervisor would put a finished run on record as failed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if exporter is not None:
            exporter.close()
        coordinator.close()
        sink.close()
        transport.close()
        socket.close()


if __name__ == "__main__":
    run_role(main)
