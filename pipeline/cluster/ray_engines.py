"""The engines of a run as Ray actors, one a bundle of one placement group: where they are, and what becomes of them."""

import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline import rundir
from pipeline.cluster.config import RayConfig
from pipeline.cluster.engine_host import Ended, EngineHost
from pipeline.cluster.nodes import ClusterView, Node, write_view
from pipeline.errors import ConfigError

TICK_S = 1.0  # between two looks at nodes; an engine that ends is heard at once
LEAVE_S = 30.0  # for engines to clear up after the run's end; a supervisor waits less


class RayEngines:
    """They are asked for when this is made, and go when this process does.

    Ray starts the actor of a lost node again on another one, as soon as one has room. `address` is where nodes reach
    the run's gateway, `key` the text of its worker key.
    """

    def __init__(self, table: RayConfig, run_dir: Path, address: str, key: str):
        self._run_dir = run_dir
        cpus, gpus = table.cpus_per_engine, table.gpus_per_engine
        bundle = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        self._group = placement_group([bundle] * table.engines, strategy=table.strategy.upper())
        actor: Any = ray.remote(EngineHost)
        self._hosts = []  # an actor lives as long as its handle
        self._serving: dict[ray.ObjectRef, int] = {}  # what `serve` will return -> place
        for place in range(table.engines):
            host = actor.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
            ).remote(place, address, key)
            self._hosts.append(host)
            self._serving[host.serve.remote()] = place
        self._has_left = False
        self._reason = ""  # of an engine that cannot work
        self._where: dict[int, str] = {}  # place -> node, of engines that have one
        self._nodes: dict[str, dict] = {}  # those that were ever alive while this was
        self._view: ClusterView | None = None

    def run(self) -> None:
        """Return when the engines have left; raises ConfigError when none can work."""
        while self._serving and not self._is_over():
            self._look()
            ended, _ = ray.wait(list(self._serving), timeout=TICK_S)
            for serving in ended:
                self._on_end(self._serving.pop(serving), _result(serving))
        if leaving := [serving for serving, place in self._serving.items() if place in self._where]:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        if self._reason and not self._has_left:
            raise ConfigError(f"no engine can work: {self._reason}")

    def _is_over(self) -> bool:
        """An engine that has no node yet would not hear of the run's end."""
        return self._has_left and rundir.read_status(self._run_dir).get("state") in rundir.END_STATES

    def _on_end(self, place: int, ended: Ended) -> None:
        if ended.status:
            self._reason = ended.last_line
            _say(f"engine {place} cannot work: {ended.last_line}")
        else:
            self._has_left = True
            _say(f"engine {place} has left")

    def _look(self) -> None:
        """Tell, in the log and to `ngu status`, which engines are on which nodes."""
        for node in ray.nodes():
            if node["Alive"] or node["NodeID"] in self._nodes:
                self._nodes[node["NodeID"]] = node
        bundles = placement_group_table(self._group)["bundles_to_node_id"]
        where = {place: node for place, node in bundles.items() if self._is_alive(node)}
        for place, node in self._where.items():
            if where.get(place) != node:
                _say(f"engine {place} is lost: node {self._name(node)} is gone")
        for place, node in where.items():
            if self._where.get(place) != node:
                _say(f"engine {place} is placed on node {self._name(node)}")
        self._where = where
        self._show()

    def _show(self) -> None:
        wanted = sorted(self._serving.values())
        nodes = [
            Node(
                id=node_id[:8],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                alive=node["Alive"],
                engines=tuple(place for place in wanted if self._where.get(place) == node_id),
            )
            for node_id, node in self._nodes.items()
        ]
        waiting = tuple(place for place in wanted if place not in self._where)
        view = ClusterView(ray.get_runtime_context().gcs_address, tuple(nodes), waiting)
        if view != self._view:
            write_view(self._run_dir, view)
            self._view = view

    def _is_alive(self, node: str) -> bool:
        return node in self._nodes and self._nodes[node]["Alive"]

    def _name(self, node: str) -> str:
        return f"{node[:8]} on {self._nodes[node]['NodeManagerHostname']}"


def _result(serving: ray.ObjectRef) -> Ended:
    try:
        return ray.get(serving)
    except RayError as e:  # as where this package is not installed
        return Ended(2, " ".join(str(e).split())[-500:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
