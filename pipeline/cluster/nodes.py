"""RUN/cluster.json: the nodes of a run's cluster and their engines, for `ngu status`."""

from pathlib import Path

import msgspec

from pipeline.rundir import write_atomic

_FILE = "cluster.json"


class Node(msgspec.Struct, frozen=True):
    """`engines` are the places of those that it has."""

    id: str
    host: str
    address: str
    alive: bool
    engines: tuple[int, ...]


class ClusterView(msgspec.Struct, frozen=True):
    """`waiting` are the places of engines for which no node has room."""

    address: str
    nodes: tuple[Node, ...]
    waiting: tuple[int, ...]

    def lines(self) -> list[str]:
        """For a person, the nodes that matter: with engines, or gone."""
        alive = sum(node.alive for node in self.nodes)
        lines = [f"Ray at {self.address}: {alive} node{'s' * (alive != 1)}"]
        if self.waiting:
            lines[0] += f"; no room for {_engines(self.waiting)}"
        for node in self.nodes:
            if node.engines or not node.alive:
                what = _engines(node.engines) if node.alive else "gone"
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


def _engines(places: tuple[int, ...]) -> str:
    return f"engine{'s' * (len(places) > 1)} {', '.join(map(str, places))}"
