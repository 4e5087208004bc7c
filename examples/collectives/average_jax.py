"""Average JAX arrays. They cannot be changed in place, so the result goes to a numpy array.

python examples/collectives/average_jax.py MASTER
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from planetary.collectives import Communicator, ReduceOp

with Communicator(sys.argv[1]) as comm:
    comm.update_topology(min_world_size=2)
    rank = comm.rank  # noted here: it changes when a peer leaves
    gradient = jax.grad(lambda w: jnp.sum((w - rank) ** 2))(jnp.zeros(4))
    mean = np.empty(gradient.shape, gradient.dtype)
    comm.all_reduce(gradient, out=mean, op=ReduceOp.AVG)
    step = jnp.zeros(4) - 0.5 * mean
    sys.stdout.write(f"rank {rank}: {step}\n")
