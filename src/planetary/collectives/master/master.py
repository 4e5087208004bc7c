"""The master as a running thing: sockets, TLS and the journal around `MasterMachine`, in one thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from planetary.collectives.master.journal import Journal
from planetary.collectives.master.master_events import Solve, Solved
from planetary.collectives.master.master_machine import MasterMachine
from planetary.collectives.master.ring_order import solve
from planetary.collectives.protocol.messages import FROM_MASTER, FROM_PEER, MEMBER, STRANGER, Register, Rejected
from planetary.collectives.transport.sockets import listen, parse_address, prepare
from planetary.collectives.transport.tls import TlsLayer
from planetary.core.errors import LocalProtocolError, PlanetaryError, RemoteProtocolError, TrustError, UserError
from planetary.machine.events import Append, Close, Closed, Event, Received, Send, Tick
from planetary.net import invite
from planetary.net.addresses import is_loopback
from planetary.net.authority import Authority
from planetary.wire.inbox import Inbox, refuse_tensors
from planetary.wire.message import Message
from planetary.wire.outbox import Outbox

log = logging.getLogger(__name__)

_READ = 256 << 10
_FIRST_MESSAGE_S = 10.0
_UNSENT_MOST = 64 << 20
_LINGER_S = 2.0


class Master:
    """Orchestrates membership and consensus; no bulk data passes through it. Also a context manager.

    Attributes:
        address: `"host:port"` that is listened on, once started.
        encrypted: whether peers need a token and speak TLS.
        on_loopback: whether only this machine can connect; known once started.
    """

    def __init__(
        self,
        listen_address: str = "127.0.0.1:48148",
        *,
        authority: Authority | None = None,
        revoked: Callable[[], frozenset[str]] = frozenset,
        journal: Path | None = None,
        grace_s: float = 15.0,
        alive_s: float = 1.0,
        silent_s: float = 10.0,
        connections_most: int = 1024,
        allow_unencrypted: bool = False,
        remeasure_s: float = 10.0,
    ) -> None:
        """Prepare; `start` listens.

        `authority`: certificates and tokens, as the gateway has them; without it only loopback is listened on and
        nobody needs a token. `revoked` returns ids of invites that are no longer welcome. `journal`: a file from
        which a restarted master goes on; its members have `grace_s` seconds to return. A peer that was silent for
        `silent_s` seconds is lost. `allow_unencrypted`: listen without an authority on other addresses than loopback,
        too, where everybody on the network may join, read and change. `remeasure_s`: seconds from one measurement of
        a link in the background to the next, in each group of three and more peers on several machines; 0 for none.
        """
        self._host, self._port = parse_address(listen_address)
        self._authority, self._revoked = authority, revoked
        self._journal_path, self._grace_s = journal, grace_s
        self._most = connections_most
        self._allow_unencrypted = allow_unencrypted
        self.encrypted = authority is not None
        self.on_loopback = False
        self._machine = MasterMachine(
            lambda: secrets.token_hex(16),
            alive_s=alive_s,
            silent_s=silent_s,
            peers_most=connections_most,
            remeasure_s=remeasure_s,
        )
        self._context: ssl.SSLContext | None = None
        self._journal: Journal | None = None
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._connections: dict[int, _Connection] = {}
        self._count = 0
        self._arriving = memoryview(bytearray(_READ))  # a new object of that size costs more than a message
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._posted: deque[Event] = deque()
        self._problems: queue.SimpleQueue[Solve | None] = queue.SimpleQueue()
        self._wake_receive, self._wake_send = socket.socketpair()
        self.address = ""

    def start(self) -> None:
        """Listen, and serve in a thread of its own. Raises `UserError` for an address that cannot be used."""
        if self._thread is not None:
            raise UserError("the master was started already")
        if self._authority is not None:
            self._context = self._authority.server_context()
        listener = listen(self._host, self._port)
        host, port = listener.getsockname()[:2]
        self.on_loopback = is_loopback(host)
        if not (self.encrypted or self.on_loopback or self._allow_unencrypted):
            listener.close()
            raise UserError(
                f"refusing to listen on {self._host!r} without TLS: anybody on the network could join. Listen on "
                "127.0.0.1, or give authority="
            )
        if self._journal_path is not None:
            self._journal = Journal(self._journal_path)
            self._machine.restore(self._journal.records, time.monotonic(), self._grace_s)
            self._journal.rewrite(self._machine.records())
        listener.setblocking(False)
        self._listener = listener
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wake_receive.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receive, selectors.EVENT_READ)
        threading.Thread(target=self._solve, name="planetary ring order", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="planetary collectives master", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        self._wake()
        thread.join(_LINGER_S + 5)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the master has stopped; false when it has not within `timeout_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- its thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                deadline = self._next_deadline()
                ready = self._selector.select(None if deadline is None else max(deadline - time.monotonic(), 0.0))
                for key, mask in ready:
                    self._ready(key.fileobj, key.data, mask)
                while self._posted:
                    self._handle(self._posted.popleft())
                self._tick()
        finally:
            self._problems.put(None)
            for connection in list(self._connections.values()):
                connection.close()
            self._selector.close()
            if self._listener is not None:
                self._listener.close()
            if self._journal is not None:
                self._journal.close()

    def _next_deadline(self) -> float | None:
        times = [c.deadline for c in self._connections.values() if c.deadline is not None]
        machine = self._machine.next_deadline()
        if machine is not None:
            times.append(machine)
        return min(times, default=None)

    def _ready(self, fileobj: object, connection: _Connection | None, mask: int) -> None:
        if fileobj is self._listener:
            self._accept()
        elif fileobj is self._wake_receive:
            with contextlib.suppress(BlockingIOError):
                self._wake_receive.recv(4096)
        elif connection is not None and connection.number in self._connections:
            try:
                if mask & selectors.EVENT_WRITE:
                    self._flush(connection)
                if mask & selectors.EVENT_READ:
                    self._read(connection)
            except (PlanetaryError, OSError) as error:
                self._lose(connection, str(error))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= self._most:
            sock.close()
            return
        prepare(sock)
        sock.setblocking(False)
        self._count += 1
        tls = TlsLayer(self._context, server=True) if self._context is not None else None
        connection = _Connection(self._count, sock, tls, str(address[0]), time.monotonic() + _FIRST_MESSAGE_S)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            count = connection.sock.recv_into(self._arriving)
        except (BlockingIOError, InterruptedError):
            return
        if not count:
            self._lose(connection, "its connection was closed")
            return
        data: memoryview | bytes = self._arriving[:count]
        if connection.tls is not None:
            data = connection.tls.receive(data)
            connection.unsent += connection.tls.outgoing()
            self._flush(connection)
        for message in self._parse(connection, data):
            if connection.closing:
                return
            if isinstance(message, Register):
                refusal = self._check_token(message)
                if refusal:
                    self._send(connection, Rejected(reason=refusal))
                    self._close(connection)
                    return
                connection.deadline = None
                connection.inbox.limits = MEMBER
            self._handle(Received(connection.number, message, host=connection.where))  # type: ignore[arg-type]

    def _parse(self, connection: _Connection, data: memoryview | bytes) -> list[Message]:
        try:
            return [received.message for received in connection.inbox.feed(data)]
        except RemoteProtocolError as error:
            if connection.deadline is None:
                raise
            # A stranger: whoever speaks another version learns it from the first bytes of the answer.
            log.info("a stranger from %s was turned away: %s", connection.where, error)
            self._send(connection, Rejected(reason=str(error)))
            self._close(connection)
            return []

    def _check_token(self, hello: Register) -> str:
        if self._authority is None:
            return ""
        try:
            invite.verify(
                hello.token,
                self._authority.invite_secret,
                self._authority.fingerprint,
                role="worker",
                now=time.time(),
                revoked=self._revoked(),
            )
        except TrustError as error:
            return str(error)
        return ""

    def _handle(self, event: Event) -> None:
        for instruction in self._machine.handle(event, time.monotonic()):
            match instruction:
                case Send(number, message):
                    connection = self._connections.get(number)
                    if connection is not None:
                        self._send(connection, message)
                case Close(number, reason):
                    connection = self._connections.get(number)
                    if connection is not None:
                        log.info("closing the connection of %s: %s", connection.where, reason)
                        self._close(connection)
                case Append(record):
                    if self._journal is not None:
                        self._journal.append(record)
                case Solve():
                    self._problems.put(instruction)
        if self._journal is not None and self._journal.long:
            self._journal.rewrite(self._machine.records())

    def _solve(self) -> None:
        """Solve problems, one after the other, until there is None.

        A thread of the master's whole life: Python 3.12 starts none while a program ends, and a master may serve then.
        """
        while (problem := self._problems.get()) is not None:
            try:
                ring = solve(problem.costs)
            except Exception:
                log.exception("no ring was found for the %d peers of group %d", len(problem.peers), problem.group)
                ring = None  # as where no ring is possible: the old one stays
            self._posted.append(Solved(problem.group, problem.peers, ring, problem.purpose))
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_send.send(b"x")

    def _tick(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.deadline is not None and connection.deadline <= now:
                self._lose(connection, "it did not register in time" if not connection.closing else "closed")
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= now:
            self._handle(Tick())

    def _send(self, connection: _Connection, message: Message) -> None:
        if connection.closing:
            return
        try:
            data = connection.outbox.frame_of(message)
        except LocalProtocolError as error:
            log.error("a message to %s could not be sent: %s", connection.where, error)
            self._forget(connection)
            self._posted.append(Closed(connection.number, str(error)))
            return
        if connection.tls is not None:
            connection.tls.send(data)
            data = connection.tls.outgoing()
        connection.unsent += data
        if len(connection.unsent) > _UNSENT_MOST:
            self._forget(connection)
            self._posted.append(Closed(connection.number, "it does not read what it is told"))
            return
        with contextlib.suppress(OSError):  # the next read says so too
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                count = connection.sock.send(connection.unsent)
            except (BlockingIOError, InterruptedError):
                break
            del connection.unsent[:count]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if wanted != connection.mask:
            connection.mask = wanted
            self._selector.modify(connection.sock, wanted, connection)
        if connection.closing and not connection.unsent:
            self._forget(connection)

    def _close(self, connection: _Connection) -> None:
        """Close after what is unsent, or soon."""
        connection.closing = True
        connection.deadline = time.monotonic() + _LINGER_S
        if not connection.unsent:
            self._forget(connection)

    def _lose(self, connection: _Connection, reason: str) -> None:
        if connection.number in self._connections:
            self._forget(connection)
            self._handle(Closed(connection.number, reason))

    def _forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._selector.unregister(connection.sock)
            connection.close()


class _Connection:
    """One peer's, or a stranger's."""

    def __init__(self, number: int, sock: socket.socket, tls: TlsLayer | None, where: str, deadline: float) -> None:
        self.number, self.sock, self.tls, self.where = number, sock, tls, where
        self.deadline: float | None = deadline  # for the first message, or for the rest of a goodbye
        self.inbox = Inbox(FROM_PEER, STRANGER, refuse_tensors)
        self.outbox = Outbox(FROM_MASTER, MEMBER)
        self.unsent = bytearray()
        self.mask = selectors.EVENT_READ
        self.closing = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()
