"""A peer as a running thing: threads and sockets around `PeerMachine`."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Self

from planetary.collectives.peer import peer_events as e
from planetary.collectives.peer.active_calls import ActiveCollective, ActiveSync
from planetary.collectives.peer.control_thread import ControlThread
from planetary.collectives.peer.peer_machine import PeerMachine
from planetary.collectives.peer.work import Work
from planetary.collectives.protocol import messages as m
from planetary.collectives.reduction.buffers import BufferPool
from planetary.collectives.reduction.operation import Operation, Outgoing
from planetary.collectives.transport.control_stream import ControlStream
from planetary.collectives.transport.data_plane import DataPlane
from planetary.collectives.transport.frames import Introduction
from planetary.collectives.transport.links import Link, measure
from planetary.collectives.transport.neighbours import STREAMS, Reach, machine_identity
from planetary.collectives.transport.shared_state import digest, digest_algorithms
from planetary.collectives.transport.sockets import SocketOptions, listen, parse_address, parse_advertised
from planetary.collectives.transport.tls import PeerCertificate
from planetary.core.errors import ClosedError, PeerError, PlanetaryError, UserError
from planetary.net.client import Trust

log = logging.getLogger(__name__)

_KEEP_BYTES = 1 << 30


class PeerShell:
    """The connection to the master and to the neighbours in the ring; `Communicator` adds the calls."""

    def __init__(
        self,
        master_address: str,
        peer_group: int = 0,
        *,
        connections: int | None = None,
        name: str = "",
        token: str = "",
        data_host: str = "",
        data_port: int = 0,
        advertise: str = "",
        timeout_s: float = 60.0,
        stall_s: float = 30.0,
        master_grace_s: float = 0.0,
        min_world_size: int = 1,
        piece_bytes: int | None = None,
        transport: Literal["auto", "tcp"] = "auto",
        sockets: SocketOptions | None = None,
        allow_unencrypted: bool = False,
    ) -> None:
        """Prepare; `connect` does the work.

        Args:
            master_address: `"host:port"`; names and `"[ipv6]:port"` too.
            peer_group: operations join the peers of one group.
            connections: TCP streams to the successor in the ring. More help where one stream is limited. By default 2,
                or 1 to a peer on the same machine when that has no processors for more.
            name: of this peer, for error texts; by default host name and process id.
            token: invite of the master; empty on plain loopback only.
            data_host: address to receive bulk data at; by default the one that reaches the master.
            data_port: port to receive bulk data at; 0: any.
            advertise: address that other peers are told, by default where the master sees this peer; with a port
                (`"host:port"`) where the outside port is another one, e.g. behind a router or a relay.
            timeout_s: default of the calls.
            stall_s: an operation that makes no progress for as long fails.
            master_grace_s: how long a master that is gone is waited for.
            min_world_size: collectives in a smaller group raise `TooFewPeersError`.
            piece_bytes: size of the pieces of the pipeline; equal on all peers. By default it depends on the tensor.
            transport: "auto" moves bulk data to a peer on the same machine through shared memory; "tcp" never does.
            sockets: options of the bulk connections.
            allow_unencrypted: talk without TLS to a master on another machine, too; anybody between can read and change
                everything.
        """
        if (
            (connections is not None and connections < 1)
            or min_world_size < 1
            or not 0 <= peer_group < 2**32
            or not 0 <= data_port < 2**16
        ):
            raise UserError(
                "connections and min_world_size must be 1 at least, peer_group a number of 32 bits, data_port of 16"
            )
        self._host, self._port = parse_address(master_address)
        self._group = peer_group
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._trust = Trust(token)
        self._allow_unencrypted = allow_unencrypted
        self._data_host, self._wanted_port = data_host, data_port
        self._advertise, self._advertised_port = parse_advertised(advertise)
        self._timeout_s, self._stall_s, self._grace_s = timeout_s, stall_s, master_grace_s
        self._min_world = min_world_size
        self._sockets = sockets or SocketOptions()
        self._reach = Reach(
            connections=connections,
            direct=transport == "auto",
            piece_bytes=piece_bytes,
            sockets=self._sockets,
            stall_s=stall_s,
        )
        self._pool = BufferPool(_KEEP_BYTES)
        self._lock = threading.RLock()
        self._calls: dict[int, Work] = {}
        self._active: dict[int, ActiveCollective] = {}  # call -> operation that began
        self._tags: set[int] = set()
        self._number = itertools.count(1)
        self._machine: PeerMachine | None = None
        self._stream: ControlStream | None = None
        self._plane: DataPlane | None = None
        self._link: Link | None = None
        self._certificate: PeerCertificate | None = None
        self._data_port = 0
        self._topology: m.Topology | None = None
        self._rank = -1
        self._closing = False
        self._revision: int | None = None  # of states that are given as a plain mapping

    # --- life

    def connect(self, timeout_s: float | None = None) -> None:
        """Connect to the master and register. `update_topology` then waits to be admitted.

        Raises `PeerError` when the master does not answer, `TrustError` when it or the token is not genuine.
        A communicator whose master was lost can connect again; it is a new peer then.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if self._machine is not None and self._machine.error is None:
                raise UserError("the communicator is connected already")
            self._disconnect()
            self._closing = False
            stream = self.dial(limit)
            try:
                if self._trust.invite is not None and self._certificate is None:
                    self._certificate = PeerCertificate()
                self._open_plane(stream.local_host)
            except BaseException:
                stream.close()
                raise
            self._stream = stream
            self._machine = PeerMachine(self._hello, grace_s=self._grace_s)
            registered = self._calls[0] = Work("connect")
            ControlThread(self, self._machine, stream).start()
        self._handle(e.Connected())
        try:
            registered.wait()
        except PlanetaryError:
            self._disconnect()
            raise

    @property
    def encrypted(self) -> bool:
        """Whether this peer speaks TLS with the master and the other peers."""
        return self._trust.invite is not None

    @property
    def on_loopback(self) -> bool:
        """Whether the master is on this machine; False before `connect`."""
        return self._stream is not None and self._stream.on_loopback

    def dial(self, timeout_s: float) -> ControlStream:
        """Return a new connection to the master; see `ControlStream` for what is raised."""
        return ControlStream(self._host, self._port, self._trust, timeout_s, allow_unencrypted=self._allow_unencrypted)

    def close(self) -> None:
        """Leave the group and close everything. Calls under way fail on all peers."""
        self._closing = True
        if self._machine is not None and self._machine.error is None:
            self._handle(e.CallLeave())
        self._disconnect()
        self._fail_all(ClosedError("the communicator was closed"))

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- calls

    @property
    def world_size(self) -> int:
        """Number of members of the group; 0 before admission."""
        return len(self._topology.ring) if self._topology is not None else 0

    @property
    def connected(self) -> bool:
        """Whether this peer is registered and the master is not lost for good."""
        return self._usable

    @property
    def _usable(self) -> bool:
        return self._machine is not None and self._machine.error is None and not self._closing

    @property
    def _peer_id(self) -> str:
        return self._machine.peer if self._machine is not None else ""

    # --- the machine

    def _handle(self, event: e.Event) -> None:
        """Give the machine an event and carry out what it says; what takes time happens outside the lock."""
        later: list[Callable[[], None]] = []
        with self._lock:
            machine = self._machine
            if machine is None:
                return
            for instruction in machine.handle(event, time.monotonic()):
                self._carry_out(instruction, later)
        for action in later:
            action()

    def _carry_out(self, instruction: e.Instruction, later: list[Callable[[], None]]) -> None:
        match instruction:
            case e.SendMaster(message):
                if self._stream is not None:
                    try:
                        self._stream.send(message)
                    except PeerError:
                        self._stream.close()  # the thread that receives says what is to be said
            case e.UseTopology(topology, rank):
                self._use(topology, rank)
            case e.BeginTransfer(call) | e.BeginFetch(call):
                work = self._calls.get(call)
                if work is None or work.begun is None or self._plane is None:  # the communicator is being closed
                    later.append(lambda: self._handle(e.LocalFault(call, "it was closed")))
                    return
                after = work.begun((call, instruction))
                if after is not None:
                    later.append(after)
            case e.Finish(call, error, value):
                work = self._calls.pop(call, None)
                active = self._active.pop(call, None)
                if work is not None:
                    later.append(lambda: self._finish(work, active, error, value))
            case e.RunProbe(probe, to):
                name = f"planetary ring measure to {to.name}"
                threading.Thread(target=self._measure, args=(probe, to), name=name, daemon=True).start()
            case e.Hangup():
                # Before arrays are restored: nobody must take what they hold then for a piece.
                later.insert(0, self._hang_up)
            case e.Reconnect():
                pass  # the control thread looks at the machine's state

    def _finish(
        self, work: Work, active: ActiveCollective | ActiveSync | None, error: PlanetaryError | None, value: Any
    ) -> None:
        owner = active
        if owner is None and work.begun is not None:
            owner = getattr(work.begun, "__self__", None)
        if isinstance(owner, ActiveCollective | ActiveSync):
            try:
                if isinstance(owner, ActiveCollective) and isinstance(value, m.Contributions):
                    owner.take(value)
                value = owner.end(error is None)
            except PlanetaryError as failure:
                error = error or failure
            if isinstance(owner, ActiveCollective):
                work.sent_bytes, work.received_bytes = owner.sent, owner.received
                work.world_size = owner.world_size if error is None else 0
        work._settle(error, value)

    def _use(self, topology: m.Topology, rank: int) -> None:
        if self._plane is None:
            return  # the communicator is being closed
        before = self._link
        self._topology, self._rank = topology, rank
        self._plane.admit_key(topology.key)
        following = topology.ring[(rank + 1) % len(topology.ring)]
        if len(topology.ring) == 1:
            self._link = None
        elif before is None or before.to != following:
            introduction = Introduction("ring", self._peer_id, topology.key)
            tls = self._certificate is not None
            self._link = self._reach.link(topology, following, introduction, tls=tls, on_fault=self._link_fault)
        if before is not None and before is not self._link:
            before.close()

    def _link_fault(self, peer: str, reason: str) -> None:
        """A connection to or from a neighbour broke: what runs over it fails."""
        with self._lock:
            calls = [call for call, active in self._active.items() if peer in active.neighbours]
        for call in calls:
            self._handle(e.LocalFault(call, reason, peer))

    def _spoil(self, operation: Operation, peer: str, reason: str) -> None:
        """A piece of one operation cannot be had; the connection to the neighbour is as it was."""
        with self._lock:
            calls = [call for call, active in self._active.items() if active.operation is operation]
        for call in calls:
            self._handle(e.LocalFault(call, reason, peer))

    def _measure(self, probe: m.Probe, to: m.PeerInfo) -> None:
        topology = self._topology
        if topology is None:
            return
        introduction = Introduction("probe", self._peer_id, topology.key)
        try:
            speed, latency = measure(
                to, introduction, self._sockets, tls=self._certificate is not None, seconds=probe.seconds
            )
        except PlanetaryError as error:
            log.info("measuring the way to %s: %s", to.name, error)
            speed = latency = 0.0
        self._handle(e.LinkMeasured(probe.seq, to.peer, speed, latency))

    # --- threads and sockets

    def _hello(self) -> m.Register:
        return m.Register(
            protocol=m.PROTOCOL,
            group=self._group,
            name=self._name,
            host=self._advertise,
            port=self._advertised_port or self._data_port,
            machine=machine_identity(),
            certificate=self._certificate.fingerprint if self._certificate is not None else "",
            token=self._trust.token,
            digests=digest_algorithms(),
        )

    def _open_plane(self, local_host: str) -> None:
        if self._plane is not None:
            return
        listener = listen(self._data_host or local_host, self._wanted_port)
        self._data_port = int(listener.getsockname()[1])
        self._plane = DataPlane(
            listener,
            tls=self._certificate.context if self._certificate is not None else None,
            options=self._sockets,
            connections_most=64 + 4 * (self._reach.connections or STREAMS),
            stall_s=self._stall_s,
            forward=self._forward,
            complete=self._complete,
            fault=self._link_fault,
            spoil=self._spoil,
        )

    def _forward(self, seq: int, operation: Operation, outgoing: Outgoing) -> None:
        link = self._link
        if link is not None:
            link.send(seq, operation, outgoing)

    def _complete(self, operation: Operation) -> None:
        with self._lock:
            found = next((c for c, active in self._active.items() if active.operation is operation), None)
            topology = self._topology
            speed = self._active[found].bytes_per_s(time.monotonic()) if found is not None else 0.0
        if found is None:
            return
        result = ""
        if operation.spec.verify and topology is not None:
            if not operation.enter():
                return
            try:
                result = digest(topology.digest, operation.work)
            finally:
                operation.leave()
        self._handle(e.PiecesComplete(found, result, speed))

    def _watch(self) -> None:
        """Fail operations that make no progress."""
        now = time.monotonic()
        with self._lock:
            stalled = [(call, active) for call, active in self._active.items() if active.stalled(now, self._stall_s)]
        for call, active in stalled:
            reason = f"nothing came from {active.previous_name} for {self._stall_s:g} s"
            self._handle(e.LocalFault(call, reason, active.neighbours[0]))

    def _hang_up(self) -> None:
        with self._lock:
            link, self._link = self._link, None
            self._topology, self._rank = None, -1
        if link is not None:
            link.close()
        if self._stream is not None:
            self._stream.close()

    def _disconnect(self) -> None:
        self._hang_up()
        with self._lock:
            plane, self._plane = self._plane, None
            self._stream = None
        if plane is not None:
            plane.close()

    def _fail_all(self, error: PlanetaryError) -> None:
        with self._lock:
            calls = list(self._calls.items())
            self._calls.clear()
            active = dict(self._active)
            self._active.clear()
        for call, work in calls:
            self._finish(work, active.get(call), error, None)
