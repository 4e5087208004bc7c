"""A peer in PCCL's names and manners: `Communicator`, and the handle of a reduction under way."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from planetary import collectives as c
from planetary.collectives.reduction.elements import element_type
from planetary.compat.pccl.security import invite_token, restarts, warn_unencrypted
from planetary.compat.pccl.types import (
    BITS,
    OURS,
    Attribute,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    check_pair,
)
from planetary.core.errors import ClosedError, PlanetaryError, TrustError, UserError

log = logging.getLogger(__name__)

_REDIAL_S = 1.0
_WAIT_S = 3600.0  # PCCL waits for ever for the other peers; a bounded wait, as long as a slow outer step may be


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
        """Prepare; `connect` does the work. The invite of a master with TLS is read from `PLANETARY_INVITE`."""
        self._comm = c.Communicator(
            address,
            peer_group,
            connections=max(p2p_connection_pool_size, 1),
            timeout_s=_WAIT_S,
            min_world_size=2,
            token=invite_token(),
            allow_unencrypted=True,
        )
        self._address = address
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
                if not (self._comm.encrypted or self._comm.on_loopback):
                    warn_unencrypted(f"the connection to the master at {self._address}")
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
        with pccl_errors("pcclUpdateTopology", Result.UPDATE_TOPOLOGY_FAILED):
            self._comm.update_topology()

    def are_peers_pending(self) -> bool:
        """Whether newcomers wait; all members of the group call it and get the same answer."""
        self._need("pcclArePeersPending")
        with pccl_errors("pcclArePeersPending", Result.INVALID_USAGE):
            return self._comm.are_peers_pending()

    def optimize_topology(self) -> None:
        """Measure links, and find the best ring; it is used from the next `update_topology` on."""
        self._need("pcclOptimizeTopology")
        if self._comm.world_size < 2:
            raise PCCLError(Result.INVALID_USAGE, "pcclOptimizeTopology", "there is one peer only")
        with pccl_errors("pcclOptimizeTopology", Result.TOPOLOGY_OPTIMIZATION_FAILED):
            self._comm.optimize_topology()

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Make the state equal on all members; updates its revision."""
        self._need("pcclSynchronizeSharedState")
        with pccl_errors("pcclSynchronizeSharedState", Result.INVALID_USAGE):
            info = self._comm.sync_shared_state(
                shared_state.state,
                strategy=c.SyncStrategy[SharedStateSyncStrategy(strategy).name],
                restart=restarts(),
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
        check_pair(send, recv)
        found = element_type(send)
        if operand_descriptor is not None and OURS[operand_descriptor.datatype] != found:
            text = f"operand_descriptor has {operand_descriptor.datatype.name}, the array has {found}"
            raise PCCLError(Result.INVALID_ARGUMENT, "pcclAllReduceAsync", text)
        with pccl_errors("pcclAllReduceAsync", Result.INVALID_ARGUMENT):
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
        """Run all reductions, `max_in_flight` at a time, and those a loss aborts again, until all have succeeded.

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


def _quantization(options: QuantizationOptions | None) -> c.Quantization | None:
    if options is None or options.algorithm == QuantizationAlgorithm.NONE:
        return None
    bits = BITS.get(options.quantized_datatype)
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
def pccl_errors(function: str, otherwise: Result) -> Any:
    """Turn planetary's exceptions into PCCL's."""
    try:
        yield
    except PlanetaryError as error:
        raise PCCLError(_result_of(error, otherwise), function, str(error)) from error
