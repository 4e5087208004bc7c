"""Receives bulk data from other peers: pieces of operations, requests for shared state, measurements."""

from __future__ import annotations

import logging
import secrets
import ssl
from collections.abc import Callable
from functools import partial

import msgspec

from planetary.collectives.reduction.operation import BufferedOperation, OutgoingPiece
from planetary.collectives.transport.bulk_network import BulkListener, Incoming
from planetary.collectives.transport.direct_memory import Borrower, Loan, draw_challenge
from planetary.collectives.transport.piece_frames import (
    ACCEPTED,
    ADDRESS,
    DECLINED,
    HEADER_BYTES,
    IN_SLOT,
    INTRODUCTION_BYTES,
    Header,
    Introduction,
    ProbeRequest,
    Request,
    StateAnswer,
    read_header,
)
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.shared_memory import SlotReader
from planetary.collectives.transport.shared_state import StateSession
from planetary.collectives.transport.sockets import DataConnection, SocketOptions
from planetary.core import decoding
from planetary.core.errors import PeerError, PlanetaryError, RemoteProtocolError
from planetary.net.strangers import Door, Place, StrangerLimits

_ANSWER_S = 10.0


def accept_slots(connection: DataConnection, introduction: Introduction) -> SlotReader | None:
    """Open the shared memory a peer offers, if any, and answer whether that succeeded."""
    if not introduction.shared:
        return None
    try:
        slots = SlotReader(introduction.shared, introduction.slot_bytes)
    except OSError as error:
        log.info("shared memory of a peer cannot be opened: %s", error)
        connection.write(_ANSWER_S, memoryview(DECLINED))
        return None
    connection.write(_ANSWER_S, memoryview(ACCEPTED))
    return slots


def accept_loan(connection: DataConnection, loan: Loan) -> Borrower | None:
    """Try to read the memory a peer lends, and answer whether that succeeded."""
    challenge = draw_challenge()
    connection.write(_ANSWER_S, memoryview(challenge))
    if not any(challenge):
        return None
    connection.read(memoryview(bytearray(len(ACCEPTED))), _ANSWER_S)
    try:
        borrower = Borrower(loan, challenge)
    except PeerError as error:
        log.info("taking pieces from the memory of a peer: %s", error)
        connection.write(_ANSWER_S, memoryview(DECLINED))
        return None
    connection.write(_ANSWER_S, memoryview(ACCEPTED))
    return borrower


log = logging.getLogger(__name__)

STRANGERS = StrangerLimits(at_once=128, settled_s=0.0)
"""Until they show the key of the group. Each takes a thread; a peer has shown it within a trip or two, and does
not come again when it is turned away."""
_COMMENCE_S = 10.0  # how much later than a neighbour this peer may learn that an operation began
_SCRATCH = (1 << 20) + (64 << 10)  # size of a piece; enough for one of 16 bits with its heads
_PROBE_MOST = 64 << 20
_FORGOTTEN_KEYS = 8


