"""One connection of a link, and the thread that sends over it from where the pieces lie."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from planetary.collectives.protocol.messages import PeerInfo
from planetary.collectives.reduction.operation import BufferedOperation, OutgoingPiece
from planetary.collectives.transport.direct_memory import CHALLENGE_BYTES, Lender, address_of
from planetary.collectives.transport.piece_frames import ACCEPTED, ADDRESS, IN_SLOT, Introduction, pack_header
from planetary.collectives.transport.ports import Ports
from planetary.collectives.transport.shared_memory import SlotWriter
from planetary.collectives.transport.sockets import DataConnection, SocketOptions
from planetary.core.errors import PeerError, PlanetaryError
from planetary.core.threads import Queue

log = logging.getLogger(__name__)

CONNECT_S = 10.0
_AT_ONCE_BYTES = 64 << 10  # so few are sent by the calling thread: waking the other costs more


def open_connection(
    to: PeerInfo, introduction: Introduction, options: SocketOptions, ports: Ports, *, tls: bool
) -> DataConnection:
    """Connect to a peer and introduce this one. Raises `PeerError` or `TrustError`."""
    connection = ports.bulk.dial(to.host, to.port, CONNECT_S, options, to.certificate if tls else None)
    try:
        connection.write_block(msgspec.json.encode(introduction), CONNECT_S)
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a peer is reached; the same for all connections of a link.

    Attributes:
        lends: whether the peer may read this process's memory.
        slot_bytes: size of a slot of shared memory for a peer on the same machine; 0 for none.
        on_fault: called from a thread with the peer and a reason.
    """

    to: PeerInfo
    introduction: Introduction
    options: SocketOptions
    tls: bool
    stall_s: float
    lends: bool
    slot_bytes: int
    on_fault: Callable[[str, str], None]
    ports: Ports


@dataclass
class _Piece:
    """A piece in the queue of a lane."""

    seq: int
    operation: BufferedOperation
    outgoing: OutgoingPiece
    done: int = 0  # sent bytes of the frame
    over: bool = False  # the thread has dealt with the piece


