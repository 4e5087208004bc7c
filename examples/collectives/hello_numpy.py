"""Average an array over all peers, however often they come and go.

planetary master --listen 127.0.0.1:48148 --plain-loopback &
python examples/collectives/hello_numpy.py 127.0.0.1:48148 &
python examples/collectives/hello_numpy.py 127.0.0.1:48148
"""

import os
import sys

import numpy as np

from planetary.collectives import Communicator, ReduceOp

with Communicator(sys.argv[1]) as comm:
    comm.update_topology(min_world_size=2)
    rank, world = comm.rank, comm.world_size  # noted here: they change when a peer leaves
    x = np.full(5, float(os.getpid()))
    comm.all_reduce(x, op=ReduceOp.AVG)
    sys.stdout.write(f"rank {rank} of {world}: the mean process id is {x[0]}\n")
