"""The bulk connections of a peer: listener, and the link to the successor in the ring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from planetary.collectives.peer.settings import PeerSettings
from planetary.collectives.protocol import messages as m
from planetary.collectives.reduction.buffers import BufferPool
from planetary.collectives.reduction.operation import BufferedOperation, OutgoingPiece
from planetary.collectives.transport.data_plane import DataPlane
from planetary.collectives.transport.links import Link, measure
from planetary.collectives.transport.neighbours import STREAMS
from planetary.collectives.transport.piece_frames import Introduction
from planetary.collectives.transport.shared_state import Fetcher, SharedState, StateSession
from planetary.collectives.transport.tls import PeerCertificate
from planetary.core.errors import PlanetaryError
from planetary.core.threads import Lock

log = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30


class RingConnections:
    """Thread-safe.

    Attributes:
        peer: id of this peer; "" before registration.
        topology: the ring; None outside a group.
        rank: this peer's rank in it; -1 outside.
        port: of the own listener.
        pool: buffers for the backups and encoded pieces of operations.
        plane: serves the connections of others; None while closed.
        link: to the successor; None in a ring of one.
    """

    def __init__(
        self,
        settings: PeerSettings,
        lock: Lock,
        *,
        complete: Callable[[BufferedOperation], None],
        fault: Callable[[str, str], None],
        spoil: Callable[[BufferedOperation, str, str], None],
    ) -> None:
        """Callbacks are those of `DataPlane`. `lock` guards the peer's state, of which this is a part."""
        self._settings, self._lock = settings, lock
        self._complete, self._fault, self._spoil = complete, fault, spoil
        self._certificate: PeerCertificate | None = None
        self.peer = ""
        self.topology: m.RingChanged | None = None
        self.rank = -1
        self.port = 0
        self.pool = BufferPool(_KEEP_BYTES)
        self.plane: DataPlane | None = None
        self.link: Link | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate shown to other peers, hexadecimal; "" without TLS."""
        return self._certificate.fingerprint if self._certificate is not None else ""

    def open(self, local_host: str) -> None:
        """Listen once; `local_host` is the address toward the master."""
        settings = self._settings
        if settings.trust.invite is not None and self._certificate is None:
            self._certificate = PeerCertificate()
        if self.plane is not None:
            return
        listener = settings.ports.bulk.listen(settings.data_host or local_host, settings.data_port)
        self.port = listener.port
        self.plane = DataPlane(
            listener,
            tls=self._certificate.context if self._certificate is not None else None,
            options=settings.sockets,
            connections_most=64 + 4 * (settings.reach.connections or STREAMS),
            stall_s=settings.stall_s,
            forward=self.forward,
            complete=self._complete,
            fault=self._fault,
            spoil=self._spoil,
            ports=settings.ports,
        )

    def use(self, topology: m.RingChanged, rank: int, peer: str) -> None:
        """Take over a ring, and keep the link to the successor if it is the same one."""
        with self._lock:
            if self.plane is None:
                return  # the communicator is being closed
            before = self.link
            self.topology, self.rank, self.peer = topology, rank, peer
            self.plane.admit_key(topology.key)
            following = topology.ring[(rank + 1) % len(topology.ring)]
            if len(topology.ring) == 1:
                self.link = None
            elif before is None or before.to != following:
                introduction = Introduction("ring", peer, topology.key)
                tls = self._certificate is not None
                self.link = self._settings.reach.link(topology, following, introduction, tls=tls, on_fault=self._fault)
            if before is not None and before is not self.link:
                before.close()

    def forward(self, seq: int, operation: BufferedOperation, outgoing: OutgoingPiece) -> None:
        """Send a piece to the successor. Never blocks."""
        link = self.link
        if link is not None:
            link.send(seq, operation, outgoing)

    def begin(self, seq: int, operation: BufferedOperation) -> None:
        """Receive the pieces of an operation, and send the first ones."""
        assert self.plane is not None
        self.plane.begin(seq, operation)
        for outgoing in operation.begin():
            self.forward(seq, operation, outgoing)

    def end(self, seq: int) -> None:
        """Treat further pieces of this operation as stale."""
        plane = self.plane
        if plane is not None:
            plane.end(seq)

    def serve(self, seq: int, session: StateSession | None) -> None:
        """Answer requests for this shared state; None: no more."""
        plane = self.plane
        if plane is not None:
            plane.serve(seq, session)

    def fetcher(
        self,
        session: StateSession,
        wanted: Sequence[m.Fetch],
        state: SharedState,
        seq: int,
        topology: m.RingChanged,
        *,
        stall_s: float,
    ) -> Fetcher:
        """Return a fetcher of the shared state's arrays from the members of a ring."""
        return Fetcher(
            session,
            wanted,
            state,
            seq=seq,
            algorithm=topology.digest,
            peers={info.peer: info for info in topology.ring},
            introduction=Introduction("state", self.peer, (self.topology or topology).key),
            options=self._settings.sockets,
            tls=self._certificate is not None,
            stall_s=stall_s,
            ports=self._settings.ports,
        )

    def measure(self, to: m.PeerInfo, seconds: float) -> tuple[float, float] | None:
        """Return bytes per second and seconds of latency to another peer: zeros when it cannot be reached.

        None outside a group.
        """
        topology = self.topology
        if topology is None:
            return None
        introduction, settings = Introduction("probe", self.peer, topology.key), self._settings
        tls = self._certificate is not None
        try:
            return measure(to, introduction, settings.sockets, settings.ports, tls=tls, seconds=seconds)
        except PlanetaryError as error:
            log.info("measuring the way to %s: %s", to.name, error)
            return 0.0, 0.0

    def leave(self) -> None:
        """Be in no ring any more."""
        with self._lock:
            link, self.link = self.link, None
            self.topology, self.rank = None, -1
        if link is not None:
            link.close()

    def close(self) -> None:
        """Leave, and close every connection of others."""
        with self._lock:
            plane, self.plane = self.plane, None  # no ring is taken over any more: the link would never be closed
        self.leave()
        if plane is not None:
            plane.close()
