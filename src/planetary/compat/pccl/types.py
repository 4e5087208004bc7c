"""PCCL's enumerations and descriptors; `pccl` exports them with the functions that take them."""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from planetary import collectives as c
from planetary.collectives.reduction.elements import TYPES


class Result(enum.IntEnum):
    """Status of a finished call."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


class PCCLError(Exception):
    """A call failed: `result` is the status, the text the reason."""

    def __init__(self, result: Result, func_name: str, reason: str = "") -> None:
        self.result = result
        super().__init__(f"{func_name} failed with error: {result.name}: {reason or result.name}")


class ReduceOp(enum.IntEnum):
    """How elements are combined."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class Attribute(enum.IntEnum):
    """Attributes that `get_attribute` returns."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    PEER_GROUP_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class SharedStateSyncStrategy(enum.IntEnum):
    """Which part a peer takes in a synchronisation."""

    ENFORCE_POPULAR = 0
    RECEIVE_ONLY = 1
    SEND_ONLY = 2


class QuantizationAlgorithm(enum.IntEnum):
    """How numbers are quantised for the wire."""

    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2


class DistributionHint(enum.IntEnum):
    """Accepted and not needed, as in PCCL."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class DeviceType(enum.IntEnum):
    """Where an array is; only CPU here."""

    CPU = 0
    CUDA = 1


class DataType(enum.IntEnum):
    """Element types."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    UINT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11

    @classmethod
    def from_numpy_dtype(cls, dtype: Any) -> DataType:
        """Return the member for a numpy type. Raises `ValueError`."""
        name = np.dtype(dtype).name
        try:
            return cls[_NUMPY_NAMES[name]]
        except KeyError:
            raise ValueError(f"unsupported numpy dtype {name}") from None

    @classmethod
    def from_torch_dtype(cls, dtype: Any) -> DataType:
        """Return the member for a torch type. Raises `ValueError`."""
        return cls.from_numpy_dtype(str(dtype).removeprefix("torch.")) if "bfloat16" not in str(dtype) else cls.BFLOAT16

    def to_numpy_dtype(self) -> np.dtype:
        """Return the numpy type that holds it (raw bits for bfloat16)."""
        return TYPES[OURS[self]]

    def to_torch_dtype(self) -> Any:
        import torch  # pyright: ignore[reportMissingImports] - optional

        names = {DataType.FLOAT: "float32", DataType.DOUBLE: "float64", DataType.BFLOAT16: "bfloat16"}
        return getattr(torch, names.get(self, self.name.lower()))


OURS = {
    DataType.UINT8: "ui8",
    DataType.INT8: "i8",
    DataType.INT16: "i16",
    DataType.UINT16: "ui16",
    DataType.UINT32: "ui32",
    DataType.INT32: "i32",
    DataType.UINT64: "ui64",
    DataType.INT64: "i64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT: "f32",
    DataType.DOUBLE: "f64",
}
_NUMPY_NAMES = {member.name.lower(): member.name for member in DataType} | {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "bfloat16": "BFLOAT16",
}
BITS = {DataType.UINT8: 8, DataType.INT8: 8, DataType.UINT16: 16, DataType.INT16: 16}


@dataclass
class QuantizationOptions:
    """How to quantise; 8 and 16 bits are supported."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX


@dataclass
class ReduceOperandDescriptor:
    """The element type of an operand."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass
class ReduceDescriptor:
    """One reduction."""

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions | None = None


@dataclass
class ReduceOpDescriptor:
    """One reduction and its arrays."""

    sendbuf: Any
    recvbuf: Any
    descriptor: ReduceDescriptor

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe two CPU tensors of one type and size."""
        check_pair(send, recv)
        return cls(send, recv, reduce_descriptor)

    @classmethod
    def from_numpy(cls, send: np.ndarray, recv: np.ndarray, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe two arrays of one type and size."""
        check_pair(send, recv)
        return cls(send, recv, reduce_descriptor)


@dataclass(frozen=True)
class ReduceInfo:
    """Counters of a reduction; bytes are payload."""

    local_world_size: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0


@dataclass(frozen=True)
class SharedStateSyncInfo:
    """Traffic of a synchronisation; bytes are payload."""

    tx_bytes: int
    rx_bytes: int


class TensorInfo:
    """One array of the shared state."""

    def __init__(
        self,
        name: str,
        data_ptr: Any,
        *,
        numel: int | None = None,
        dtype: DataType | None = None,
        device_type: DeviceType = DeviceType.CPU,
        allow_content_inequality: bool = False,
    ) -> None:
        """Describe an array, or with `numel` and `dtype` the memory at an address, which the caller keeps alive.

        Raises:
            ValueError: a null pointer, or an address that is not the CPU's.
        """
        if isinstance(data_ptr, int):
            if device_type != DeviceType.CPU:
                raise ValueError(
                    f"shared state {name!r}: an address must be of CPU memory, found {DeviceType(device_type).name}; "
                    "give the tensor itself (TensorInfo.from_torch)"
                )
            data_ptr = _memory_at(name, data_ptr, numel, dtype)
        self.name, self.array = name, data_ptr
        self.allow_content_inequality = allow_content_inequality

    @classmethod
    def from_torch(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Describe a contiguous tensor, on the CPU or a device; it is kept alive."""
        assert tensor.is_contiguous(), "Input tensor must be contiguous"
        return cls(name, tensor, allow_content_inequality=allow_content_inequality)

    @classmethod
    def from_numpy(cls, array: np.ndarray, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Describe a contiguous array; it is kept alive."""
        assert array.flags.c_contiguous, "Input array must be contiguous"
        return cls(name, array, allow_content_inequality=allow_content_inequality)


def _memory_at(name: str, address: int, numel: int | None, dtype: DataType | None) -> np.ndarray:
    if not address:
        raise ValueError(f"shared state {name!r}: data_ptr must not be null")
    if numel is None or dtype is None:
        raise ValueError(f"shared state {name!r}: an address needs numel= and dtype=")
    kind = dtype.to_numpy_dtype()
    memory = (ctypes.c_char * (numel * kind.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), kind)


class SharedState:
    """Arrays that all peers hold alike, and their revision.

    Attributes:
        state: the wrapped `collectives.SharedState`.
    """

    def __init__(self, tensor_infos: list[TensorInfo]) -> None:
        assert tensor_infos, "a shared state needs at least one tensor"
        self.state = c.SharedState(
            {info.name: info.array for info in tensor_infos},
            allow_content_inequality=[info.name for info in tensor_infos if info.allow_content_inequality],
        )

    @property
    def revision(self) -> int:
        """Counts the steps of the state."""
        return self.state.revision

    @revision.setter
    def revision(self, value: int) -> None:
        self.state.revision = value

    def push_revision(self) -> None:
        """Count one step."""
        self.state.push_revision()


def check_pair(send: Any, recv: Any) -> None:
    """Raise PCCL's error for two operands that do not fit."""
    if isinstance(send, np.ndarray) != isinstance(recv, np.ndarray):
        raise ValueError("send and recv must both be torch tensors or both be numpy arrays")
    assert send.dtype == recv.dtype, f"dtypes differ: {send.dtype} and {recv.dtype}"
    assert tuple(send.shape) == tuple(recv.shape), f"shapes differ: {send.shape} and {recv.shape}"
