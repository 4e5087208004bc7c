"""Choice of the transport to the next peer of the ring, within a machine and between machines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from planetary.collectives.protocol.messages import PeerInfo, RingChanged
from planetary.collectives.reduction import quantise
from planetary.collectives.reduction.operation import PIECE_LARGEST
from planetary.collectives.transport.links import Link
from planetary.collectives.transport.piece_frames import Introduction
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.shared_memory import FOLDER
from planetary.collectives.transport.sockets import SocketOptions, near_options

STREAMS = 2  # connections to a peer by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """Settings of a communicator's connections.

    Attributes:
        connections: number of connections to the successor; None: `STREAMS`, or 1 within a machine without processors
            for more.
        direct: whether a peer on the same machine may be given pieces without a socket.
        piece_bytes: size of a piece; None: depends on the tensor.
    """

    connections: int | None
    direct: bool
    piece_bytes: int | None
    sockets: SocketOptions
    stall_s: float
    ports: Ports

    def link(
        self,
        topology: RingChanged,
        following: PeerInfo,
        introduction: Introduction,
        *,
        tls: bool,
        on_fault: Callable[[str, str], None],
    ) -> Link:
        """Return the way to the peer that follows in the ring."""
        here = self.ports.machine()
        near = following.machine == here
        streams = STREAMS
        if near:
            threads = 2 * STREAMS * sum(info.machine == here for info in topology.ring)  # senders and receivers
            streams = STREAMS if (os.cpu_count() or 1) >= threads else 1
        slot_bytes = max(self.piece_bytes or PIECE_LARGEST, quantise.BLOCK * 8)
        return Link(
            following,
            introduction,
            connections=self.connections or streams,
            options=near_options(self.sockets) if near else self.sockets,
            tls=tls,
            stall_s=self.stall_s,
            slot_bytes=slot_bytes if near and self.direct and FOLDER.is_dir() else 0,
            on_fault=on_fault,
            ports=self.ports,
        )
