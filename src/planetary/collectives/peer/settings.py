"""Checked settings of a communicator."""

from __future__ import annotations

from dataclasses import dataclass

from planetary.collectives.transport.neighbours import Reach
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.sockets import SocketOptions
from planetary.net.client import Trust


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Checked arguments of a `Communicator`, whose docstring explains them.

    Attributes:
        master: host and port.
        advertise: host and port for other peers; "" and 0 for those the master sees.
        reach: settings of the connection to the successor.
    """

    master: tuple[str, int]
    group: int
    name: str
    trust: Trust
    allow_unencrypted: bool
    data_host: str
    data_port: int
    advertise: tuple[str, int]
    timeout_s: float
    stall_s: float
    grace_s: float
    min_world: int
    sockets: SocketOptions
    reach: Reach
    ports: Ports
