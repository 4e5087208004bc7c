"""One connection to a peer: whole messages with their tensors, in both directions, over TCP or TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from planetary.core.errors import ClosedError, PeerError, ProtocolError, RemoteProtocolError, ResourceError
from planetary.net.addresses import address_text, prepare_socket
from planetary.net.sender import Sender
from planetary.net.session import Goodbye, Heartbeat
from planetary.net.strangers import Place
from planetary.wire.limits import KIB, MIB, Limits
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Allocate, Inbox, ReceivedMessage, allocate_any

log = logging.getLogger(__name__)

_REASON_MOST = 2000

Dismissal = Callable[[str], Message]
"""Makes the last message to a peer that broke the protocol or fell silent, given the reason."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How patient one side of a connection is, and how much it holds for the reader."""

    write_stall_s: float = 30.0  # the peer is lost when it takes not one byte for so long
    linger_s: float = 1.0  # time for the peer to close the connection after a goodbye
    unread_messages: int = 256  # beyond these, and
    unread_bytes: int = 256 * MIB  # these, nothing more is taken from the socket
    posted_bytes: int = 64 * MIB  # limit of posted messages' size: beyond it the peer is lost


class Connection:
    """Sends and receives messages. Made by `connect` or `serve`; methods belong to the event loop's thread, but
    `post_from_any_thread`.

    Once the connection is over, every call raises the same error: `RemoteProtocolError` when the peer broke the
    protocol, `PeerError` when it vanished, fell silent or stopped reading, `ClosedError` when either side said goodbye.
    Messages from before are still handed out.

    Attributes:
        peer: address and port of the peer, for people.
        peer_host: the address alone; empty where it has none.
        local_host: this side's address; empty where it has none.
        dismissal: see `Dismissal`; a goodbye unless the owner sets another.
        bytes_received: bytes of frames taken from the socket, after TLS.
        heartbeats_received: how many heartbeats came in; `receive` never returns one.
    """

    def __init__(
        self,
        protocol: Protocol,
        *,
        limits: Limits | None = None,
        allocate: Allocate = allocate_any,
        tuning: Tuning | None = None,
        place: Place | None = None,
    ) -> None:
        """`place`: that the peer has at a server as a stranger; left when it is accepted, or gone."""
        self._place = place or Place()
        self.peer = "a peer that never connected"
        self.peer_host = self.local_host = ""
        self.dismissal: Dismissal = _goodbye
        self.bytes_received = 0
        self.heartbeats_received = 0
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._inbox = Inbox(protocol, limits, allocate)
        self._tuning = tuning or Tuning()
        self._sender = Sender(protocol, self._tuning.write_stall_s, self._on_stall)

        self._transport: asyncio.Transport | None = None
        self._over_tls = False
        self._error: Exception | None = None  # set once; the connection is over
        self._lost = self._loop.create_future()  # done when the socket is gone
        self._linger_timer: asyncio.TimerHandle | None = None
        self._scratch = memoryview(bytearray(16 * KIB))  # first bytes of a frame, and all after the end
        self._in_scratch = False

        self._unread: deque[ReceivedMessage] = deque()
        self._unread_bytes = 0
        self._reading_paused = False
        self._news = asyncio.Event()
        self._handler: Callable[[Message], None] | None = None
        self._any_message = False
        self._first_message_timer: asyncio.TimerHandle | None = None

        self._last_received = self._loop.time()
        self._heartbeat_s = self._silent_after_s = 0.0
        self._beat_timer: asyncio.TimerHandle | None = None

    # --- for callers

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames given to the socket, before TLS. May be read from any thread."""
        return self._sender.bytes_sent

    @property
    def last_received(self) -> float:
        """Time of the event loop's clock (seconds) at which bytes of the peer last arrived."""
        return self._last_received

    @property
    def unread(self) -> int:
        """Number of messages that `receive` would return without waiting. May be read from any thread."""
        return len(self._unread)

    @property
    def error(self) -> Exception | None:
        """Why the connection is over, or None while it is up. May be read from any thread."""
        return self._error

    @property
    def duplicates(self) -> int:
        """Number of messages that were dropped because their id had been seen."""
        return self._inbox.duplicates

    async def send(self, message: Message, tensors: Mapping[str, np.ndarray] | None = None) -> int:
        """Send a message; return the size of the frames when all bytes were handed to the operating system.

        Messages sent one after the other arrive in that order. Concurrent sends take turns chunk by chunk,
        and a message without tensors overtakes those with. The arrays must not change while this runs. A
        cancelled send withdraws the message if part of it is still here; the peer then never sees it.

        Raises `LocalProtocolError` when the message or an array has no place on the wire (the connection
        stays up), else see the class.
        """
        self._raise_if_over()
        return await self._sender.send(message, tensors)

    def post(self, message: Message) -> None:
        """Send a message without tensors and without waiting for it: it goes before all bytes of tensors that wait.

        Raises as `send` does. The connection ends with `PeerError` when the peer reads so slowly that more than
        `Tuning.posted_bytes` wait for it.
        """
        self._raise_if_over()
        self._sender.post(message)
        if self._sender.posted_bytes > self._tuning.posted_bytes:
            self._give_up_posting()

    def open_to_threads(self) -> None:
        """Let `post_from_any_thread` write to the socket of a plain connection in the thread that calls it."""
        self._sender.open_to_threads()

    def post_from_any_thread(self, message: Message) -> None:
        """Do as `post` does, in any thread."""
        self._raise_if_over()
        self._sender.post_from_any_thread(message)
        if self._sender.posted_bytes > self._tuning.posted_bytes:
            self._loop.call_soon_threadsafe(self._give_up_posting)

    async def receive(self, timeout_s: float | None = None) -> ReceivedMessage:
        """Return the next message. Raises `TimeoutError` after `timeout_s` seconds, else see the class.

        Without a timeout the wait is bounded by the peer's silence, see `keep_alive`. A cancelled receive
        loses nothing.
        """
        async with asyncio.timeout(timeout_s):
            await self._wait_for_news()
        received = self._unread.popleft()
        self._unread_bytes -= received.nbytes
        self._read_on()
        return received

    def _read_on(self) -> None:
        if self._reading_paused and not self._is_full():
            self._reading_paused = False
            self._last_received = self._loop.time()  # the silence was ours
            if self._transport is not None and self._error is None:
                self._transport.resume_reading()

    async def hand_over(self, handler: Callable[[Message], None]) -> NoReturn:
        """Call `handler` for each message in the very moment it arrives, until the connection is over.

        For messages without tensors, where a task's turn on the event loop would cost more than the message. Instead
        of `receive`, and with the same errors at the end. A `RemoteProtocolError` of `handler` is the peer's fault and
        is reported to it; any other exception ends the connection, too.
        """
        while self._unread:
            received = self._unread.popleft()
            self._unread_bytes -= received.nbytes
            handler(received.message)
        self._handler = handler
        self._read_on()
        while True:
            await self._wait_for_news()

    async def wait_for_message(self) -> None:
        """Wait until `receive` would return at once, or raise as it would."""
        await self._wait_for_news()

    def keep_alive(self, heartbeat_s: float, silent_after_s: float) -> None:
        """Send a heartbeat whenever nothing else was sent for `heartbeat_s` seconds, from now on.

        The connection ends with `PeerError` when nothing arrived for `silent_after_s` seconds.
        """
        self._heartbeat_s, self._silent_after_s = heartbeat_s, silent_after_s
        self._last_received = self._loop.time()
        self._beat()

    def accept_peer(self, limits: Limits | None = None, allocate: Allocate | None = None) -> None:
        """Lift the limits for strangers once the peer has shown who it is."""
        self._place.leave()
        self._inbox.limits = limits or self._protocol.limits
        if allocate is not None:
            self._inbox.allocate = allocate

    def expect_message(self, within_s: float) -> None:
        """End the connection with `PeerError` unless a whole message arrives within so many seconds of connecting."""

        def too_late() -> None:
            if not self._any_message:
                self._end(
                    PeerError(f"{self.peer} sent no whole message within {within_s:g} s of connecting"),
                    abort=True,
                )

        spent_s = self._loop.time() - self._place.since if self._place.since else 0.0  # on a TLS handshake
        self._first_message_timer = self._loop.call_later(max(0.0, within_s - spent_s), too_late)

    async def close(self, reason: str) -> None:
        """Say goodbye and close, within about `linger_s` seconds. Sends under way raise `ClosedError`."""
        self._end(ClosedError(f"the connection to {self.peer} was closed here: {reason}"), last=_goodbye(reason))
        if self._transport is None:
            return
        try:
            await asyncio.shield(self._lost)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once, without a goodbye."""
        self._end(ClosedError(f"the connection to {self.peer} was dropped here"), abort=True)

    # --- receiving; the names are those of `asyncio.BufferedProtocol`, whose calls are passed on

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start on a connected socket."""
        self._transport = transport
        self._place.end = self.abort
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer_host, self.peer = str(name[0]), address_text(name[0], name[1])
        else:
            self.peer = str(name or "an unnamed socket")
        here = transport.get_extra_info("sockname")
        if isinstance(here, tuple):
            self.local_host = str(here[0])
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            prepare_socket(raw)
        self._over_tls = transport.get_extra_info("ssl_object") is not None
        self._sender.start(transport)
        self._last_received = self._loop.time()

    def get_buffer(self, _size_hint: int) -> memoryview:
        """Return where the next bytes go: tensor bytes straight into their array, whole small messages in one piece."""
        self._in_scratch = self._error is not None or self._inbox.between_frames
        return self._scratch if self._in_scratch else self._inbox.next_buffer()

    def buffer_updated(self, count: int) -> None:
        """Take `count` bytes received into the buffer."""
        self._last_received = self._loop.time()
        self.bytes_received += count
        if self._error is not None:
            return
        received: list[ReceivedMessage] = []
        broken: Exception | None = None
        try:
            if self._in_scratch:
                self._inbox.feed(self._scratch[:count], received)
            else:
                received = self._inbox.filled(count)
        except Exception as error:  # noqa: BLE001 - a hook may raise anything; receive() raises it again
            broken = error
        self._take(received)
        if broken is not None:
            self._dismiss(broken)

    def _dismiss(self, error: Exception) -> None:
        self._end(_with_peer(error, self.peer), last=self.dismissal(str(error)[:_REASON_MOST]))

    def _take(self, received: list[ReceivedMessage]) -> None:
        for item in received:
            if self._error is not None:
                return  # a handler ended the connection
            if isinstance(item.message, Heartbeat):
                self.heartbeats_received += 1
                if self._first_message_timer is not None and not self._any_message:
                    self._dismiss(RemoteProtocolError("expected a greeting as the first message, found a heartbeat"))
            elif isinstance(item.message, Goodbye):
                self._end(ClosedError(f"{self.peer} said goodbye: {item.message.reason}"))
                return
            elif self._handler is not None:
                self._any_message = True
                try:
                    self._handler(item.message)
                except RemoteProtocolError as error:
                    self._dismiss(error)
                except Exception as error:
                    log.exception("handling %s of %s failed", type(item.message).__name__, self.peer)
                    self._end(error, last=_goodbye("internal error of this side"))
            else:
                self._any_message = True
                self._unread.append(item)
                self._unread_bytes += item.nbytes
        if received and self._handler is None:
            self._news.set()
            if self._is_full() and not self._reading_paused and self._transport is not None:
                self._reading_paused = True
                self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the socket is gone."""
        self._place.leave()
        lost = self._inbox.unfinished() if self._error is None else None
        why = f": {error}" if error else ""
        if lost:
            what = f" in the middle of what it sent: {lost}"
        elif self.bytes_received:
            what = " without a goodbye"
        elif self._over_tls:
            what = " before it sent anything"
        else:
            what = " before it sent anything; if it is a gateway with TLS, an invite token is needed"
        self._transport = None
        self._end(PeerError(f"{self.peer} closed the connection{what}{why}"))
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        if not self._lost.done():
            self._lost.set_result(None)

    def _is_full(self) -> bool:
        return len(self._unread) >= self._tuning.unread_messages or self._unread_bytes >= self._tuning.unread_bytes

    async def _wait_for_news(self) -> None:
        while not self._unread:
            self._raise_if_over()
            self._news.clear()
            await self._news.wait()

    def pause_writing(self) -> None:
        """Stop writing: the socket takes no more."""
        self._sender.pause()

    def resume_writing(self) -> None:
        """Go on writing: the socket took everything."""
        self._sender.resume()

    def _give_up_posting(self) -> None:
        text = f"{self.peer} does not read its messages: {self._sender.posted_bytes} bytes wait for it"
        self._end(PeerError(text), abort=True)

    def _on_stall(self) -> None:
        stall_s = self._tuning.write_stall_s
        text = f"{self.peer} took no bytes for {stall_s:g} s although a message was waiting for it"
        self._end(PeerError(text), abort=True)

    # --- life and death

    def _beat(self) -> None:
        if self._error is not None or self._transport is None:
            return
        now = self._loop.time()
        sender = self._sender
        if sender.idle and now - sender.last_sent >= self._heartbeat_s:
            sender.post(Heartbeat())
        silent_s = now - self._last_received
        if silent_s >= self._silent_after_s and not self._reading_paused:
            text = f"{self.peer} was silent for {silent_s:.1f} s; a peer that lives sends something every "
            last = self.dismissal(f"it was silent for {silent_s:.1f} s")
            self._end(PeerError(f"{text}{self._heartbeat_s:g} s"), last=last)
            return
        beat_at = sender.last_sent + self._heartbeat_s if sender.idle else now + self._heartbeat_s
        next_at = beat_at if self._reading_paused else min(beat_at, self._last_received + self._silent_after_s)
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = self._loop.call_later(max(next_at - now, 0.001), self._beat)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _end(self, error: Exception, *, last: Message | None = None, abort: bool = False) -> None:
        """End the connection for `error` unless it has ended, and tell the peer `last`; `abort` also cuts a lingering
        end short.
        """
        first = self._error is None
        can_part = False
        if first:
            self._error = error
            self._news.set()
            for timer in (self._beat_timer, self._first_message_timer):
                if timer is not None:
                    timer.cancel()
            can_part = self._sender.stop(error, last)
        transport = self._transport
        if transport is None:
            return
        if abort or (first and not can_part):
            transport.abort()
        elif first:
            self._linger_timer = self._loop.call_later(self._tuning.linger_s, transport.abort)
            if last is None:
                transport.close()
                return
            # A socket closed with unread bytes resets the farewell away, so late bytes are read and
            # dropped.
            if self._reading_paused:
                transport.resume_reading()
            if transport.can_write_eof():
                try:
                    transport.write_eof()
                except OSError:  # the peer reset the connection, and the event loop has not noticed yet
                    transport.abort()


def _goodbye(reason: str) -> Message:
    return Goodbye(reason=reason[:_REASON_MOST])


def _with_peer(error: Exception, peer: str) -> Exception:
    if isinstance(error, ProtocolError | ResourceError):
        return type(error)(f"{peer}: {error}")
    return error


class ConnectionProtocol(asyncio.BufferedProtocol):
    """Passes the event loop's calls on to a connection; `on_made` is called once it is connected."""

    def __init__(self, connection: Connection, on_made: Callable[[Connection], None] = lambda _: None) -> None:
        self._connection = connection
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise AssertionError(f"{transport!r} cannot be read and written")
        self._connection.connection_made(transport)
        self._on_made(self._connection)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connection.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.buffer_updated(nbytes)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
