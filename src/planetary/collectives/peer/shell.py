"""A running peer: threads and sockets around `PeerMachine`, and the connection to the master.

The line is an event loop in a thread, the connection, deadlines, and dialling after a restart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

from planetary.collectives.peer import events as e
from planetary.collectives.peer.active_calls import ActiveCollective
from planetary.collectives.peer.machine import FIRST_SESSION, PeerMachine
from planetary.collectives.peer.ring_connections import RingConnections
from planetary.collectives.peer.settings import PeerSettings
from planetary.collectives.peer.work import OpenWork
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import PendingOperationsError
from planetary.collectives.reduction.operation import BufferedOperation
from planetary.collectives.transport.shared_state import digest, digest_algorithms
from planetary.core.errors import ClosedError, LocalProtocolError, PlanetaryError, RemoteProtocolError, UserError
from planetary.core.threads import Lock
from planetary.net.client import connect
from planetary.net.connection import Connection
from planetary.wire.message import Message
from planetary.wire.streams import refuse_tensors

if TYPE_CHECKING:
    from planetary.collectives.peer.shell import PeerShell

log = logging.getLogger(__name__)

_HEARD = frozenset(get_args(m.FromMaster))  # asked of each message: a union takes ten times as long
_WATCH_S = 0.2
_DIAL_MOST_S = 1.0
_CLOSE_S = 2.0


class MasterLine:
    """Serves one machine until the master is lost for good, or the peer was closed or connected anew.

    Attributes:
        loop: where the connection lives.
        connection: to the master; the last one that was made.
    """

    def __init__(self, shell: PeerShell, settings: PeerSettings, timeout_s: float) -> None:
        """Connect. Raises `PeerError`, `TrustError`, or `UserError` for a plain connection off this machine, unless
        the settings allow it.
        """
        self._shell, self._settings = shell, settings
        self._machine: PeerMachine | None = None
        self._task: asyncio.Task[None] | None = None
        self.loop = settings.ports.start_loop("planetary ring control")
        try:
            self.connection = self.loop.call(self._dial(timeout_s))
        except BaseException:
            self.loop.stop(_CLOSE_S)
            raise

    def serve(self, machine: PeerMachine) -> None:
        """Pass messages to the machine from now on, and then report the connection to it."""
        self._machine = machine
        self.loop.post(self._start, FIRST_SESSION)

    def dial(self, session: int) -> None:
        """Reconnect and report the outcome to the machine."""
        self.loop.post(lambda: self._keep(self._dial_again(session)))

    def send(self, message: Message) -> None:
        """Send, from any thread. A closed connection is reported to the machine, not raised here."""
        try:
            self.connection.post_from_any_thread(message)
        except LocalProtocolError:
            raise
        except PlanetaryError as error:
            log.debug("%s was not sent: %s", type(message).__name__, error)

    def hang_up(self) -> None:
        """Drop the connection and end. In the thread of the loop."""
        self.connection.abort()
        self.loop.stop(_CLOSE_S)

    def close(self) -> None:
        """End once the master has the queued messages, or after a short wait. Not in the thread of the loop."""
        with contextlib.suppress(PlanetaryError, concurrent.futures.TimeoutError):
            self.loop.call(self.connection.close("the communicator was closed"), _CLOSE_S)
        self.loop.stop(_CLOSE_S)

    def abandon(self) -> None:
        """End without a message to the master."""
        self.loop.post(self.connection.abort)
        self.loop.stop(_CLOSE_S)

    # --- in the thread of the loop

    async def _dial(self, timeout_s: float) -> Connection:
        settings = self._settings
        connection = await connect(
            *settings.master,
            settings.trust,
            m.COLLECTIVES,
            timeout_s=timeout_s,
            allocate=refuse_tensors,
            network=settings.ports.network,
            allow_unencrypted=settings.allow_unencrypted,
        )
        connection.open_to_threads()
        connection.expect_message(max(timeout_s, _DIAL_MOST_S))
        return connection

    def _start(self, session: int) -> None:
        self._keep(self._converse(session))
        self._look()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)

    async def _dial_again(self, session: int) -> None:
        try:
            self.connection = await self._dial(_DIAL_MOST_S)
        except PlanetaryError as error:
            log.debug("reconnecting to the master: %s", error)
            self._shell.handle(e.Closed(session, str(error)))
        else:
            self._shell.handle(e.Opened(session))
            await self._converse(session)

    async def _converse(self, session: int) -> None:
        try:
            await self.connection.hand_over(partial(self._received, session))
        except PlanetaryError as error:
            self._shell.handle(e.Closed(session, str(error)))
        except Exception as error:
            self._fail(error)
            raise

    def _received(self, session: int, message: Message) -> None:
        if not _is_heard(message):
            raise RemoteProtocolError(f"expected a master's message, found {type(message).__name__}")
        if isinstance(message, m.Registered):
            self.connection.keep_alive(message.heartbeat_s, message.silent_after_s)
        self._shell.handle(e.Received(session, message))

    def _look(self) -> None:
        """Look after transfers and deadlines, from now on.

        Deadlines of calls are seconds: to have a timer for each would cost every call more than it is worth.
        """
        if self._machine is None or not self._shell.runs(self._machine):
            return
        try:
            self._shell.watch()
            self._shell.handle(e.Tick())
        except Exception as error:
            self._fail(error)
            raise
        asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def _fail(self, error: Exception) -> None:
        log.error("the line to the master failed", exc_info=error)
        self._shell.fail_all(ClosedError(f"internal error of the communicator: {type(error).__name__}: {error}"))


def _is_heard(message: Message) -> TypeGuard[m.FromMaster]:
    return type(message) in _HEARD


class CallTable:
    """Thread-safe.

    Attributes:
        works: by number of the call; 0 is the registration.
        transfers: collectives that began, by number of the call.
    """

    def __init__(self, lock: Lock) -> None:
        """`lock` guards the peer's state, of which this is a part."""
        self.works: dict[int, OpenWork] = {}
        self.transfers: dict[int, ActiveCollective] = {}
        self._lock = lock
        self._tags: set[int] = set()
        self._number = itertools.count(1)

    def open(self, work: OpenWork) -> int:
        """Return the number of a new call."""
        call = next(self._number)
        with self._lock:
            self.works[call] = work
        return call

    def take(self, call: int) -> OpenWork | None:
        """Remove a call that is over."""
        with self._lock:
            self.transfers.pop(call, None)
            return self.works.pop(call, None)

    def take_all(self) -> list[OpenWork]:
        """Remove all calls."""
        with self._lock:
            works = list(self.works.values())
            self.works.clear()
            self.transfers.clear()
            return works

    def claim(self, tag: int, kind: str) -> None:
        """Reserve a tag. Raises `UserError` when an operation with it is under way."""
        with self._lock:
            if tag in self._tags:
                raise UserError(f"{kind}: an operation with tag {tag} is under way; choose another or wait for it")
            self._tags.add(tag)

    def release(self, tag: int) -> None:
        """The operation with this tag is over."""
        with self._lock:
            self._tags.discard(tag)

    def expect_none(self, what: str) -> None:
        """Raise `PendingOperationsError` when operations are under way."""
        with self._lock:
            if self._tags:
                raise PendingOperationsError(
                    f"{what}: operations are under way with the tags {sorted(self._tags)}; wait for them"
                )

    def over(self, peer: str) -> list[int]:
        """Return the transfers a peer is a neighbour in."""
        with self._lock:
            return [call for call, transfer in self.transfers.items() if peer in transfer.neighbours]

    def of(self, operation: BufferedOperation) -> int | None:
        """Return the call of a transfer."""
        with self._lock:
            return next((call for call, one in self.transfers.items() if one.operation is operation), None)

    def stalled(self, now: float) -> list[tuple[int, ActiveCollective]]:
        """Return the stalled transfers."""
        with self._lock:
            return [(call, one) for call, one in self.transfers.items() if one.stalled(now)]


