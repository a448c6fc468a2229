"""What the machine that leads a run on a cluster needs: a port for engines in place of engines of its own."""

import secrets
from importlib.util import find_spec

import msgspec

from pipeline.cluster.config import RayConfig
from pipeline.config import Config
from pipeline.errors import ConfigError

# Below the ports that Linux hands out by itself, and above those that Ray takes for its workers.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


def draw_port() -> int:
    return _FIRST_PORT + secrets.randbelow(_NUM_PORTS)


def ranks_here(config: Config) -> int:
    """Of the learner.num_processes ranks those of the head, which are the first; as many are on each other node.

    Raises ConfigError when they cannot be shared out evenly.
    """
    ranks, table = config.learner.num_processes, config.cluster
    nodes = table.learner_nodes if isinstance(table, RayConfig) else 1
    if ranks % nodes:
        raise ConfigError(
            f"learner.num_processes = {ranks} ranks cannot be shared out evenly over cluster.learner_nodes = {nodes}; "
            "make it a multiple"
        )
    return ranks // nodes


def without_engines(config: Config, listen_on: str) -> Config:
    """The config of the head: engines join at daemon.listen, which is drawn at the address `listen_on` if not set.

    Raises ConfigError where [engines] names what one machine has.
    """
    engines = config.engines
    if engines.gpus or engines.urls:
        raise ConfigError(
            "engines.gpus and engines.urls name what one machine has; remove them, the cluster hands out GPUs"
        )
    listen = config.daemon.listen or f"tcp://{listen_on}:{draw_port()}"
    engines = msgspec.structs.replace(engines, count=0)
    daemon = msgspec.structs.replace(config.daemon, listen=listen)
    return msgspec.structs.replace(config, engines=engines, daemon=daemon)


def check_gpus(config: Config, gpus_per_engine: int) -> None:
    """Raises ConfigError unless an engine gets as many GPUs as serve it; 0 leaves that to the machines."""
    if config.engines.kind == "sglang" and gpus_per_engine not in (0, config.engines.tp):
        raise ConfigError(
            f"cluster.gpus_per_engine = {gpus_per_engine}, but engines.tp = {config.engines.tp} GPUs serve one engine; "
            "set them alike"
        )


def resolve_ray(config: Config) -> Config:
    """With cluster.kind = "ray" the config of the head, others as they are.

    Raises ConfigError without ray, or when [cluster] and [engines] do not fit.
    """
    table = config.cluster
    if not isinstance(table, RayConfig):
        return config
    check_ray(config)
    check_gpus(config, table.gpus_per_engine)
    ranks_here(config)
    # A cluster of this machine alone needs no port that others can reach.
    return without_engines(config, "0.0.0.0" if table.address else "127.0.0.1")


def check_ray(config: Config) -> None:
    """Raises ConfigError when the run needs ray and it is not installed."""
    if isinstance(config.cluster, RayConfig) and find_spec("ray") is None:
        raise ConfigError('cluster.kind = "ray" needs the package ray, here and on every node: pip install "ray>=2.60"')
