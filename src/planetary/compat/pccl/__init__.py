"""PCCL's Python names (`import planetary.compat.pccl as pccl`) over `planetary.collectives`.

A training script for the Prime Collective Communications Library runs with this import changed, or with none changed:
`python -m planetary.compat.pccl script.py` (see `planetary.compat.pccl.alias`). Where PCCL's own behaviour is a fault
(see `docs/collectives.md`), this module does as its users expected: topology votes are per peer group, a disagreement
on count, type or operation is an error on every peer, and host names and IPv6 are understood.
"""

from __future__ import annotations

import sys

from planetary.compat.pccl.alias import install
from planetary.compat.pccl.communicator import AsyncReduceHandle, Communicator
from planetary.compat.pccl.master import MasterNode
from planetary.compat.pccl.types import (
    Attribute,
    DataType,
    DeviceType,
    DistributionHint,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
)

__version__ = "1.0.0"
"""The version of PCCL whose Python interface this is."""


class cuda:
    """PCCL's namespace for CUDA: tensors of PyTorch on a GPU are taken wherever PyTorch sees one."""

    @staticmethod
    def is_available() -> bool:
        """Whether PyTorch is in use in this process and sees a GPU."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_available())


__all__ = [
    "AsyncReduceHandle",
    "Attribute",
    "Communicator",
    "DataType",
    "DeviceType",
    "DistributionHint",
    "MasterNode",
    "PCCLError",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceInfo",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "TensorInfo",
    "cuda",
    "install",
]