class Lane:
    """One connection and a thread.

    Attributes:
        connection: once it is made.
        lends: whether the other side is offered to read pieces in this process's memory; until it declines.
        slots: shared memory for pieces, where that is used instead.
        given: pieces so far, counted by the link.
    """

    def __init__(self, way: Route, name: str) -> None:
        """Connects when the first piece is sent."""
        self._way = way
        threads = way.ports.threads
        self._queue: Queue[_Piece | None] = threads.queue()
        self._begun: _Piece | None = None  # piece with a half-sent frame: nothing may go before its rest
        self.connection: DataConnection | None = None
        self.lends = way.lends
        self._lender = Lender()
        self._slot_bytes = way.slot_bytes
        self.slots: SlotWriter | None = None
        self._writing = threads.lock()
        self._closed = False
        self.given = 0
        self._done = 0  # pieces done
        threads.start(name, self._run)

    @property
    def waiting(self) -> int:
        """Pieces the system has not taken yet."""
        return self.given - self._done

    def put(self, seq: int, operation: BufferedOperation, outgoing: OutgoingPiece) -> None:
        """Send a piece, `given` already: at once where that does not block, or by the thread."""
        piece = _Piece(seq, operation, outgoing)
        if outgoing.data is not None:
            # Before it goes: by the time it has arrived everywhere the caller may read the count.
            operation.count_sent(len(outgoing.data))
        if self._writing.acquire(blocking=False):
            try:
                if self._sent_at_once(piece):
                    return
            finally:
                self._writing.release()
        self._queue.put(piece)

    def close(self) -> None:
        """Close the connection; queued pieces are dropped, and lent memory is revoked."""
        self._closed = True
        self._lender.revoke()
        self._queue.put(None)
        connection = self.connection
        if connection is not None:
            connection.close()

    # --- inside

    def _sent_at_once(self, piece: _Piece) -> bool:
        """Send as much as does not block; return whether that was all."""
        connection, data = self.connection, piece.outgoing.data
        if connection is None or data is None or self.slots is not None or self.waiting != 1:
            return False
        if not self.lends and len(data) > _AT_ONCE_BYTES:
            return False
        parts = self._frame(piece, data)
        try:
            piece.done = connection.try_write(*parts)
        except PeerError:
            return False  # the thread meets the same error, and reports it
        if piece.done < sum(len(part) for part in parts):
            self._begun = piece if piece.done else None
            return False
        self._done += 1
        return True

    def _frame(self, piece: _Piece, payload: memoryview) -> tuple[memoryview, ...]:
        head = pack_header(piece.seq, piece.outgoing.stage, piece.outgoing.index, len(payload))
        if not self.lends:
            return memoryview(head), payload
        return (memoryview(head + ADDRESS.pack(address_of(np.frombuffer(payload, np.uint8)))),)

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None and not self._closed:
            with self._writing:
                begun, self._begun = self._begun, None
                if begun is not None and begun is not piece:
                    self._carry(begun)
                if not piece.over:
                    self._carry(piece)
        self._drop()

    def _carry(self, piece: _Piece) -> None:
        piece.over = True
        try:
            self._send(piece)
        except Exception as error:
            if not isinstance(error, PlanetaryError):
                log.exception("sending to %s", self._way.to.name)
            self._drop()
            if not self._closed and not piece.operation.closed:
                self._way.on_fault(self._way.to.peer, f"sending to {self._way.to.name}: {error}")
        self._done += 1

    def _drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.slots = None

    def _send(self, piece: _Piece) -> None:
        operation, outgoing, done = piece.operation, piece.outgoing, piece.done
        if self.connection is None:
            if operation.closed:
                return
            if done:
                raise PeerError("the connection ended in the middle of a piece")
            self._connect()
            if self._closed:
                return
        payload = outgoing.data
        if payload is None:
            if not operation.enter():
                return
            try:
                payload = operation.payload(outgoing)
            finally:
                operation.leave()
            operation.count_sent(len(payload))
        elif operation.closed and not done:
            return
        if self.slots is not None and len(payload) <= self.slots.slot_bytes:
            self._write_slot(self.slots, piece, payload)
            return
        connection = self.connection
        assert connection is not None
        # Not inside the guard, since it may wait. When the operation ends meanwhile, the master has aborted it for
        # all, and the rest of the piece may be anything; or this peer is out, and the connection was closed first.
        parts = self._frame(piece, payload)
        connection.write(self._way.stall_s, *_after(parts, done))

    def _connect(self) -> None:
        if self.lends:
            if self._offer(msgspec.structs.replace(self._way.introduction, loan=self._lender.loan)):
                return
            self._drop()
            self.lends = False
        if self._slot_bytes:
            try:
                self.slots = SlotWriter(self._slot_bytes)
            except OSError as error:
                log.info("no shared memory to %s: %s", self._way.to.name, error)
                self._slot_bytes = 0
        slots = self.slots
        if slots is None:
            self._offer(self._way.introduction)
            return
        try:
            shared = msgspec.structs.replace(self._way.introduction, shared=slots.name, slot_bytes=slots.slot_bytes)
            if not self._offer(shared):
                self.slots = None
        finally:
            slots.unlink()

    def _offer(self, introduction: Introduction) -> bool:
        """Connect; return whether the memory that is offered was accepted."""
        way = self._way
        connection = self.connection = open_connection(way.to, introduction, way.options, way.ports, tls=way.tls)
        if introduction.loan is None and not introduction.shared:
            return True
        if introduction.loan is not None:
            challenge = bytearray(CHALLENGE_BYTES)
            connection.read(memoryview(challenge), CONNECT_S)
            if not any(challenge):
                return False
            self._lender.show(bytes(challenge))
            connection.write(CONNECT_S, memoryview(ACCEPTED))
        answer = bytearray(1)
        connection.read(memoryview(answer), CONNECT_S)
        return answer == ACCEPTED

    def _write_slot(self, slots: SlotWriter, piece: _Piece, payload: memoryview) -> None:
        """Send a piece through shared memory, unless the operation ends before that."""
        connection, stall_s = self.connection, self._way.stall_s
        assert connection is not None
        returned = memoryview(bytearray(16))
        while count := connection.try_read(returned):
            slots.free.extend(returned[:count])
        while not slots.free:
            if not connection.wait_readable(stall_s):
                raise PeerError(f"it took nothing for {stall_s:g} s")
            slots.free.extend(returned[: connection.try_read(returned)])
        if not piece.operation.enter():
            return
        slot = slots.free.popleft()
        try:
            slots.fill(slot, payload)
        finally:
            piece.operation.leave()
        head = pack_header(piece.seq, piece.outgoing.stage | IN_SLOT, piece.outgoing.index, len(payload))
        connection.write(stall_s, memoryview(head + bytes((slot,))))


def _after(parts: tuple[memoryview, ...], done: int) -> list[memoryview]:
    """The parts without their first `done` bytes."""
    left = []
    for part in parts:
        left.append(part[done:])
        done = max(done - len(part), 0)
    return left
