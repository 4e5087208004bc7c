"""A script in PCCL's names and manners."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from real_ring import together

from planetary.compat import pccl
from planetary.compat.pccl import (
    Attribute,
    Communicator,
    DataType,
    MasterNode,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    TensorInfo,
)


def test_a_training_script() -> None:
    master = MasterNode(listen_address="127.0.0.1:0")
    master.run()
    steps = 4

    def script(i: int) -> np.ndarray:
        communicator = Communicator(master.address, 0, p2p_connection_pool_size=2)
        communicator.connect(n_attempts=15)
        weights = np.zeros(100, np.float32)
        state = SharedState([TensorInfo.from_numpy(weights, "weights")])
        first = True
        while state.revision < steps:
            # PCCL's idiom: connecting was a newcomer's first vote.
            if not first and communicator.are_peers_pending():
                communicator.update_topology()
            while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
                communicator.update_topology()
            first = False
            communicator.sync_shared_state(state)
            grad = np.full(100, 1.0 + state.revision, np.float32)
            while True:
                handle = communicator.all_reduce_async(grad, grad, op=ReduceOp.AVG, tag=3)
                success, status, info = handle.wait()
                if success:
                    assert (status, info.local_world_size) == (0, 2)
                    assert info.tx_bytes == info.rx_bytes == 400
                    break
            weights -= grad
            state.push_revision()
        recv = np.zeros(1000, np.float32)
        send = np.linspace(0, 1, 1000, dtype=np.float32)
        options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
        operand = ReduceOperandDescriptor(DataType.FLOAT)
        communicator.all_reduce(send, recv, op=ReduceOp.SUM, operand_descriptor=operand, quantization_options=options)
        np.testing.assert_allclose(recv, 2 * send, atol=0.02)
        many = [np.ones(10, np.float32) for _ in range(5)]
        communicator.all_reduce_multiple_with_retry(
            [
                ReduceOpDescriptor.from_numpy(a, a, ReduceDescriptor(10, ReduceOp.SUM, tag, operand, None))
                for tag, a in enumerate(many)
            ],
            max_in_flight=2,
        )
        assert all((a == 2).all() for a in many)
        return weights

    results = together(script, 2)
    np.testing.assert_array_equal(results[0], results[1])
    assert results[0][0] == -(1 + 2 + 3 + 4)
    master.interrupt()


def test_errors_are_pccls() -> None:
    comm = Communicator("127.0.0.1:9")
    with pytest.raises(PCCLError, match="INVALID_USAGE") as caught:
        comm.update_topology()
    assert caught.value.result is Result.INVALID_USAGE
    with pytest.raises(Exception, match="Failed to connect to the master node"):
        comm.connect(n_attempts=1)
    master = MasterNode("127.0.0.1:0")
    master.run()
    alone = Communicator(master.address)
    alone.connect()
    x = np.ones(3, np.float32)
    with pytest.raises(PCCLError) as caught:
        alone.all_reduce(x, x, op=ReduceOp.SUM)
    assert caught.value.result is Result.TOO_FEW_PEERS
    with pytest.raises(ValueError, match="both"):
        alone.all_reduce(x, [1], op=ReduceOp.SUM)
    with pytest.raises(AssertionError):
        alone.all_reduce(x, np.ones(3), op=ReduceOp.SUM)
    with pytest.raises(Exception, match="Failed to connect"):
        alone.connect(n_attempts=1)
    assert alone.are_peers_pending() is False
    del alone
    gc.collect()
    master.interrupt()


def test_every_name_of_pccl_is_there() -> None:
    for name in pccl.__all__:
        assert hasattr(pccl, name)
    assert DataType.from_numpy_dtype(np.int16).to_numpy_dtype() == np.int16
    assert [int(op) for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN)] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert not pccl.cuda.is_available()
