"""Collectives that cannot hang: a fault-tolerant all-reduce and shared state, usable without the rest of planetary.

A `Master` orchestrates membership and consensus; each peer has a `Communicator`; bulk data goes round a ring of
peers. Peers may join, leave and die at any time: an operation then completes identically on all peers, or fails on
all with their inputs intact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planetary.lazy_names import lazy_names

if TYPE_CHECKING:
    from planetary.collectives.master.master import Master
    from planetary.collectives.peer.communicator import Communicator
    from planetary.collectives.peer.work import Work
    from planetary.collectives.protocol.errors import (
        AbortedError,
        DisagreementError,
        PeerLostError,
        PendingOperationsError,
        RemovedError,
        StragglerError,
        TooFewPeersError,
    )
    from planetary.collectives.protocol.options import Quantization, QuantizationAlgorithm, ReduceOp, SyncStrategy
    from planetary.collectives.transport.shared_state import SharedState, SyncInfo
    from planetary.collectives.transport.sockets import SocketOptions

__all__ = [
    "AbortedError",
    "Communicator",
    "DisagreementError",
    "Master",
    "PeerLostError",
    "PendingOperationsError",
    "Quantization",
    "QuantizationAlgorithm",
    "ReduceOp",
    "RemovedError",
    "SharedState",
    "SocketOptions",
    "StragglerError",
    "SyncInfo",
    "SyncStrategy",
    "TooFewPeersError",
    "Work",
]

# Workers and gateways of a star use kernels of this package, and start without the rest of it.
_HOMES = {
    "AbortedError": "planetary.collectives.protocol.errors",
    "Communicator": "planetary.collectives.peer.communicator",
    "DisagreementError": "planetary.collectives.protocol.errors",
    "Master": "planetary.collectives.master.master",
    "PeerLostError": "planetary.collectives.protocol.errors",
    "PendingOperationsError": "planetary.collectives.protocol.errors",
    "Quantization": "planetary.collectives.protocol.options",
    "QuantizationAlgorithm": "planetary.collectives.protocol.options",
    "ReduceOp": "planetary.collectives.protocol.options",
    "RemovedError": "planetary.collectives.protocol.errors",
    "SharedState": "planetary.collectives.transport.shared_state",
    "SocketOptions": "planetary.collectives.transport.sockets",
    "StragglerError": "planetary.collectives.protocol.errors",
    "SyncInfo": "planetary.collectives.transport.shared_state",
    "SyncStrategy": "planetary.collectives.protocol.options",
    "TooFewPeersError": "planetary.collectives.protocol.errors",
    "Work": "planetary.collectives.peer.work",
}

__getattr__ = lazy_names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
