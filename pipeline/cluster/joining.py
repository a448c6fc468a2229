"""How a process on the head becomes a driver of a Ray cluster: one that exists, or one of this machine alone."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.cluster.bundles import Bundle, bundles_of, ray_table
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.scratch import Scratch

# Engines say the same things, and their output goes into a file of lines.
_RAY_ENV = {"RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
# Only actors' arguments and log lines are in it.
_OBJECT_STORE_BYTES = 80 << 20
_CONNECT_TIMEOUT_S = 10.0


@contextlib.contextmanager
def joined(config: Config, run_dir: Path) -> Iterator[str]:
    """Inside, this process is a driver of the cluster; gives the address at which its nodes reach this machine.

    The drivers of a run share a namespace. Raises ConfigError when there is no such cluster, or a new one would be too
    small.
    """
    os.environ |= _RAY_ENV  # it is read when ray is imported
    address = ray_table(config).address
    if not address:
        # For a cluster of its own. Ray would leave a token in the home directory, for every cluster to come.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    scratch = None
    try:
        if address:
            _connect(address, f"ngu-{(run_dir / 'run_id').read_text().strip()}")
            here = ray.get_runtime_context().get_node_id()
            yield next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        else:
            scratch = Scratch("ngu-ray-")  # Ray's sockets and logs
            _start(scratch)
            _check_size(bundles_of(config))
            yield "127.0.0.1"
    finally:
        ray.shutdown()
        if scratch is not None:
            scratch.close()


def _connect(address: str, namespace: str) -> None:
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
        ray.init(address=address, namespace=namespace)
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


def _check_size(bundles: Sequence[Bundle]) -> None:
    """A cluster of one machine does not grow: what does not fit would wait forever."""
    import ray

    has = ray.cluster_resources()
    for kind in ("CPU", "GPU"):
        if (needed := sum(bundle.resources.get(kind, 0.0) for bundle in bundles)) > has.get(kind, 0.0):
            raise ConfigError(
                f"cluster.engines and cluster.verifiers need {needed:g} {kind}s, and this machine has "
                f"{has.get(kind, 0.0):g}; lower them, or name a larger cluster (cluster.address)"
            )
