"""A peer's control connection to the master: whole messages both ways, plain on loopback or TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import threading

from planetary.collectives.protocol.messages import FROM_MASTER, FROM_PEER, MEMBER, FromMaster
from planetary.collectives.transport.sockets import Deadline, dial
from planetary.collectives.transport.tls import TlsLayer, master_context
from planetary.core.errors import PeerError, UserError
from planetary.net.addresses import is_loopback
from planetary.net.client import Trust
from planetary.wire.inbox import Inbox, refuse_tensors
from planetary.wire.message import Message
from planetary.wire.outbox import Outbox

_SEND_S = 10.0


class ControlStream:
    """Any thread may send; one thread receives."""

    def __init__(
        self, host: str, port: int, trust: Trust, timeout_s: float, *, allow_unencrypted: bool = False
    ) -> None:
        """Connect. Raises `PeerError`, `TrustError`, or `UserError` for a plain connection off this machine, unless
        `allow_unencrypted`.
        """
        deadline = Deadline(timeout_s)
        where = f"{host}:{port}"
        self._tls: TlsLayer | None = None
        self._lock = threading.Lock()
        self._inbox = Inbox(FROM_MASTER, MEMBER, refuse_tensors)
        self._outbox = Outbox(FROM_PEER, MEMBER)
        self._early: list[FromMaster] = []
        self._arriving = memoryview(bytearray(256 << 10))
        if trust.invite is not None:
            first = dial(host, port, timeout_s) if trust.authority is None else None
            if first is not None:
                first.settimeout(deadline.left or 0.001)
            try:
                context = master_context(first, trust, where)
            finally:
                if first is not None:
                    first.close()
            self._tls = TlsLayer(context, server=False)
        self._sock = dial(host, port, max(deadline.left, 0.001))
        try:
            self.local_host = str(self._sock.getsockname()[0])
            self.on_loopback = is_loopback(str(self._sock.getpeername()[0]))
            if self._tls is None and not self.on_loopback and not allow_unencrypted:
                raise UserError(
                    f"refusing to talk to {where} without TLS: it is not this machine. Give token=, the invite of the "
                    "master"
                )
            self._sock.setblocking(False)
            self._reads = select.poll()
            self._reads.register(self._sock, select.POLLIN)
            self._writes = select.poll()
            self._writes.register(self._sock, select.POLLOUT)
            if self._tls is not None:
                self._shake_hands(deadline)
        except BaseException:
            self._sock.close()
            raise

    def send(self, message: Message) -> None:
        """Send a message. Raises `PeerError` when the connection is over or takes nothing for a while."""
        with self._lock:
            data = self._outbox.frame_of(message)
            if self._tls is not None:
                self._tls.send(data)
                data = self._tls.outgoing()
            self._write(data)

    def receive(self, timeout_s: float | None) -> list[FromMaster]:
        """Return what came; an empty list after `timeout_s` seconds. Raises `PeerError` at the end."""
        if self._early:
            early, self._early = self._early, []
            return early
        if not self._reads.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000):
            return []
        return self._take()

    def close(self) -> None:
        """Close; a thread in `receive` wakes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _take(self) -> list[FromMaster]:
        try:
            count = self._sock.recv_into(self._arriving)
        except (BlockingIOError, InterruptedError):
            return []
        except (OSError, ValueError) as error:
            raise PeerError(str(error)) from None
        if not count:
            raise PeerError("it was closed")
        data: memoryview | bytes = self._arriving[:count]
        if self._tls is not None:
            with self._lock:
                data = self._tls.receive(data)
                self._write(self._tls.outgoing())
        return [received.message for received in self._inbox.feed(data)]  # type: ignore[misc]  # the master's only

    def _shake_hands(self, deadline: Deadline) -> None:
        assert self._tls is not None
        self._tls.receive(b"")
        self._write(self._tls.outgoing())
        while not self._tls.ready:
            if not self._reads.poll(deadline.left * 1000):
                raise PeerError("the TLS handshake with the master did not end in time")
            self._early += self._take()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                if not self._writes.poll(_SEND_S * 1000):
                    raise PeerError(f"the master took nothing for {_SEND_S:g} s") from None
            except (OSError, ValueError) as error:
                raise PeerError(str(error)) from None
