"""PCCL's Python names (`import planetary.compat.pccl as pccl`) over `planetary.collectives`.

A training script for the Prime Collective Communications Library runs with this import changed. Where PCCL's own
behaviour is a fault (see `docs/collectives.md`), this is what its users expected instead: topology votes are per peer
group, a disagreement on count, type or operation is an error on every peer, and host names and IPv6 are understood.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planetary import collectives as c
from planetary.collectives.elements import TYPES, Flat
from planetary.core.errors import ClosedError, PlanetaryError, TrustError, UserError

log = logging.getLogger(__name__)

_REDIAL_S = 1.0
_WAIT_S = 3600.0  # PCCL waits for ever for the other peers; a bounded wait, as long as a slow outer step may be


class Result(enum.IntEnum):
    """What a call came to."""

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
    """A call failed; `result` says how, and the text why."""

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
    """What `get_attribute` can tell."""

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
        return TYPES[_OURS[self]]

    def to_torch_dtype(self) -> Any:
        """Return the torch type."""
        import torch  # pyright: ignore[reportMissingImports] - optional

        names = {DataType.FLOAT: "float32", DataType.DOUBLE: "float64", DataType.BFLOAT16: "bfloat16"}
        return getattr(torch, names.get(self, self.name.lower()))


_OURS = {
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
_BITS = {DataType.UINT8: 8, DataType.INT8: 8, DataType.UINT16: 16, DataType.INT16: 16}


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
        _check_pair(send, recv)
        return cls(send, recv, reduce_descriptor)

    @classmethod
    def from_numpy(cls, send: np.ndarray, recv: np.ndarray, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe two arrays of one type and size."""
        _check_pair(send, recv)
        return cls(send, recv, reduce_descriptor)


@dataclass(frozen=True)
class ReduceInfo:
    """What a reduction did; bytes are payload."""

    local_world_size: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0


@dataclass(frozen=True)
class SharedStateSyncInfo:
    """What a synchronisation moved; bytes are payload."""

    tx_bytes: int
    rx_bytes: int


