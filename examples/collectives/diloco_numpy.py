"""DiLoCo, and its asynchronous form: the reduction of a round travels while the next round is computed.

    python examples/collectives/diloco_numpy.py MASTER [--overlap] [ROUNDS]

The model is a least-squares problem; inner steps are plain gradient descent on local data, the outer step is Nesterov
momentum on the mean pseudo-gradient.
"""

import sys

import numpy as np

from planetary.collectives import AbortedError, Communicator, Quantization, ReduceOp, SharedState

overlap = "--overlap" in sys.argv
numbers = [int(a) for a in sys.argv[2:] if a.isdigit()]
ROUNDS, INNER_STEPS = (numbers[0] if numbers else 20), 10
truth = np.linspace(-1, 1, 16, dtype=np.float32)
theta = np.zeros(16, np.float32)
velocity = np.zeros(16, np.float32)
state = SharedState({"theta": theta, "velocity": velocity})


def train(start, rng):
    """One round of inner steps; returns the pseudo-gradient, start minus end."""
    local = start.copy()
    for _ in range(INNER_STEPS):
        x = rng.normal(size=(32, 16)).astype(np.float32)
        local -= 0.05 * (x.T @ (x @ (local - truth))) / 32
    return start - local


def outer_step(mean):
    velocity[...] = np.float32(0.5) * velocity + mean
    theta[...] = theta - np.float32(0.7) * (mean + np.float32(0.5) * velocity)


def land(comm, flying):
    """Wait for a reduction under way, and take the outer step with what it gives."""
    mean, work = flying
    try:
        work.wait()
    except AbortedError:
        comm.all_reduce(mean, op=ReduceOp.AVG)  # intact: reduce it again with those that are left
    outer_step(mean)


with Communicator(sys.argv[1], name=f"diloco-{sys.argv[-1]}") as comm:
    comm.update_topology(min_world_size=2)
    rank = comm.rank  # noted here: it changes when a peer leaves
    rng = np.random.default_rng(rank)
    flying = None  # the array of the last round, and its reduction
    newcomer = True
    while state.revision < ROUNDS:
        if not newcomer and comm.are_peers_pending():
            # The state may only change hands when nothing is under way: first land what is flying.
            if flying is not None:
                land(comm, flying)
                flying = None
            comm.update_topology()
        newcomer = False
        if flying is None:
            comm.sync_shared_state(state)
        delta = train(theta, rng)
        if flying is not None:
            land(comm, flying)  # one round late
            flying = None
        if overlap:
            flying = (delta, comm.all_reduce_async(delta, op=ReduceOp.AVG, quantization=Quantization(8)))
        else:
            comm.all_reduce(delta, op=ReduceOp.AVG, quantization=Quantization(8))
            outer_step(delta)
        state.push_revision()
    if flying is not None:
        land(comm, flying)
    sys.stdout.write(f"rank {rank}: distance {np.abs(theta - truth).max():.4f}, theta[0] {theta[0]!r}\n")
