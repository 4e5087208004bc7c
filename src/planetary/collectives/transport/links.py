"""The way to one other peer: a pool of connections; and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planetary.collectives.protocol.messages import PeerInfo
from planetary.collectives.reduction.operation import BufferedOperation, OutgoingPiece
from planetary.collectives.transport.lanes import CONNECT_S, Lane, Route, open_connection
from planetary.collectives.transport.piece_frames import Introduction, ProbeRequest
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.sockets import DataConnection, SocketOptions

_FILLER = bytes(1 << 20)


def next_lane(waiting: Sequence[int], turn: int) -> int:
    """Return which connection gets a piece: one with the fewest before it, of those the first from `turn` on."""
    return min(range(len(waiting)), key=lambda lane: (waiting[lane], (lane - turn) % len(waiting)))


class Link:
    """Sends pieces to the successor in the ring over several connections.

    Each piece goes to the connection with the fewest pieces before it, in turn among equal ones: so one large tensor
    uses all of them, and a slow one holds up few pieces.
    """

    def __init__(
        self,
        to: PeerInfo,
        introduction: Introduction,
        *,
        connections: int,
        options: SocketOptions,
        tls: bool,
        stall_s: float,
        slot_bytes: int,
        on_fault: Callable[[str, str], None],
        ports: Ports,
    ) -> None:
        """Connections are made when the first piece is sent. `on_fault(peer, reason)` is called from a thread.

        `slot_bytes`: size of a slot of shared memory for a peer on the same machine, which may also read this
        process's memory; 0 for neither.
        """
        self.to = to
        self._lock = ports.threads.lock()
        self._turn = 0
        way = Route(
            to=to,
            introduction=introduction,
            options=options,
            tls=tls,
            stall_s=stall_s,
            lends=slot_bytes > 0,
            slot_bytes=slot_bytes,
            on_fault=on_fault,
            ports=ports,
        )
        self.lanes = [Lane(way, f"planetary ring send {number} to {to.name}") for number in range(connections)]

    def send(self, seq: int, operation: BufferedOperation, outgoing: OutgoingPiece) -> None:
        """Send a piece unless the operation is over by then. Never blocks."""
        with self._lock:
            index = next_lane([lane.waiting for lane in self.lanes], self._turn)
            self._turn = index + 1
            lane = self.lanes[index]
            lane.given += 1
        lane.put(seq, operation, outgoing)

    def close(self) -> None:
        """Close all connections; queued pieces are dropped, and lent memory is revoked."""
        for lane in self.lanes:
            lane.close()


def measure(
    to: PeerInfo, introduction: Introduction, options: SocketOptions, ports: Ports, *, tls: bool, seconds: float
) -> tuple[float, float]:
    """Return bytes per second and seconds of latency to a peer, measured for about `seconds`.

    Raises `PeerError` when it cannot be reached or does not answer.
    """
    connection, now = open_connection(to, introduction, options, ports, tls=tls), ports.clock.monotonic
    try:
        trips = [_transfer(connection, 0, now) for _ in range(3)]
        latency = min(trips) / 2
        length, begun, speed = 256 << 10, now(), 0.0
        while True:
            spent = _transfer(connection, length, now)
            moving = max(spent - min(trips), 1e-6)  # without the trip, which is latency, not speed
            speed = max(speed, length / moving)  # disturbances only ever slow down
            left = seconds - (now() - begun)
            if moving > seconds / 4 or left < spent * 2 or length >= 64 << 20:
                return speed, latency
            length *= 2
    finally:
        connection.close()


def _transfer(connection: DataConnection, length: int, now: Callable[[], float]) -> float:
    begun = now()
    connection.write_block(msgspec.json.encode(ProbeRequest(length)), CONNECT_S)
    left = length
    while left:
        part = memoryview(_FILLER)[: min(left, len(_FILLER))]
        connection.write(CONNECT_S, part)
        left -= len(part)
    connection.read_block(16, CONNECT_S)
    return now() - begun
