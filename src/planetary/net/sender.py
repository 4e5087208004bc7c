"""Feeds a transport from an outbox: a bounded amount at a time, and never for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from planetary.wire.limits import KIB
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Frame, Outbox, QueuedMessage

# Bytes handed to the transport in one piece. It buffers at most about two of them.
_PIECE_BYTES = 256 * KIB
# Since 3.12 a transport keeps a view of the bytes the socket did not take at once, where 3.11 copies it. A cancelled
# send gives the arrays back to the caller at once, so the transport must not see them.
_TRANSPORT_KEEPS_VIEWS = sys.version_info >= (3, 12)


class Sender:
    """The sending half of a connection. All methods belong to the event loop's thread, but `post_from_any_thread`.

    Attributes:
        bytes_sent: bytes given to the transport.
        last_sent: time of the event loop's clock (seconds) at which that last happened.
    """

    def __init__(self, protocol: Protocol, stall_s: float, on_stall: Callable[[], None]) -> None:
        self.bytes_sent = 0
        self._loop = asyncio.get_running_loop()
        self.last_sent = self._loop.time()
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._outbox = Outbox(protocol)
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: dict[QueuedMessage, asyncio.Future[None]] = {}
        self._frame: Frame | None = None  # frame in transit into the transport
        self._pieces: deque[bytes | memoryview] = deque()  # unwritten pieces of that frame
        self._pump_due = False
        self._paused = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._over = False
        self._lock = threading.RLock()  # guards all of this
        self._direct: socket.socket | None = None  # the transport's, for other threads

    @property
    def idle(self) -> bool:
        """Whether nothing is waiting to be written."""
        return not (self._outbox or self._pieces or self._paused)

    @property
    def posted_bytes(self) -> int:
        """Bytes of messages, without their tensors, that are not with the transport yet."""
        return self._outbox.control_bytes

    def start(self, transport: asyncio.WriteTransport) -> None:
        """Begin to write to a connected transport."""
        with self._lock:
            self._transport = transport
            # Arrays may change once `send` returns, so the transport must report it has no view of them. A TLS
            # transport holds ciphertext only, and takes a high-water mark of 0 for "always paused".
            over_tls = transport.get_extra_info("ssl_object") is not None
            transport.set_write_buffer_limits(high=1 if over_tls else 0, low=0)
            self.last_sent = self._loop.time()
            self._pump()

    async def send(self, message: Message, tensors: Mapping[str, np.ndarray] | None) -> int:
        """Write a message; return the size of the frames when the operating system has all of them."""
        with self._lock:
            outgoing = self._outbox.add(message, tensors)
            done = self._loop.create_future()
            self._waiting[outgoing] = done
            self._pump()
        try:
            await done
        except asyncio.CancelledError:
            self._withdraw(outgoing)
            raise
        return outgoing.nbytes

    def post(self, message: Message) -> None:
        """Queue a small message without waiting for it."""
        with self._lock:
            if self._transport is not None and self.idle:
                self._write(self._transport, self._outbox.frame_of(message))
            else:
                self._outbox.post(message)

    def open_to_threads(self) -> None:
        """Prepare for `post_from_any_thread`."""
        with self._lock:
            transport = self._transport
            if transport is not None and transport.get_extra_info("ssl_object") is None and self._direct is None:
                raw = transport.get_extra_info("socket")
                self._direct = raw.dup() if raw is not None else None

    def post_from_any_thread(self, message: Message) -> None:
        """Queue a small message, and write it in this very call where the socket may be written to as it is.

        It may not while earlier bytes wait, nor over TLS, whose state belongs to the event loop: there, the event loop
        is woken and writes.
        """
        with self._lock:
            if self._over:
                return
            if self._direct is not None and self.idle:
                self._write_directly(self._direct, self._outbox.frame_of(message))
            else:
                self._outbox.post(message)
            if not self.idle:
                self._loop.call_soon_threadsafe(self._pump)

    def stop(self, error: Exception, farewell: Message | None = None) -> bool:
        """Write nothing more; sends under way raise `error`. Return whether `farewell` could still be
        sent.

        It cannot in the middle of a frame or when the transport is full.
        """
        with self._lock:
            self._over = True
            transport, self._transport = self._transport, None
            if self._direct is not None:
                self._direct.close()  # before the transport's: the connection ends with the last of them
                self._direct = None
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            for done in self._waiting.values():
                if not done.done():
                    done.set_exception(error)
            self._waiting.clear()
            self._outbox.clear()
            if transport is None or transport.is_closing() or self._pieces or self._paused:
                return False
            if farewell is not None:
                self._write(transport, self._outbox.frame_of(farewell))
            return True

    def pause(self) -> None:
        """The socket takes no more for now."""
        with self._lock:
            self._paused = True
            self._watch_stall()

    def resume(self) -> None:
        """The socket took everything."""
        with self._lock:
            self._paused = False
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            self._pump()

    def _watch_stall(self) -> None:
        if self._transport is not None:
            left = self._transport.get_write_buffer_size()
            self._stall_timer = self._loop.call_later(self._stall_s, self._check_stall, left)

    def _check_stall(self, left_before: int) -> None:
        if self._transport is None or not self._paused:
            return
        if self._transport.get_write_buffer_size() < left_before:
            self._watch_stall()
        else:
            self._on_stall()

    def _pump(self) -> None:
        """Write until the transport is full, a chunk was written, or nothing is left."""
        with self._lock:
            while not self._paused and self._transport is not None:
                if not self._pieces and not self._next_frame():
                    return
                self._write(self._transport, self._pieces.popleft())
                if not self._pieces and self._frame is not None and self._frame.payload is not None:
                    if not self._pump_due:  # others get the event loop between two chunks
                        self._pump_due = True
                        self._loop.call_soon(self._pump_when_due)
                    return

    def _next_frame(self) -> bool:
        """Make pieces of the frame that is sent next; false when there is none."""
        self._finish_frame()
        self._frame = self._outbox.next_frame()
        if self._frame is None:
            return False
        self._pieces.append(self._frame.head)
        if (payload := self._frame.payload) is not None:
            starts = range(0, len(payload), _PIECE_BYTES)
            self._pieces.extend(payload[start : start + _PIECE_BYTES] for start in starts)
        return True

    def _pump_when_due(self) -> None:
        self._pump_due = False
        self._pump()

    def _write(self, transport: asyncio.WriteTransport, piece: bytes | memoryview) -> None:
        self.bytes_sent += len(piece)
        self.last_sent = self._loop.time()
        transport.write(bytes(piece) if _TRANSPORT_KEEPS_VIEWS else piece)

    def _write_directly(self, sock: socket.socket, frame: bytes) -> None:
        """Write to the socket itself; the event loop writes the rest."""
        count = 0
        with contextlib.suppress(OSError):  # full; or broken, which the event loop finds, too
            count = sock.send(frame)
        self.bytes_sent += count
        self.last_sent = self._loop.time()
        if count < len(frame):
            self._pieces.append(frame[count:])

    def _finish_frame(self) -> None:
        frame, self._frame = self._frame, None
        if frame is not None and frame.last and frame.outgoing is not None:
            done = self._waiting.pop(frame.outgoing, None)
            if done is not None and not done.done():
                done.set_result(None)

    def _withdraw(self, outgoing: QueuedMessage) -> None:
        with self._lock:
            self._waiting.pop(outgoing, None)
            if self._frame is not None and self._frame.outgoing is outgoing:
                # A begun frame must be ended, but the array is the caller's again.
                self._pieces = deque(bytes(piece) for piece in self._pieces)
            self._outbox.withdraw(outgoing)
            self._pump()
