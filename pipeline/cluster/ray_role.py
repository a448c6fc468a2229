"""The role process with cluster.kind = "ray": `python -m pipeline.cluster.ray_role RUN_DIR`.

It joins a Ray cluster, or starts one, has parts of the run placed there, and ends when the engines have ended.
"""

import argparse
from pathlib import Path

from pipeline.channels import introduction, report_failure
from pipeline.cluster.bundles import bundles_of, ray_table
from pipeline.cluster.joining import joined
from pipeline.errors import NguError
from pipeline.remote.keys import DIRECTORY, WORKER_FILE
from pipeline.role import run_role
from pipeline.rundir import read_config

NAME = "ray"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.cluster.ray_role")
    parser.add_argument("run_dir", type=Path)
    run_dir: Path = parser.parse_args().run_dir
    config = read_config(run_dir)
    try:
        with joined(config, run_dir) as own_address:
            from pipeline.cluster.placing import Placing

            key = (run_dir / DIRECTORY / WORKER_FILE).read_text()
            address = _reachable(config.daemon.listen, own_address)
            Placing(bundles_of(config), ray_table(config).strategy, run_dir, address, key).run()
    except NguError as e:
        report_failure(introduction("gateway", NAME, 0), e.message)
        raise


def _reachable(listen: str, own_address: str) -> str:
    """Where nodes of the cluster find what listens at `listen`."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    return f"tcp://{own_address if host in ('0.0.0.0', '*') else host}:{port}"


if __name__ == "__main__":
    run_role(main)
