"""The way to one other peer: a pool of connections, each with a thread that sends pieces from where they lie."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from planetary.collectives.frames import ACCEPTED, IN_SLOT, Introduction, ProbeRequest, pack_header
from planetary.collectives.messages import PeerInfo
from planetary.collectives.operation import Operation, Outgoing
from planetary.collectives.shared_memory import SlotWriter
from planetary.collectives.sockets import DataSocket, SocketOptions, dial, prepare
from planetary.collectives.tls import wrap_to_peer
from planetary.core.errors import PeerError, PlanetaryError

log = logging.getLogger(__name__)

CONNECT_S = 10.0
_FILLER = bytes(1 << 20)


def open_connection(to: PeerInfo, introduction: Introduction, options: SocketOptions, *, tls: bool) -> DataSocket:
    """Connect to a peer and introduce this one. Raises `PeerError` or `TrustError`."""
    sock = dial(to.host, to.port, CONNECT_S, options.source)
    try:
        prepare(sock, options)
        if tls:
            sock.settimeout(CONNECT_S)
            sock = wrap_to_peer(sock, to.certificate)
        connection = DataSocket(sock)
        connection.write_block(msgspec.json.encode(introduction), CONNECT_S)
    except BaseException:
        sock.close()
        raise
    return connection


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
    ) -> None:
        """Connections are made when the first piece is sent. `on_fault(peer, reason)` is called from a thread.

        `slot_bytes`: size of a slot of shared memory for a peer on the same machine; 0 for none.
        """
        self.to = to
        self._lock = threading.Lock()
        self._turn = 0
        self._lanes = [
            _Lane(
                to,
                introduction,
                options=options,
                tls=tls,
                stall_s=stall_s,
                slot_bytes=slot_bytes,
                on_fault=on_fault,
                name=f"planetary ring send {number} to {to.name}",
            )
            for number in range(connections)
        ]

    def send(self, seq: int, operation: Operation, outgoing: Outgoing) -> None:
        """Send a piece unless the operation is over by then. Never blocks."""
        with self._lock:
            index = next_lane([lane.waiting for lane in self._lanes], self._turn)
            self._turn = index + 1
            lane = self._lanes[index]
            lane.given += 1
        lane.put(seq, operation, outgoing)

    def close(self) -> None:
        """Close all connections; what is not sent yet is dropped."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One connection and its thread."""

    def __init__(
        self,
        to: PeerInfo,
        introduction: Introduction,
        *,
        options: SocketOptions,
        tls: bool,
        stall_s: float,
        slot_bytes: int,
        on_fault: Callable[[str, str], None],
        name: str,
    ) -> None:
        self._to, self._introduction, self._options = to, introduction, options
        self._tls, self._stall_s, self._on_fault = tls, stall_s, on_fault
        self._slot_bytes = slot_bytes
        self._slots: SlotWriter | None = None
        self._queue: queue.SimpleQueue[tuple[int, Operation, Outgoing] | None] = queue.SimpleQueue()
        self._connection: DataSocket | None = None
        self._closed = False
        self.given = 0  # pieces so far; the link's
        self._done = 0  # of those; the thread's
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Pieces that the system has not taken yet."""
        return self.given - self._done

    def put(self, seq: int, operation: Operation, outgoing: Outgoing) -> None:
        self._queue.put((seq, operation, outgoing))

    def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        connection = self._connection
        if connection is not None:
            connection.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._closed:
            seq, operation, outgoing = item
            try:
                self._send(seq, operation, outgoing)
            except Exception as error:
                if not isinstance(error, PlanetaryError):
                    log.exception("sending to %s", self._to.name)
                self._drop()
                if not self._closed and not operation.closed:
                    self._on_fault(self._to.peer, f"sending to {self._to.name}: {error}")
            self._done += 1
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._slots = None

    def _send(self, seq: int, operation: Operation, outgoing: Outgoing) -> None:
        if self._connection is None:
            if operation.closed:
                return
            self._connect()
            if self._closed:
                return
        if not operation.enter():
            return
        try:
            payload = operation.payload(outgoing)
        finally:
            operation.leave()
        # Before it goes: by the time that it has arrived everywhere the caller may read the count.
        operation.count_sent(len(payload))
        if self._slots is not None and len(payload) <= self._slots.slot_bytes:
            if not self._write_slot(self._slots, seq, operation, outgoing, payload):
                return
        else:
            head = memoryview(pack_header(seq, outgoing.stage, outgoing.index, len(payload)))
            self._write(operation, head, payload)

    def _connect(self) -> None:
        if self._slot_bytes:
            try:
                self._slots = SlotWriter(self._slot_bytes)
            except OSError as error:
                log.info("no shared memory to %s: %s", self._to.name, error)
                self._slot_bytes = 0
        introduction = self._introduction
        slots = self._slots
        if slots is not None:
            introduction = msgspec.structs.replace(introduction, shared=slots.name, slot_bytes=slots.slot_bytes)
        try:
            connection = open_connection(self._to, introduction, self._options, tls=self._tls)
            self._connection = connection
            if slots is not None:
                answer = bytearray(1)
                connection.read(memoryview(answer), CONNECT_S)
                if answer != ACCEPTED:
                    self._slots = None
        finally:
            if slots is not None:
                slots.unlink()

    def _write_slot(
        self, slots: SlotWriter, seq: int, operation: Operation, outgoing: Outgoing, payload: memoryview
    ) -> bool:
        """Send a piece through shared memory; false when the operation ended before that."""
        connection = self._connection
        assert connection is not None
        returned = memoryview(bytearray(16))
        while count := connection.try_read(returned):
            slots.free.extend(returned[:count])
        while not slots.free:
            if not connection.wait_readable(self._stall_s):
                raise PeerError(f"it took nothing for {self._stall_s:g} s")
            slots.free.extend(returned[: connection.try_read(returned)])
        if not operation.enter():
            return False
        slot = slots.free.popleft()
        try:
            slots.fill(slot, payload)
        finally:
            operation.leave()
        head = pack_header(seq, outgoing.stage | IN_SLOT, outgoing.index, len(payload))
        connection.write(memoryview(head + bytes((slot,))), self._stall_s)
        return True

    def _write(self, operation: Operation, head: memoryview, payload: memoryview) -> None:
        """Write a frame. When the operation ends in the middle, filler completes it: nobody will look at it."""
        connection = self._connection
        assert connection is not None
        done, total = 0, len(head) + len(payload)
        while done < total:
            rest = total - done
            if operation.enter():
                try:
                    if done < len(head):
                        count = connection.try_write(head[done:], payload)
                    else:
                        count = connection.try_write(payload[done - len(head) :])
                finally:
                    operation.leave()
            elif done == 0:
                return
            else:
                count = connection.try_write(memoryview(_FILLER)[:rest] if rest < len(_FILLER) else memoryview(_FILLER))
            if not count and not connection.wait_writable(self._stall_s):
                raise PeerError(f"it took nothing for {self._stall_s:g} s")
            done += count


def measure(
    to: PeerInfo, introduction: Introduction, options: SocketOptions, *, tls: bool, seconds: float
) -> tuple[float, float]:
    """Return bytes per second and seconds of latency to a peer, measured for about `seconds`.

    Raises `PeerError` when it cannot be reached or does not answer.
    """
    connection = open_connection(to, introduction, options, tls=tls)
    try:
        trips = [_transfer(connection, 0) for _ in range(3)]
        latency = min(trips) / 2
        length, begun, speed = 256 << 10, time.monotonic(), 0.0
        while True:
            spent = _transfer(connection, length)
            moving = max(spent - min(trips), 1e-6)  # without the trip, which says nothing about the speed
            speed = max(speed, length / moving)  # what disturbs only ever slows down
            left = seconds - (time.monotonic() - begun)
            if moving > seconds / 4 or left < spent * 2 or length >= 64 << 20:
                return speed, latency
            length *= 2
    finally:
        connection.close()


def _transfer(connection: DataSocket, length: int) -> float:
    begun = time.monotonic()
    connection.write_block(msgspec.json.encode(ProbeRequest(length)), CONNECT_S)
    left = length
    while left:
        part = memoryview(_FILLER)[: min(left, len(_FILLER))]
        connection.write(part, CONNECT_S)
        left -= len(part)
    connection.read_block(16, CONNECT_S)
    return time.monotonic() - begun
