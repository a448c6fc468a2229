"""What of a run Ray places: one bundle of resources for each engine, each verifier, and each node of the learner."""

from typing import NamedTuple

from pipeline.cluster.config import RayConfig
from pipeline.cluster.head import ranks_here
from pipeline.config import Config
from pipeline.remote.keys import WORKER_FILE


class Bundle(NamedTuple):
    """`role` is that of the `ngu worker` in it, number `place` of its role, or "learner": a node of ranks."""

    role: str
    place: int
    name: str
    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})


def bundles_of(config: Config) -> list[Bundle]:
    """In their order; the learner's first node, which is the head, is not among them."""
    table, here, judges = ray_table(config), ranks_here(config), config.verifier.num_workers
    cpus, gpus = table.cpus_per_engine, table.gpus_per_engine
    bundles = [Bundle("engine", i, f"engine {i}", cpus, gpus) for i in range(table.engines)]
    bundles += [Bundle("verifier", i, f"verifier {i}", judges, 0) for i in range(table.verifiers)]
    cpus, gpus = here * table.cpus_per_rank, here * table.gpus_per_rank
    bundles += [Bundle("learner", i, _ranks_name(i * here, here), cpus, gpus) for i in range(1, table.learner_nodes)]
    return bundles


def learner_bundle(config: Config, node: int) -> int:
    """The number of the bundle of the learner's node number `node`."""
    table = ray_table(config)
    return table.engines + table.verifiers + node - 1


def ray_table(config: Config) -> RayConfig:
    assert isinstance(config.cluster, RayConfig)
    return config.cluster


def worker_argv(bundle: Bundle, address: str) -> list[str]:
    """What an interpreter is given to run a bundle's `ngu worker`, beside a file with the run's worker key."""
    joins = ["--connect", address, "--key", WORKER_FILE, "--place", str(bundle.place), "--role", bundle.role]
    return ["-m", "pipeline.cli", "worker", *joins]


def _ranks_name(first: int, num: int) -> str:
    return f"learner rank {first}" if num == 1 else f"learner ranks {first} to {first + num - 1}"
