"""Data-parallel steps, imported as PCCL's own tests do."""

import sys

import numpy as np
import pccl
from pccl._pccl import PCCLError, ReduceOp
from python.framework.pccl._pccl import ReduceOpDescriptor

communicator = pccl.Communicator(sys.argv[1])
communicator.connect()
while communicator.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 2:
    communicator.update_topology()
weights = np.zeros(64, np.float32)
state = pccl.SharedState(
    [
        pccl.TensorInfo(
            "weights",
            weights.ctypes.data,
            numel=64,
            dtype=pccl.DataType.FLOAT,
            device_type=pccl.DeviceType.CPU,
            allow_content_inequality=False,
        )
    ]
)
for _ in range(5):
    communicator.sync_shared_state(state)
    gradient = np.full(64, 2.0, np.float32)
    while True:
        success, status, info = communicator.all_reduce_async(gradient, gradient, op=ReduceOp.SUM).wait()
        if success:
            break
        assert status == pccl.Result.RANK_CONNECTION_LOST
    weights -= gradient / info.local_world_size
    state.push_revision()
assert not pccl.cuda.is_available()
assert ReduceOpDescriptor is pccl.ReduceOpDescriptor
assert PCCLError is pccl.PCCLError
print("end", weights[0], flush=True)