class PeerShell:
    """Gives events to the machine and carries out instructions. Thread-safe.

    Attributes:
        settings: settings of the communicator.
        calls: calls that have not returned.
        ring: the connections to other peers.
        lock: guards all of this.
    """

    def __init__(self, settings: PeerSettings) -> None:
        """Prepare; `connect` does the work."""
        self.settings = settings
        self._ports, self._now = settings.ports, settings.ports.clock.monotonic
        self.lock = settings.ports.threads.rlock()
        self.calls = CallTable(self.lock)
        self.ring = RingConnections(
            settings, self.lock, complete=self.complete, fault=self._link_fault, spoil=self._spoil
        )
        self._machine: PeerMachine | None = None
        self._line: MasterLine | None = None
        self._closing = False

    # --- life

    def connect(self, timeout_s: float) -> None:
        with self.lock:
            if self.registered:
                raise UserError("the communicator is connected already")
            self._disconnect()
            self._closing = False
            line = MasterLine(self, self.settings, timeout_s)
            try:
                self.ring.open(line.connection.local_host)
            except BaseException:
                line.close()
                raise
            self._line = line
            self._machine = PeerMachine(self._hello, grace_s=self.settings.grace_s)
            registration = self.calls.works[0] = OpenWork("connect", self._ports.threads)
            line.serve(self._machine)
        self.handle(e.Opened(FIRST_SESSION))
        try:
            registration.wait()
        except PlanetaryError:
            self._disconnect()
            raise

    def close(self) -> None:
        """Leave the group and close everything. Calls under way fail on all peers."""
        self._closing = True
        if self.registered:
            self.handle(e.CallLeave())
        self._disconnect()
        self.fail_all(ClosedError("the communicator was closed"))

    def abandon(self) -> None:
        """Close all sockets without a message, like a killed process. For tests of the other peers' reaction."""
        self._closing = True
        link, plane, line = self.ring.link, self.ring.plane, self._line
        if line is not None:
            line.abandon()
        for closing in (plane, link):
            if closing is not None:
                closing.close()

    # --- state

    @property
    def was_connected(self) -> bool:
        """Whether `connect` has got as far as a machine."""
        return self._machine is not None

    @property
    def registered(self) -> bool:
        """Whether the master is not lost for good."""
        return self._machine is not None and self._machine.error is None

    @property
    def usable(self) -> bool:
        """Whether calls may succeed."""
        return self.registered and not self._closing

    @property
    def line(self) -> MasterLine | None:
        """To the master."""
        return self._line

    @property
    def machine(self) -> PeerMachine | None:
        """The deciding machine; guarded by this object."""
        return self._machine

    @property
    def world_size(self) -> int:
        """Number of members of the group; 0 before admission."""
        topology = self.ring.topology
        return len(topology.ring) if topology is not None else 0

    # --- the machine

    def handle(self, event: e.Event) -> None:
        """Pass an event to the machine and carry out the instructions, the slow ones outside the lock."""
        later: list[Callable[[], object]] = []
        with self.lock:
            machine = self._machine
            if machine is None:
                return
            instructions = machine.handle(event, self._now())
            self._ports.observe(machine, event, instructions)
            for instruction in instructions:
                self._carry_out(instruction, later)
        for action in later:
            action()

    def _carry_out(self, instruction: e.Instruction, later: list[Callable[[], object]]) -> None:
        match instruction:
            case e.Send():
                if self._line is not None:
                    self._line.send(instruction.message)
            case e.UseTopology(topology, rank):
                self.ring.use(topology, rank, self._machine.peer if self._machine is not None else "")
            case e.BeginTransfer(call) | e.BeginFetch(call):
                work = self.calls.works.get(call)
                if work is None or work.active is None or self.ring.plane is None:  # the communicator is being closed
                    later.append(lambda: self.handle(e.LocalFault(call, "it was closed")))
                    return
                after = work.active.begin(call, instruction)
                if after is not None:
                    later.append(after)
            case e.FinishCall(call, error, value):
                work = self.calls.take(call)
                if work is not None:
                    later.append(lambda: work.end(error, value))
            case e.RunProbe(probe, to):
                name = f"planetary ring measure to {to.name}"
                self._ports.threads.start(name, partial(self._measure, probe, to))
            case e.Hangup():
                # Before arrays are restored: no peer may take their restored content for a piece.
                later.insert(0, self._hang_up)
            case e.Dial(session):
                if self._line is not None:
                    self._line.dial(session)

    def _hello(self) -> m.Register:
        settings, (host, port) = self.settings, self.settings.advertise
        return m.Register(
            protocol=m.PROTOCOL,
            group=settings.group,
            name=settings.name,
            host=host,
            port=port or self.ring.port,
            machine=self._ports.machine(),
            certificate=self.ring.fingerprint,
            token=settings.trust.token,
            digests=digest_algorithms(),
        )

    # --- reports of the connections

    def complete(self, operation: BufferedOperation) -> None:
        """All pieces of an operation have come."""
        with self.lock:
            call = self.calls.of(operation)
            topology = self.ring.topology
            speed = self.calls.transfers[call].bytes_per_s(self._now()) if call is not None else 0.0
        if call is None:
            return
        result = ""
        if operation.spec.verify and topology is not None:
            if not operation.enter():
                return
            try:
                result = digest(topology.digest, operation.work)
            finally:
                operation.leave()
        self.handle(e.PiecesComplete(call, result, speed))

    def _link_fault(self, peer: str, reason: str) -> None:
        """Fail the transfers over a broken connection to or from a neighbour."""
        for call in self.calls.over(peer):
            self.handle(e.LocalFault(call, reason, peer))

    def _spoil(self, operation: BufferedOperation, peer: str, reason: str) -> None:
        """A piece of one operation cannot be had; the connection to the neighbour is as it was."""
        call = self.calls.of(operation)
        if call is not None:
            self.handle(e.LocalFault(call, reason, peer))

    def _measure(self, probe: m.Probe, to: m.PeerInfo) -> None:
        found = self.ring.measure(to, probe.seconds)
        if found is not None:
            self.handle(e.LinkMeasured(probe.seq, to.peer, *found))

    # --- for the line to the master

    def runs(self, machine: PeerMachine) -> bool:
        """Whether this is the machine of the present connection, and still has a master."""
        return self._machine is machine and self.usable

    def watch(self) -> None:
        """Fail operations that make no progress."""
        for call, transfer in self.calls.stalled(self._now()):
            reason = f"nothing came from {transfer.previous_name} for {transfer.stall_s:.3g} s"
            self.handle(e.LocalFault(call, reason, transfer.neighbours[0]))

    def fail_all(self, error: PlanetaryError) -> None:
        """End every call."""
        for work in self.calls.take_all():
            work.end(error, None)

    def _hang_up(self) -> None:
        self.ring.leave()
        if self._line is not None:
            self._line.hang_up()

    def _disconnect(self) -> None:
        self.ring.leave()
        self.ring.close()
        with self.lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()
