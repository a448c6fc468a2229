"""The role process with cluster.kind = "ray": `python -m pipeline.cluster.ray_role RUN_DIR`.

It joins a Ray cluster, or starts one, has the run's engines placed there, and ends when they have ended.
"""

import argparse
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from pipeline.channels import introduction, report_failure
from pipeline.cluster.config import RayConfig
from pipeline.errors import ConfigError, NguError
from pipeline.remote.keys import DIRECTORY, WORKER_FILE
from pipeline.role import run_role
from pipeline.rundir import read_config
from pipeline.scratch import Scratch

NAME = "ray"
# Engines say the same things, and their output goes into a file of lines.
_RAY_ENV = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
# Only actors' arguments and log lines are in it.
_OBJECT_STORE_BYTES = 80 << 20
_CONNECT_TIMEOUT_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.cluster.ray_role")
    parser.add_argument("run_dir", type=Path)
    run_dir: Path = parser.parse_args().run_dir
    config = read_config(run_dir)
    table = config.cluster
    assert isinstance(table, RayConfig)
    os.environ |= _RAY_ENV  # it is read when ray is imported
    if not table.address:
        # For a cluster of its own. Ray would leave a token in the home directory, for every cluster to come.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with _cluster(table) as own_address:
            from pipeline.cluster.ray_engines import RayEngines

            key = (run_dir / DIRECTORY / WORKER_FILE).read_text()
            RayEngines(table, run_dir, _reachable(config.daemon.listen, own_address), key).run()
    except NguError as e:
        report_failure(introduction("gateway", NAME, 0), e.message)
        raise


@contextlib.contextmanager
def _cluster(table: RayConfig) -> Iterator[str]:
    """Inside, this process is a driver of the cluster; gives the address at which its nodes reach this machine.

    Raises ConfigError when there is no such cluster, or a new one would be too small.
    """
    import ray

    scratch = None
    try:
        if table.address:
            _connect(table.address)
            here = ray.get_runtime_context().get_node_id()
            yield next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        else:
            scratch = Scratch("ngu-ray-")  # Ray's sockets and logs
            _start(scratch)
            _check_size(table)
            yield "127.0.0.1"
    finally:
        ray.shutdown()
        if scratch is not None:
            scratch.close()


def _connect(address: str) -> None:
    """Join the cluster at `address`; raises ConfigError when this machine is no node of one there."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as e:
            raise ConfigError(
                f"cluster.address = {address!r}: no Ray cluster answers there ({e.strerror or e})"
            ) from None
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as e:
        why = " ".join(str(e).split())
        raise ConfigError(
            f"cluster.address = {address!r}: this machine is no node of such a Ray cluster ({why}); run `ray start "
            "--address=HOST:PORT` here first, or leave it empty to start a cluster of this machine alone"
        ) from None


def _start(scratch: Scratch) -> None:
    """A cluster of this machine, for this process alone: Ray's processes die with it, however it ends.

    All but two, if it is killed: the node's agents spend a minute on reporting that to a server that is gone, and end.
    """
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(scratch.path),
        _system_config={"prestart_worker_first_driver": False},
    )


def _check_size(table: RayConfig) -> None:
    """A cluster of one machine does not grow: engines that do not fit would wait forever."""
    import ray

    has = ray.cluster_resources()
    for kind, each in (("CPU", table.cpus_per_engine), ("GPU", table.gpus_per_engine)):
        if (needed := table.engines * each) > has.get(kind, 0):
            raise ConfigError(
                f"cluster.engines = {table.engines} need {needed} {kind}s, and this machine has {has.get(kind, 0):g}; "
                "lower that, or name a larger cluster (cluster.address)"
            )


def _reachable(listen: str, own_address: str) -> str:
    """Where nodes of the cluster find what listens at `listen`."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    return f"tcp://{own_address if host in ('0.0.0.0', '*') else host}:{port}"


if __name__ == "__main__":
    run_role(main)
