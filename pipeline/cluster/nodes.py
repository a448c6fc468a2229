"""RUN/cluster.json: the nodes of a run's cluster and what they hold of it, for `ngu status`."""

from pathlib import Path

import msgspec

from pipeline.rundir import write_atomic

_FILE = "cluster.json"


class Node(msgspec.Struct, frozen=True):
    """`holds` names what of the run it has, as "engine 3"."""

    id: str
    host: str
    address: str
    alive: bool
    holds: tuple[str, ...]


class ClusterView(msgspec.Struct, frozen=True):
    """`waiting` names that for which no node has room."""

    address: str
    nodes: tuple[Node, ...]
    waiting: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a person, the nodes that matter: with a part of the run, or gone."""
        alive = sum(node.alive for node in self.nodes)
        lines = [f"Ray at {self.address}: {alive} node{'s' * (alive != 1)}"]
        if self.waiting:
            lines[0] += f"; no room for {', '.join(self.waiting)}"
        for node in self.nodes:
            if node.holds or not node.alive:
                what = ", ".join(node.holds) if node.alive else "gone"
                lines.append(f"node {node.id} on {node.host} ({node.address}): {what}")
        return lines


def write_view(run_dir: Path, view: ClusterView) -> None:
    write_atomic(run_dir / _FILE, msgspec.json.encode(view))


def read_view(run_dir: Path) -> ClusterView | None:
    """None for a run that is on no cluster."""
    try:
        return msgspec.json.decode((run_dir / _FILE).read_bytes(), type=ClusterView)
    except FileNotFoundError:
        return None
