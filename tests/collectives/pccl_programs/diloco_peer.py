"""An outer loop as users of PCCL write it: newcomers, shared state, a reduction that is tried again, a second one."""

import sys
import time

import numpy as np
import pccl
from pccl import Attribute, Communicator, ReduceOp, SharedState, TensorInfo
from pccl._pccl import (
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)
from python.framework.pccl._pccl import PCCLError

ADDRESS, STEPS = sys.argv[1], int(sys.argv[2])
assert not pccl.cuda.is_available()
assert pccl.__version__


def main() -> None:
    communicator = Communicator(ADDRESS, 0, p2p_connection_pool_size=2)
    communicator.connect(n_attempts=15)
    weights = np.zeros(5000, np.float32)
    momentum = np.zeros(5000, np.float32)
    state = SharedState(
        [
            TensorInfo(
                "weights",
                weights.ctypes.data,
                numel=weights.size,
                dtype=DataType.from_numpy_dtype(weights.dtype),
                device_type=pccl.DeviceType.CPU if hasattr(pccl, "DeviceType") else 0,
                allow_content_inequality=False,
            ),
            TensorInfo.from_numpy(momentum, "momentum"),
        ]
    )
    first = True
    while True:
        if not first and communicator.are_peers_pending():
            communicator.update_topology()
        first = False
        world = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
        if world < 2:
            time.sleep(0.05)
            communicator.update_topology()
            first = True  # who was admitted just now does not ask for newcomers either
            continue
        try:
            communicator.sync_shared_state(state)
        except PCCLError as error:
            print("sync:", error, flush=True)
            continue
        if state.revision >= STEPS:
            break
        delta = np.full(5000, 1.0, np.float32)
        done, world = False, communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
        while not done and world > 1:
            handle = communicator.all_reduce_async(
                delta,
                delta,
                op=ReduceOp.AVG,
                tag=7,
                operand_descriptor=ReduceOperandDescriptor(DataType.FLOAT),
                quantization_options=QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX),
            )
            done, _, info = handle.wait()
            world = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
        if not done:
            continue
        pieces = [np.full(100, float(i), np.float32) for i in range(6)]
        descriptors = [
            ReduceOpDescriptor.from_numpy(
                piece,
                piece,
                ReduceDescriptor(piece.size, ReduceOp.AVG, i, ReduceOperandDescriptor(DataType.FLOAT), None),
            )
            for i, piece in enumerate(pieces)
        ]
        try:
            communicator.all_reduce_multiple_with_retry(descriptors, max_in_flight=3)
        except PCCLError as error:
            print("many:", error, flush=True)
            continue
        weights += delta
        momentum[:100] += pieces[3]
        state.push_revision()
        print("step", state.revision, info.local_world_size, flush=True)
        time.sleep(0.02)
    print("end", float(weights.min()), float(weights.max()), float(momentum.sum()), flush=True)


main()
