"""A Ray cluster of several nodes on this machine: `python tests/support/ray_cluster.py 2 1` makes two, with as many
CPUs as the numbers say. The first one is its head.

Prints the cluster's address. A line with the number of a node kills it as a power cut would, and is repeated when it is
gone. The cluster ends with the input. Its files are in $RAY_TMPDIR.
"""

import os
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_LOGGER_LEVEL": "error"}  # before the import

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=int(cpus), include_dashboard=False) for cpus in sys.argv[1:]]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[int(line)], allow_graceful=False)
        print(line, end="", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
