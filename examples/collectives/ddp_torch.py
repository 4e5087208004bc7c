"""Data-parallel training of a PyTorch model that survives joins and deaths.

python examples/collectives/ddp_torch.py MASTER [STEPS]
"""

import sys

import torch

from planetary.collectives import Communicator, ReduceOp, SharedState

STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 50

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for parameter in model.parameters():  # momentum is part of the state that all must share
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
momentum = {f"momentum {i}": s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}
state = SharedState({**dict(model.state_dict()), **momentum})

with Communicator(sys.argv[1]) as comm:
    comm.update_topology(min_world_size=2)
    rank = comm.rank  # noted here: it changes when a peer leaves
    data = torch.Generator().manual_seed(rank)
    newcomer = True
    while state.revision < STEPS:
        # All peers get the same answer, so all of them vote or none does. A newcomer's vote was its admission.
        if not newcomer and comm.are_peers_pending():
            comm.update_topology()
        newcomer = False
        comm.sync_shared_state(state)  # a newcomer takes the state of the others; nothing travels otherwise

        inputs = torch.randn(64, 8, generator=data)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        comm.all_reduce_many(gradients, op=ReduceOp.AVG)
        optimizer.step()
        state.push_revision()
    sys.stdout.write(f"rank {rank}: loss {loss.item():.4f} at step {state.revision}\n")
