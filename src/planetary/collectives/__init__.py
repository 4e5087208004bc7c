"""Collectives that cannot hang: a fault-tolerant all-reduce and shared state, usable without the rest of planetary.

A `Master` orchestrates membership and consensus; each peer has a `Communicator`; bulk data goes round a ring of
peers. Peers may join, leave and die at any time: an operation then completes identically on all peers, or fails on
all with their inputs intact.
"""

from planetary.collectives.master.master import Master
from planetary.collectives.peer.communicator import Communicator
from planetary.collectives.peer.work import Work
from planetary.collectives.protocol.collective_errors import (
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
