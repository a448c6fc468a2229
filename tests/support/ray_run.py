"""The built-in job on a Ray cluster of three nodes, all on this machine, and without one: `python ray_run.py SEED…`.

Ray spreads two engines and the learner's second rank over the nodes; in the last arm the node of that rank is killed in
the middle of the run, as by a power cut. Prints for each arm the hard pass@1, what the books say, and after the loss
the seconds until everything was placed again, the learner took new steps, and every engine was back.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chaos import ngu
from ray_nodes import Nodes

from pipeline import rundir
from pipeline.cluster.nodes import Node, read_view

ENGINES, RANKS = 2, 2
CPUS = (1, 3, 3)  # the second rank, of two, fits on the second node or the third, where there is always room for it
ROLLOUTS, KILLED_AT = 11_904, 1 / 3
SETTINGS = ("eval.every_steps=0", f"max_rollouts={ROLLOUTS}")


def on_ray(address: str) -> tuple[str, ...]:
    settings = {"kind": "ray", "address": address, "engines": ENGINES, "learner_nodes": 2, "cpus_per_rank": 2}
    return ("cluster.private_network=true", *(f"cluster.{name}={value}" for name, value in settings.items()))


class Arm:
    def __init__(self, directory: Path, seed: int, *settings: str):
        self.dir = directory
        started = ngu("start", "--run-dir", str(directory), "--seed", str(seed), *SETTINGS, *settings)
        assert started.returncode == 0, started.stderr
        self._began = time.monotonic()

    def status(self) -> dict:
        return rundir.read_status(self.dir)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert rundir.is_running(self.dir), ngu("status", str(self.dir)).stdout
            time.sleep(0.1)

    def outcome(self) -> str:
        """One line, when the run has ended."""
        while rundir.is_running(self.dir):
            time.sleep(0.2)
        took = time.monotonic() - self._began
        found = json.loads((self.dir / "summary.json").read_text())
        books = ngu("ledger", str(self.dir), "--verify")
        said = f"{self.status()['state']}, hard pass@1 {found['hard_pass_at_1']:.3f}, {took:.0f} s"
        return f"{said}; {books.stdout.strip()}"


def lose_a_node(arm: Arm, nodes: Nodes) -> str:
    """Kill the node of the learner's second rank in the middle of the run; says when what was on it was back."""

    def joined() -> float:
        return (arm.status().get("gateway") or {}).get("joined", 0.0)

    def nodes_of_run() -> list[Node]:
        view = read_view(arm.dir)
        return [] if view is None or view.waiting else list(view.nodes)

    arm.until(lambda: arm.status().get("rollouts", 0) > KILLED_AT * ROLLOUTS)
    lost = next(node for node in nodes_of_run() if "learner rank 1" in node.holds)
    num_engines = sum(name.startswith("engine") for name in lost.holds)
    stood, before = arm.status()["step"], joined()
    nodes.kill(next(i for i, node in enumerate(nodes.ids) if node.startswith(lost.id)))
    began = time.monotonic()
    back: dict[str, float] = {}

    def is_back() -> bool:
        is_placed = any(node.id == lost.id and not node.alive for node in nodes_of_run())
        status = arm.status()
        happened = {
            f"{', '.join(lost.holds)} placed again": is_placed,
            "steps again": status["step"] > stood + 1 and not status["catching_up"],
            "every engine back": is_placed and joined() >= before + num_engines,
        }
        for what, is_so in happened.items():
            if is_so and what not in back:
                back[what] = time.monotonic() - began
        return all(happened.values())

    arm.until(is_back)
    return "".join(f"; {what} after {seconds:.1f} s" for what, seconds in back.items())


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        top = Path(tempfile.mkdtemp(prefix="ngu-ray-run-"))
        arm = Arm(top / "local", seed, f"engines.count={ENGINES}", f"learner.num_processes={RANKS}")
        print(f"seed {seed}, one machine: {arm.outcome()}", flush=True)
        for name in ("three nodes", "one of them lost"):
            nodes = Nodes(*CPUS)
            try:
                arm = Arm(top / name.replace(" ", "_"), seed, f"learner.num_processes={RANKS}", *on_ray(nodes.address))
                cost = lose_a_node(arm, nodes) if "lost" in name else ""
                print(f"seed {seed}, {name}: {arm.outcome()}{cost}", flush=True)
            finally:
                nodes.close()
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
