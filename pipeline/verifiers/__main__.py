"""The verifier role: `python -m pipeline.verifiers RUN_DIR --name verifier`, in the run directory."""

import argparse
from pathlib import Path

from pipeline import tracing
from pipeline.channels import ENDPOINT, PeerSocket, introduction
from pipeline.errors import VerifierError
from pipeline.messages import PeerFailed
from pipeline.role import run_role
from pipeline.rundir import read_config
from pipeline.verifiers.pool import VerifierPool
from pipeline.verifiers.serving import SLOTS, serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.verifiers")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", default="verifier")
    args = parser.parse_args()
    config = read_config(args.run_dir)
    if config.telemetry.profile:
        tracing.start(args.run_dir, args.name)
    socket = PeerSocket(ENDPOINT, introduction("verifier", args.name, SLOTS))
    try:
        with VerifierPool.of_run(config) as pool:
            socket.say_hello()
            serve(socket, pool)
    except VerifierError as e:
        socket.send(PeerFailed(e.message))
        raise
    finally:
        socket.close()
    return 0


if __name__ == "__main__":
    run_role(main)
