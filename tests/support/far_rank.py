"""One of two learner ranks on hosts of their own: `python far_rank.py RANK tcp://HOST:PORT`.

Prints the network interface that it speaks over, and the sum of what both have.
"""

import os
import sys

from learner.ranks import join_ranks, leave_ranks

if __name__ == "__main__":
    rank = int(sys.argv[1])
    ranks = join_ranks(rank, 2, sys.argv[2], timeout_s=60.0, per_node=1)
    print(os.environ["GLOO_SOCKET_IFNAME"], ranks.total(1.0 + rank), flush=True)
    leave_ranks(ranks)