@dataclass
class TensorInfo:
    """One array of the shared state."""

    name: str
    array: Any
    allow_content_inequality: bool = field(default=False, kw_only=True)

    @classmethod
    def from_torch(cls, tensor: Any, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Describe a contiguous CPU tensor; it is kept alive."""
        assert tensor.is_contiguous(), "Input tensor must be contiguous"
        return cls(name, tensor, allow_content_inequality=allow_content_inequality)

    @classmethod
    def from_numpy(cls, array: np.ndarray, name: str, *, allow_content_inequality: bool = False) -> TensorInfo:
        """Describe a contiguous array; it is kept alive."""
        assert array.flags.c_contiguous, "Input array must be contiguous"
        return cls(name, array, allow_content_inequality=allow_content_inequality)


class SharedState:
    """Arrays that all peers hold alike, and their revision."""

    def __init__(self, tensor_infos: list[TensorInfo]) -> None:
        assert tensor_infos, "a shared state needs at least one tensor"
        self._state = c.SharedState(
            {info.name: info.array for info in tensor_infos},
            allow_content_inequality=[info.name for info in tensor_infos if info.allow_content_inequality],
        )

    @property
    def revision(self) -> int:
        """Counts the steps of the state."""
        return self._state.revision

    @revision.setter
    def revision(self, value: int) -> None:
        self._state.revision = value

    def push_revision(self) -> None:
        """Count one step."""
        self._state.push_revision()


class AsyncReduceHandle:
    """A reduction under way."""

    def __init__(self, work: c.Work, owner: Communicator) -> None:
        self._work, self._owner = work, owner
        self._result: tuple[bool, int, ReduceInfo] | None = None

    def wait(self) -> tuple[bool, int, ReduceInfo]:
        """Return (is_success, status, info); never raises. May be called again."""
        if self._result is None:
            try:
                self._work.wait()
            except PlanetaryError as error:
                status = _result_of(error, Result.RANK_CONNECTION_LOST)
                log.warning("all_reduce: %s", error)
                self._result = (False, int(status), ReduceInfo(self._owner.world))
            else:
                info = ReduceInfo(self._owner.world, self._work.sent_bytes, self._work.received_bytes)
                self._result = (True, 0, info)
        return self._result


class Communicator:
    """One peer."""

    def __init__(self, address: str, peer_group: int = 0, p2p_connection_pool_size: int = 0) -> None:
        self._comm = c.Communicator(
            address,
            peer_group,
            connections=max(p2p_connection_pool_size, 1),
            timeout_s=_WAIT_S,
            min_world_size=2,
        )
        self._connected = False

    @property
    def world(self) -> int:
        """Members of the own group."""
        return self._comm.world_size

    def connect(self, n_attempts: int = 5) -> None:
        """Connect, and wait until the running peers admit this one with `update_topology`.

        Tries `n_attempts` times, a second apart; then raises `Exception`, as PCCL does.
        """
        for attempt in range(n_attempts):
            try:
                if self._connected:
                    raise UserError("the communicator is connected already")
                self._comm.connect(10.0)
                self._comm.update_topology(timeout_s=_WAIT_S)
                self._connected = True
                return
            except PlanetaryError as error:
                log.error("connecting to the master, attempt %d of %d: %s", attempt + 1, n_attempts, error)
                if not self._connected:
                    self._comm.close()
                if isinstance(error, TrustError):
                    break
                if attempt + 1 < n_attempts:
                    time.sleep(_REDIAL_S)
        raise Exception("Failed to connect to the master node")

    def get_attribute(self, attribute: Attribute) -> int:
        """Return a number about the groups, as of the last vote or change."""
        self._need("pcclGetAttribute")
        return {
            Attribute.GLOBAL_WORLD_SIZE: self._comm.global_world_size,
            Attribute.LOCAL_WORLD_SIZE: self._comm.world_size,
            Attribute.NUM_DISTINCT_PEER_GROUPS: self._comm.group_count,
            Attribute.LARGEST_PEER_GROUP_WORLD_SIZE: self._comm.largest_group_size,
        }[Attribute(attribute)]

    def update_topology(self) -> None:
        """Admit the newcomers that wait; all members of the group call it."""
        self._need("pcclUpdateTopology")
        with _errors("pcclUpdateTopology", Result.UPDATE_TOPOLOGY_FAILED):
            self._comm.update_topology()

    def are_peers_pending(self) -> bool:
        """Whether newcomers wait; all members of the group call it and get the same answer."""
        self._need("pcclArePeersPending")
        with _errors("pcclArePeersPending", Result.INVALID_USAGE):
            return self._comm.are_peers_pending()

    def optimize_topology(self) -> None:
        """Measure links, and find the best ring; it is used from the next `update_topology` on."""
        self._need("pcclOptimizeTopology")
        if self._comm.world_size < 2:
            raise PCCLError(Result.INVALID_USAGE, "pcclOptimizeTopology", "there is one peer only")
        with _errors("pcclOptimizeTopology", Result.TOPOLOGY_OPTIMIZATION_FAILED):
            self._comm.optimize_topology()

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Make the state equal on all members; updates its revision."""
        self._need("pcclSynchronizeSharedState")
        with _errors("pcclSynchronizeSharedState", Result.INVALID_USAGE):
            info = self._comm.sync_shared_state(
                shared_state._state, strategy=c.SyncStrategy[SharedStateSyncStrategy(strategy).name]
            )
        return SharedStateSyncInfo(info.tx_bytes, info.rx_bytes)

    def all_reduce(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> ReduceInfo:
        """Reduce `send` into `recv` (which may be `send`). Raises `PCCLError`; nothing is tried again."""
        handle = self.all_reduce_async(
            send,
            recv,
            op=op,
            tag=tag,
            operand_descriptor=operand_descriptor,
            quantization_options=quantization_options,
        )
        success, status, info = handle.wait()
        if not success:
            raise PCCLError(Result(status), "pcclAllReduce")
        return info

    def all_reduce_async(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> AsyncReduceHandle:
        """Begin a reduction; the arrays are kept alive until it is waited for."""
        self._need("pcclAllReduceAsync")
        _check_pair(send, recv)
        found = Flat(send, writable=False).dtype
        if operand_descriptor is not None and _OURS[operand_descriptor.datatype] != found:
            text = f"operand_descriptor says {operand_descriptor.datatype.name}, the array has {found}"
            raise PCCLError(Result.INVALID_ARGUMENT, "pcclAllReduceAsync", text)
        with _errors("pcclAllReduceAsync", Result.INVALID_ARGUMENT):
            work = self._comm.all_reduce_async(
                send,
                out=None if send is recv else recv,
                op=c.ReduceOp[ReduceOp(op).name],
                tag=tag,
                quantization=_quantization(quantization_options),
                timeout_s=_WAIT_S,
            )
        return AsyncReduceHandle(work, self)

    def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4
    ) -> ReduceInfo:
        """Run all reductions, `max_in_flight` at a time, and those that a loss aborts again, until all have succeeded.

        Raises `PCCLError` with TOO_FEW_PEERS when this peer is left alone.
        """
        if not descriptors or max_in_flight < 1:
            raise PCCLError(Result.INVALID_ARGUMENT, "pcclAllReduceMultipleWithRetry")
        left = list(range(len(descriptors)))
        running: dict[int, AsyncReduceHandle] = {}
        sent = received = 0
        try:
            while left:
                for index in left[:max_in_flight]:
                    if index not in running:
                        item = descriptors[index]
                        running[index] = self.all_reduce_async(
                            item.sendbuf,
                            item.recvbuf,
                            op=item.descriptor.op,
                            tag=item.descriptor.tag,
                            operand_descriptor=item.descriptor.operand_descriptor,
                            quantization_options=item.descriptor.quantization_options,
                        )
                success, status, info = running.pop(left[0]).wait()
                if success:
                    left.pop(0)
                    sent, received = sent + info.tx_bytes, received + info.rx_bytes
                elif status != Result.RANK_CONNECTION_LOST or not self._comm.connected:
                    raise PCCLError(Result(status), "pcclAllReduceMultipleWithRetry")
        finally:
            for handle in running.values():
                handle.wait()
        return ReduceInfo(self._comm.world_size, sent, received)

    def _need(self, function: str) -> None:
        if not self._connected:
            raise PCCLError(Result.INVALID_USAGE, function, "call connect first")

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._comm.close()


class MasterNode:
    """The master."""

    def __init__(self, listen_address: str) -> None:
        self._master = c.Master(listen_address)

    @property
    def address(self) -> str:
        """The address that is listened on, with the real port."""
        return self._master.address

    def run(self) -> None:
        """Serve in the background. Raises `PCCLError` when the address cannot be listened on."""
        with _errors("pcclRunMaster", Result.INVALID_USAGE):
            self._master.start()

    def interrupt(self) -> None:
        """Stop."""
        self._master.stop()


class cuda:
    """What PCCL says of CUDA."""

    @staticmethod
    def is_available() -> bool:
        """Arrays must be in CPU memory."""
        return False


def _check_pair(send: Any, recv: Any) -> None:
    if isinstance(send, np.ndarray) != isinstance(recv, np.ndarray):
        raise ValueError("send and recv must both be torch tensors or both be numpy arrays")
    assert send.dtype == recv.dtype, f"dtypes differ: {send.dtype} and {recv.dtype}"
    assert tuple(send.shape) == tuple(recv.shape), f"shapes differ: {send.shape} and {recv.shape}"


def _quantization(options: QuantizationOptions | None) -> c.Quantization | None:
    if options is None or options.algorithm == QuantizationAlgorithm.NONE:
        return None
    bits = _BITS.get(options.quantized_datatype)
    if bits is None:
        raise UserError(f"quantization to {options.quantized_datatype.name}: 8 and 16 bits are supported")
    return c.Quantization(bits, c.QuantizationAlgorithm[QuantizationAlgorithm(options.algorithm).name])


def _result_of(error: PlanetaryError, otherwise: Result) -> Result:
    match error:
        case c.TooFewPeersError():
            return Result.TOO_FEW_PEERS
        case c.DisagreementError():
            return Result.INVALID_ARGUMENT
        case c.PeerLostError() | c.AbortedError():
            return Result.RANK_CONNECTION_LOST if otherwise is Result.INVALID_ARGUMENT else otherwise
        case ClosedError():
            return Result.INVALID_USAGE
        case c.PendingOperationsError():
            return Result.PENDING_ASYNC_OPS
        case _:
            return otherwise


@contextlib.contextmanager
def _errors(function: str, otherwise: Result) -> Any:
    """Turn planetary's exceptions into PCCL's."""
    try:
        yield
    except PlanetaryError as error:
        raise PCCLError(_result_of(error, otherwise), function, str(error)) from error


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
]