class DataPlane:
    """The listening side of a communicator.

    `forward(seq, operation, outgoing)`, `complete(operation)`, `fault(peer, reason)` and `spoil(operation, peer, why)`
    are called from data threads and must not block.
    """

    def __init__(
        self,
        listener: BulkListener,
        *,
        tls: ssl.SSLContext | None,
        options: SocketOptions,
        connections_most: int,
        stall_s: float,
        forward: Callable[[int, BufferedOperation, OutgoingPiece], None],
        complete: Callable[[BufferedOperation], None],
        fault: Callable[[str, str], None],
        spoil: Callable[[BufferedOperation, str, str], None],
        ports: Ports,
    ) -> None:
        """Start to accept."""
        self._listener, self._tls, self._options = listener, tls, options
        self._most, self._stall_s = connections_most, stall_s
        self._forward, self._complete, self._fault, self._spoil = forward, complete, fault, spoil
        self._clock, self._threads = ports.clock, ports.threads
        self._condition = ports.threads.condition()
        self._operations: dict[int, BufferedOperation] = {}
        self._session: tuple[int, StateSession] | None = None
        self._commenced = 0  # highest number of an operation that began
        self._keys: list[str] = []
        self._connections: dict[DataConnection, None] = {}
        self._closed = False
        self._door = Door(STRANGERS)
        self._threads.start("planetary ring accept", self._accept)

    # --- calls of the communicator

    def admit_key(self, key: str) -> None:
        """Accept connections that show this secret."""
        with self._condition:
            if key not in self._keys:
                self._keys = [*self._keys[1 - _FORGOTTEN_KEYS :], key]
                self._condition.notify_all()

    def begin(self, seq: int, operation: BufferedOperation) -> None:
        """Accept pieces of this operation."""
        with self._condition:
            self._operations[seq] = operation
            self._commenced = max(self._commenced, seq)
            self._condition.notify_all()

    def end(self, seq: int) -> None:
        """Treat further pieces of this operation as stale."""
        with self._condition:
            self._operations.pop(seq, None)

    def serve(self, seq: int, session: StateSession | None) -> None:
        """Answer requests for this shared state; None: no more."""
        with self._condition:
            self._session = (seq, session) if session is not None else None
            self._commenced = max(self._commenced, seq)
            self._condition.notify_all()

    def close(self) -> None:
        """Stop listening and close every connection."""
        with self._condition:
            self._closed = True
            connections = list(self._connections)
            self._condition.notify_all()
        self._listener.close()
        for connection in connections:
            connection.close()

    # --- threads

    def _accept(self) -> None:
        while not self._closed:
            try:
                incoming = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._threads.sleep(0.05)  # out of descriptors: others will close theirs
                continue
            now = self._clock.monotonic()
            place = self._door.enter(incoming.host, now)
            if news := self._door.news(now):
                log.warning("%s", news)
            if place is None:
                incoming.close()
                continue
            self._threads.start(
                f"planetary ring receive from {incoming.address}", partial(self._attend, incoming, place)
            )

    def _attend(self, incoming: Incoming, place: Place) -> None:
        connection: DataConnection | None = None
        peer = ""
        known = False
        try:
            introduction, connection = self._introduced(incoming, place)
            known = True
            self._keep(connection)
            place.leave()
            peer = introduction.peer if introduction.purpose == "ring" else ""
            match introduction.purpose:
                case "ring":
                    if introduction.loan is None:
                        self._receive_pieces(connection, accept_slots(connection, introduction))
                    elif (borrower := accept_loan(connection, introduction.loan)) is not None:
                        self._receive_lent(connection, peer, borrower)
                    # A declined peer connects again without a loan.
                case "state":
                    self._serve_state(connection)
                case "probe":
                    self._answer_probes(connection)
        except Exception as error:
            if not isinstance(error, PlanetaryError | OSError | msgspec.MsgspecError):
                log.exception("a connection from %s failed", place.host)
            if not self._closed:
                if known:
                    log.info("a connection from %s ended: %s", place.host, error)
                else:  # any host can cause this, as often as it likes
                    self._door.turned_away(f"from {place.host} without the key of this group")
                    if news := self._door.news(self._clock.monotonic()):
                        log.warning("%s; the last one: %s", news, error)
                if peer:
                    self._fault(peer, f"receiving: {error}")
        finally:
            place.leave()
            with self._condition:
                if connection is not None:
                    self._connections.pop(connection, None)
            if connection is not None:
                connection.close()
            else:
                incoming.close()

    def _introduced(self, incoming: Incoming, place: Place) -> tuple[Introduction, DataConnection]:
        """Return a stranger's introduction, once it has shown the key of the group.

        There is one deadline for all of it, a TLS handshake included.
        """
        deadline = place.since + self._door.limits.introduction_s
        place.end = incoming.end
        connection = incoming.open(self._tls, self._options, deadline)
        try:
            introduction = decoding.from_json(connection.read_block_by(INTRODUCTION_BYTES, deadline), Introduction)

            def known() -> bool:
                return any(secrets.compare_digest(introduction.key.encode(), key.encode()) for key in self._keys)

            with self._condition:
                # A neighbour may have learned of the new ring, and the key, before this peer did.
                left = max(0.0, deadline - self._clock.monotonic())
                if not self._condition.wait_for(lambda: known() or self._closed, left) or self._closed:
                    raise RemoteProtocolError("it showed no key of this group")
        except BaseException:
            connection.close()
            raise
        return introduction, connection

    def _keep(self, connection: DataConnection) -> None:
        with self._condition:
            if len(self._connections) >= self._most:
                raise RemoteProtocolError(f"there are {self._most} connections of peers already")
            self._connections[connection] = None
            if self._closed:
                connection.close()

    def _receive_lent(self, connection: DataConnection, peer: str, borrower: Borrower) -> None:
        frame = bytearray(HEADER_BYTES + ADDRESS.size)
        scratch = memoryview(bytearray(_SCRATCH))
        while True:
            connection.read(memoryview(frame), None)  # idle between operations for as long as it takes
            header = read_header(frame[:HEADER_BYTES])
            self._take_lent(header, peer, borrower, ADDRESS.unpack_from(frame, HEADER_BYTES)[0], scratch)

    def _receive_pieces(self, connection: DataConnection, slots: SlotReader | None) -> None:
        head, slot = bytearray(HEADER_BYTES), bytearray(1)
        scratch = memoryview(bytearray(_SCRATCH))
        while True:
            connection.read(memoryview(head), None)  # idle between operations for as long as it takes
            header = read_header(head)
            if header.stage & IN_SLOT:
                if slots is None:
                    raise RemoteProtocolError("a piece in shared memory was announced, of which there is none")
                connection.read(memoryview(slot), self._stall_s)
                self._take_slot(header._replace(stage=header.stage ^ IN_SLOT), slots.view(slot[0], header.length))
                connection.write(self._stall_s, memoryview(slot))
                continue
            operation = self._find(header.seq)
            if operation is None or not operation.enter():
                self._discard(connection, header.length, scratch)
                continue
            try:
                self._check(operation, header)
                target = operation.target(header.stage, header.piece)
            finally:
                operation.leave()
            data: memoryview | None = None
            if target is not None:
                taken = self._receive_into(connection, operation, target, scratch)
            elif operation.reduces(header.stage):
                taken = self._receive_reduced(connection, operation, header, scratch)
            else:
                data, taken = _enough(scratch, header.length), True
                connection.read(data, self._stall_s)
            if taken:
                self._take(operation, header, data)

    def _take_slot(self, header: Header, data: memoryview) -> None:
        operation = self._find(header.seq)
        if operation is None:
            return
        self._check(operation, header)
        self._take(operation, header, data)

    def _take_lent(self, header: Header, peer: str, borrower: Borrower, address: int, scratch: memoryview) -> None:
        """Take a piece from where it lies in the sender's memory."""
        operation = self._find(header.seq)
        if operation is None or not operation.enter():
            return
        data: memoryview | None = None
        try:
            self._check(operation, header)
            target = operation.target(header.stage, header.piece)
            if target is not None:
                there = borrower.read(address, target)
            elif operation.reduces(header.stage):
                there = True
                for done in range(0, header.length, len(scratch)):
                    part = scratch[: min(header.length - done, len(scratch))]
                    there = there and borrower.read(address + done, part)
                    if there:
                        operation.reduce_part(header.stage, header.piece, done, part)
            else:
                data = _enough(scratch, header.length)
                there = borrower.read(address, data)
        finally:
            operation.leave()
        if there:
            self._take(operation, header, data)
        else:
            # The arrays of a failed operation may be gone before all peers know of the failure.
            self._spoil(operation, peer, "the memory of a piece cannot be read; transport='tcp' does not need to")

    def _check(self, operation: BufferedOperation, header: Header) -> None:
        expected = operation.wire_bytes(header.stage, header.piece)
        if header.length != expected:
            raise RemoteProtocolError(
                f"piece {header.piece} of stage {header.stage} must have {expected} bytes, {header.length} came"
            )

    def _find(self, seq: int) -> BufferedOperation | None:
        with self._condition:
            if seq not in self._operations and seq > self._commenced:
                self._condition.wait_for(lambda: self._closed or seq <= self._commenced, _COMMENCE_S)
                if seq > self._commenced:
                    raise RemoteProtocolError(f"pieces of operation {seq} came, which did not begin here")
            return self._operations.get(seq)

    def _take(self, operation: BufferedOperation, header: Header, data: memoryview | None) -> None:
        if not operation.enter():
            return
        try:
            passed = operation.arrived(header.stage, header.piece, data)
        finally:
            operation.leave()
        if passed is not None:
            self._forward(header.seq, operation, passed)
        if operation.announce():
            self._complete(operation)

    def _receive_into(
        self, connection: DataConnection, operation: BufferedOperation, target: memoryview, scratch: memoryview
    ) -> bool:
        """Fill memory of the caller, touching it only inside the guard. False when the operation ended meanwhile."""
        done = 0
        while done < len(target):
            if not operation.enter():
                self._discard(connection, len(target) - done, scratch)
                return False
            try:
                count = connection.try_read(target[done:])
            finally:
                operation.leave()
            if not count and not connection.wait_readable(self._stall_s):
                raise PeerError(f"a piece stopped in the middle for {self._stall_s:g} s")
            done += count
        return True

    def _receive_reduced(
        self, connection: DataConnection, operation: BufferedOperation, header: Header, scratch: memoryview
    ) -> bool:
        """Combine a piece as it comes, in parts that stay in the cache. False when the operation ended meanwhile."""
        for done in range(0, header.length, len(scratch)):
            part = scratch[: min(header.length - done, len(scratch))]
            connection.read(part, self._stall_s)
            if not operation.enter():
                self._discard(connection, header.length - done - len(part), scratch)
                return False
            try:
                operation.reduce_part(header.stage, header.piece, done, part)
            finally:
                operation.leave()
        return True

    def _discard(self, connection: DataConnection, length: int, scratch: memoryview) -> None:
        while length:
            part = scratch[: min(length, len(scratch))]
            connection.read(part, self._stall_s)
            length -= len(part)

    def _serve_state(self, connection: DataConnection) -> None:
        while True:
            data = connection.read_block(INTRODUCTION_BYTES, self._stall_s)
            request = decoding.from_json(data, Request)
            session = self._session_of(request.seq)
            part = session.part(request.name, request.offset, request.length) if session is not None else None
            if session is None or part is None:
                answer = StateAnswer(ok=False, reason=f"no such part of {request.name!r} is offered now")
                connection.write_block(msgspec.json.encode(answer), self._stall_s)
                continue
            connection.write_block(msgspec.json.encode(StateAnswer(ok=True, length=len(part))), self._stall_s)
            done = 0
            while done < len(part):
                if not session.enter():
                    raise PeerError("the synchronisation ended while a part of it was sent")
                try:
                    count = connection.try_write(part[done:])
                finally:
                    session.leave()
                if not count and not connection.wait_writable(self._stall_s):
                    raise PeerError(f"it took nothing for {self._stall_s:g} s")
                done += count

    def _session_of(self, seq: int) -> StateSession | None:
        with self._condition:
            self._condition.wait_for(lambda: self._closed or seq <= self._commenced, _COMMENCE_S)
            current = self._session
        return current[1] if current is not None and current[0] == seq else None

    def _answer_probes(self, connection: DataConnection) -> None:
        scratch = memoryview(bytearray(_SCRATCH))
        while True:
            request = decoding.from_json(connection.read_block(256, self._stall_s), ProbeRequest)
            if not 0 <= request.length <= _PROBE_MOST:
                raise RemoteProtocolError(f"a measurement of {request.length} bytes was asked for")
            self._discard(connection, request.length, scratch)
            connection.write_block(b"ok", self._stall_s)


def _enough(scratch: memoryview, nbytes: int) -> memoryview:
    """Return `nbytes` of `scratch`, or a fresh buffer if the piece does not fit."""
    return scratch[:nbytes] if nbytes <= len(scratch) else memoryview(bytearray(nbytes))
