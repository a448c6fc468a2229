"""A run's placement group: who is in its bundles, where they are, and what becomes of them.

Engines and verifiers are actors of the process that has made the group. A node of the learner is given its ranks, and
new ones after each restart, by `pipeline.cluster.ray_learner`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline import rundir
from pipeline.cluster.actor import Ended, ProcessHost
from pipeline.cluster.bundles import Bundle, worker_argv
from pipeline.cluster.nodes import ClusterView, Node, write_view
from pipeline.errors import ConfigError
from pipeline.remote.keys import WORKER_FILE

TICK_S = 1.0  # between two looks at nodes; an engine that ends is heard at once
LEAVE_S = 25.0  # for engines to clear up after the run's end; a supervisor waits a little longer
_GROUP = "ngu"  # in the namespace of the run


class Placing:
    """All is asked for when this is made, and goes when this process does.

    Ray starts the actor of a lost node again on another one, as soon as one has room. `address` is where nodes reach
    the run's gateway, `key` the text of its worker key.
    """

    def __init__(self, bundles: Sequence[Bundle], strategy: str, run_dir: Path, address: str, key: str):
        self._run_dir = run_dir
        self._group = placement_group([b.resources for b in bundles], strategy=strategy.upper(), name=_GROUP)
        self._wanted = dict(enumerate(bundles))
        self._hosts = []  # an actor lives as long as its handle
        self._serving: dict[ray.ObjectRef, int] = {}  # what `serve` will return -> bundle
        for i, bundle in enumerate(bundles):
            if bundle.role == "learner":
                continue
            make = place_in(self._group, i, bundle.cpus, bundle.gpus, max_restarts=-1, max_task_retries=-1)
            host = make(bundle.name, worker_argv(bundle, address), {WORKER_FILE: key})
            self._hosts.append(host)
            self._serving[host.serve.remote()] = i
        self._has_left = False
        self._reason = ""  # of an engine that cannot work
        self._where: dict[int, str] = {}  # bundle -> node, of those that have one
        self._nodes: dict[str, dict] = {}  # those that were ever alive while this was
        self._view: ClusterView | None = None

    def run(self) -> None:
        """Return when the engines have left; raises ConfigError when none can work."""
        while any(self._wanted[i].role == "engine" for i in self._serving.values()) and not self._is_over():
            self._look()
            ended, _ = ray.wait(list(self._serving), timeout=TICK_S)
            for serving in ended:
                self._on_end(self._serving.pop(serving), _result(serving))
        if self._reason and not self._has_left:
            raise ConfigError(f"no engine can work: {self._reason}")
        if leaving := [serving for serving, i in self._serving.items() if i in self._where]:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)

    def _is_over(self) -> bool:
        """An engine that has no node yet would not hear of the run's end."""
        return self._has_left and rundir.read_status(self._run_dir).get("state") in rundir.END_STATES

    def _on_end(self, i: int, ended: Ended) -> None:
        bundle = self._wanted.pop(i)
        is_engine = bundle.role == "engine"
        if ended.status:
            self._reason = ended.last_line if is_engine else self._reason
            _say(f"{bundle.name} cannot work: {ended.last_line}")
        else:
            self._has_left |= is_engine
            _say(f"{bundle.name} has left")

    def _look(self) -> None:
        """Tell, in the log and to `ngu status`, what is on which nodes."""
        for node in ray.nodes():
            if node["Alive"] or node["NodeID"] in self._nodes:
                self._nodes[node["NodeID"]] = node
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        where = {i: node for i, node in placed.items() if i in self._wanted and self._is_alive(node)}
        for i, node in self._where.items():
            if i in self._wanted and where.get(i) != node:
                _say(f"{self._wanted[i].name} lost: node {self._node_name(node)} is gone")
        for i, node in where.items():
            if self._where.get(i) != node:
                _say(f"{self._wanted[i].name} placed on node {self._node_name(node)}")
        self._where = where
        self._show()

    def _show(self) -> None:
        nodes = [
            Node(
                id=node_id[:8],
                host=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                alive=node["Alive"],
                holds=tuple(bundle.name for i, bundle in self._wanted.items() if self._where.get(i) == node_id),
            )
            for node_id, node in self._nodes.items()
        ]
        waiting = tuple(bundle.name for i, bundle in self._wanted.items() if i not in self._where)
        view = ClusterView(ray.get_runtime_context().gcs_address, tuple(nodes), waiting)
        if view != self._view:
            write_view(self._run_dir, view)
            self._view = view

    def _is_alive(self, node: str) -> bool:
        return node in self._nodes and self._nodes[node]["Alive"]

    def _node_name(self, node: str) -> str:
        return f"{node[:8]} on {self._nodes[node]['NodeManagerHostname']}"


def group_of_run() -> PlacementGroup:
    """The group of the `Placing` that this run has, or will have in a moment."""
    while True:
        try:
            return get_placement_group(_GROUP)
        except ValueError:
            time.sleep(TICK_S / 2)


def place_in(group: PlacementGroup, bundle: int, cpus: int, gpus: int, **options: Any) -> Callable[..., Any]:
    """Makes an actor of a `ProcessHost`, given its arguments, in a bundle of `group`."""
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    actor: Any = ray.remote(ProcessHost)
    return actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where, **options).remote


def _result(serving: ray.ObjectRef) -> Ended:
    try:
        return ray.get(serving)
    except RayError as e:  # as where this package is not installed
        return Ended(2, " ".join(str(e).split())[-500:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
