"""The process of a run that everything else hangs from: it holds the run, listens to signals, supervises, reports."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from pipeline import rundir
from pipeline.cluster.head import check_ray
from pipeline.errors import NguError
from pipeline.logs import LogStream, RoleLog
from pipeline.supervisor import Supervisor


def run(run_dir: Path, resume: bool) -> int:
    """Supervise a run until it ends, in the calling process' main thread; returns its exit status.

    SIGTERM and SIGINT stop it gracefully: the learner finishes its step, a checkpoint is written, every role exits.
    Raises ConfigError when another process holds the run.
    """
    config = rundir.read_config(run_dir)
    check_ray(config)
    with rundir.lock(run_dir):
        supervisor = Supervisor(run_dir, config)

        def request_stop(signum: int, frame: object) -> None:
            supervisor.stop_requested = True

        previous = {s: signal.signal(s, request_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            try:
                # Now that a signal is a request: whoever finds this file sends one.
                rundir.write_atomic(run_dir / "daemon.pid", str(os.getpid()).encode())
                status = supervisor.run(resume)
            finally:
                _remove_weights(run_dir)
            _write_report(run_dir)  # before the handlers go: a late `ngu stop` or Ctrl-C must not cut it short
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
        return status


def _remove_weights(run_dir: Path) -> None:
    """A learner that was killed leaves its weights in shared memory."""
    run_id = (run_dir / "run_id").read_text().strip()
    shutil.rmtree(f"/dev/shm/ngu-{run_id}", ignore_errors=True)


def _write_report(run_dir: Path) -> None:
    """Summary and plots, in a process of its own: they need matplotlib, and a failed plot must not fail the run."""
    log = run_dir / "logs" / "report.log"
    with log.open("ab") as out:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.report", str(run_dir)],
            stdout=out,
            stderr=out,
            check=False,
            process_group=0,  # out of reach of the terminal's Ctrl-C, as the roles are
        )
    if done.returncode:
        print(f"supervisor: the report could not be written; see {log}", file=sys.stderr)


def main() -> int:
    """`python -m pipeline.daemon RUN_DIR [--resume]`, which `ngu start` leaves in the background."""
    run_dir = Path(sys.argv[1]).absolute()
    sys.stdout = sys.stderr = LogStream(RoleLog(run_dir / "logs", "daemon"))
    try:
        return run(run_dir, resume="--resume" in sys.argv[2:])
    except NguError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return e.exit_status


if __name__ == "__main__":
    sys.exit(main())
