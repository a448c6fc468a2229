"""The learner's ranks that another node has: `python -m pipeline.cluster.ray_learner RUN_DIR --node N --rendezvous
tcp://HOST:PORT [--resume CHECKPOINT_DIR]`.

To the supervisor this process is those ranks: it ends as they do, and they end when it does. It has them started in
their bundle of the run's placement group, with the same command as on the head.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from pipeline import rundir
from pipeline.cluster.actor import Ended
from pipeline.cluster.bundles import learner_bundle, ray_table
from pipeline.cluster.head import ranks_here
from pipeline.cluster.joining import joined
from pipeline.config import Config, dump_config
from pipeline.role import EXIT_CRASH, run_role


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.cluster.ray_learner")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--node", type=int, required=True, help="of cluster.learner_nodes, from 1 on")
    parser.add_argument("--rendezvous", required=True, help="where the first rank is met, as tcp://HERE:PORT")
    parser.add_argument("--resume", help="a checkpoint directory of this run")
    arguments = parser.parse_args()
    config = rundir.read_config(arguments.run_dir)
    here = ranks_here(config)
    first = arguments.node * here
    with joined(config, arguments.run_dir) as own_address:
        meet = f"tcp://{own_address}:{arguments.rendezvous.rpartition(':')[2]}"
        commands = [rank_argv(rank, meet, arguments.resume) for rank in range(first, first + here)]
        status, last_line = _serve(config, arguments.node, commands)
    if status == 0 or rundir.read_status(arguments.run_dir).get("state") in rundir.END_STATES:
        return 0  # at its end the engines leave, and with them goes the placement group
    print(f"error: {last_line or f'a rank ended with status {status}'}", file=sys.stderr, flush=True)
    return status if status > 0 else EXIT_CRASH


def rank_argv(rank: int, meet: str, checkpoint: str | None) -> list[str]:
    """The rank's process, started beside its config. `checkpoint` is the head's, and comes from there."""
    resume = ["--resume", checkpoint] if checkpoint else []
    return ["-m", "learner", ".", "--name", f"learner-{rank}", "--rank", str(rank), "--rendezvous", meet, *resume]


def _config_file(config: Config) -> str:
    """A trace would be of another machine's clock."""
    telemetry = msgspec.structs.replace(config.telemetry, profile=False)
    return msgspec.json.encode(dump_config(msgspec.structs.replace(config, telemetry=telemetry))).decode()


def _serve(config: Config, node: int, commands: list[list[str]]) -> Ended:
    """How the first of the ranks failed that `commands` start on the learner's node, or the last one ended."""
    import ray
    from ray.exceptions import RayError

    from pipeline.cluster.placing import group_of_run, place_in

    table = ray_table(config)
    make = place_in(group_of_run(), learner_bundle(config, node), table.cpus_per_rank, table.gpus_per_rank)
    files = {"config.json": _config_file(config)}
    hosts = [make(f"rank {node * len(commands) + i}", argv, files) for i, argv in enumerate(commands)]
    serving = [host.serve_once.remote() for host in hosts]
    while serving:
        (ended,), serving = ray.wait(serving)
        try:
            how = ray.get(ended)
        except RayError as e:  # the node is lost
            how = Ended(EXIT_CRASH, " ".join(str(e).split())[-500:])
        if how.status:
            return how
    return Ended(0, "")


if __name__ == "__main__":
    run_role(main)
