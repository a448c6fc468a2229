"""A Ray cluster of several nodes on this machine: `python tests/support/ray_cluster.py 2 1` makes two, with as many
CPUs as the numbers say. The first one is its head.

Prints the cluster's address and the ids of its nodes. A line "kill N" kills node N as a power cut would, "add C" adds
one of C CPUs, and each line is repeated when that is done. The cluster ends with the input. Its files are in
$RAY_TMPDIR.
"""

import os
import sys

# Before the import. A lost node is to be missed after 5 s, not 15: the longest of some tests.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_LOGGER_LEVEL": "error", "RAY_health_check_period_ms": "1000"}

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=int(cpus), include_dashboard=False) for cpus in sys.argv[1:]]
    print(cluster.address, *(node.node_id for node in nodes), flush=True)
    for line in sys.stdin:
        verb, number = line.split()
        if verb == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(number), include_dashboard=False))
        print(line, end="", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
