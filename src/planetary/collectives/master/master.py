"""The master as a running thing: a server of `net` and the journal around `MasterMachine`, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeGuard, get_args

import msgspec

from planetary.artifacts.durable_files import DISK, DurableFiles
from planetary.artifacts.jsonl import JsonLinesWriter, read_json_lines, with_checksum
from planetary.collectives.master.events import Record, Solve, Solved
from planetary.collectives.master.machine import MasterMachine
from planetary.collectives.master.ring_order import solve
from planetary.collectives.protocol import messages as m
from planetary.collectives.transport.ports import HERE, Ports
from planetary.collectives.transport.sockets import parse_address
from planetary.core.errors import (
    LocalProtocolError,
    PlanetaryError,
    RemoteProtocolError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.core.threads import Queue
from planetary.machine.events import Append, Close, Closed, Event, Instruction, Received, Send, Tick
from planetary.net.addresses import address_text, is_loopback
from planetary.net.authority import Authority
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, judge_hello
from planetary.net.loop_thread import BackgroundLoop
from planetary.net.server import Server, ServerLimits, serve
from planetary.net.strangers import StrangerLimits
from planetary.version import __version__
from planetary.wire.message import Message
from planetary.wire.streams import refuse_tensors

_COMPACT_LINES = 20_000


class Journal:
    """The master's records across a restart, one JSON object per line, each appended before a member learns of it.

    The file survives the death of the process, not a power cut: nothing waits for the disk.
    """

    def __init__(self, path: Path, files: DurableFiles = DISK) -> None:
        """Open or create `path`. Raises `ResourceError` when it cannot be written, `TrustError` when it is damaged."""
        self._path, self._files = path, files
        with self._as_resource():
            files.make_folder(path.parent)
        try:
            self.records: list[Record] = list(read_json_lines(path, Record, checksums=True)) if path.exists() else []
        except UserError as error:
            raise TrustError(f"{error}; delete the file to start anew") from None
        self._writer = JsonLinesWriter(path, files, checksums=True)
        self._lines = len(self.records)

    def append(self, record: msgspec.Struct) -> None:
        """Add a record. Raises `ResourceError`."""
        self._writer.append(record)
        self._lines += 1

    @property
    def long(self) -> bool:
        """Whether `rewrite` would make it much shorter."""
        return self._lines > _COMPACT_LINES

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace all by an equal, shorter story. Raises `ResourceError`."""
        lines = [with_checksum(msgspec.json.encode(record)) + b"\n" for record in records]
        temporary = self._path.with_name(f".{self._path.name}.new")
        with self._as_resource():
            self._files.write_file(temporary, lines)
            self._files.replace(temporary, self._path)
        self._writer.close()
        self._writer = JsonLinesWriter(self._path, self._files, checksums=True)
        self._lines = len(lines)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    @contextlib.contextmanager
    def _as_resource(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ResourceError(f"cannot keep the master's journal in {self._path}: {error}") from None


log = logging.getLogger(__name__)

_HEARD = frozenset(get_args(m.FromPeer))  # asked of each message: a union takes ten times as long
_FIRST_MESSAGE_S = 10.0
_LINGER_S = 2.0  # time for a dismissed peer to read the reason


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
        revoked: Container[str] = frozenset(),
        invites_lapse: bool = True,
        journal: Path | None = None,
        grace_s: float = 15.0,
        alive_s: float = 1.0,
        silent_s: float = 10.0,
        connections_most: int = 1024,
        allow_unencrypted: bool = False,
        remeasure_s: float = 10.0,
        ports: Ports | None = None,
    ) -> None:
        """Prepare; `start` listens.

        `authority`: certificates and tokens, as the gateway has them; without it only loopback is listened on and no
        peer needs a token. `revoked` has the ids of invites that are no longer welcome. `invites_lapse` False: an
        invite that has expired is as good, where another server decides who takes part. `journal`: a file from which a
        restarted master goes on; members have `grace_s` seconds to return. A peer that was silent for `silent_s`
        seconds is lost. `allow_unencrypted`: listen without an authority on other addresses than loopback, too, where
        every host on the network may join, read and change. `remeasure_s`: seconds from one measurement of a link in
        the background to the next, in each group of three and more peers on several machines; 0 for none.
        `ports`: the machine the master runs on, by default the real one; the simulator passes another one.
        """
        self._host, self._port = parse_address(listen_address)
        self._authority, self._revoked, self._invites_lapse = authority, revoked, invites_lapse
        self._journal_path, self._grace_s = journal, grace_s
        self._most = connections_most
        self._allow_unencrypted = allow_unencrypted
        self.encrypted = authority is not None
        self.on_loopback = False
        self._ports = ports = ports or HERE
        self._now = ports.clock.monotonic
        self._machine = MasterMachine(
            ports.draw_id,
            alive_s=alive_s,
            silent_s=silent_s,
            peers_most=connections_most,
            remeasure_s=remeasure_s,
        )
        self._journal: Journal | None = None
        self._server: Server | None = None
        self._connections: dict[int, Connection] = {}
        self._count = 0
        self._parting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: BackgroundLoop | None = None
        self._problems: Queue[Solve | None] = ports.threads.queue()
        self.address = ""

    def start(self) -> None:
        """Listen, and serve in a separate thread. Raises `UserError` for an address that cannot be used."""
        if self._loop is not None:
            raise UserError("the master was started already")
        loop = self._ports.start_loop("planetary collectives master")
        try:
            loop.call(self._open())
        except BaseException as error:
            loop.stop(_LINGER_S)
            if isinstance(error, ResourceError):  # the port is taken: the address is an option of the user's
                raise UserError(str(error)) from None
            raise
        self._loop = loop
        self._ports.threads.start("planetary ring order", partial(self._solve, loop))

    def stop(self) -> None:
        """Close every connection and end the thread."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        with contextlib.suppress(PlanetaryError):  # it ended by itself
            loop.call(self._close())
        loop.stop(_LINGER_S + 5)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the master has stopped; false when it has not within `timeout_s` seconds."""
        loop = self._loop
        return loop is None or loop.wait(timeout_s)

    def __enter__(self) -> Master:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- in the thread

    async def _open(self) -> None:
        authority = self._authority
        server = await serve(
            self._host,
            self._port,
            self._attend,
            m.COLLECTIVES,
            tls=authority.server_context() if authority is not None else None,
            limits=ServerLimits(
                connections=self._most,
                strangers=StrangerLimits(introduction_s=_FIRST_MESSAGE_S),
                messages=m.STRANGER,
            ),
            allocate=refuse_tensors,
            network=self._ports.network,
            allow_unencrypted=self._allow_unencrypted,
            dismissal=lambda reason: m.Refused(code="protocol", reason=reason),
        )
        # No peer has connected yet: the event loop had no turn since the port was taken.
        try:
            self.on_loopback = is_loopback(server.host)
            self.address = address_text(server.host, server.port)
            if self._journal_path is not None:
                self._journal = Journal(self._journal_path, self._ports.files)
                self._machine.restore(self._journal.records, self._now(), self._grace_s)
                self._journal.rewrite(self._machine.records())
        except BaseException:
            await server.close()
            raise
        self._server = server
        self._set_timer()

    async def _close(self) -> None:
        self._problems.put(None)
        server, self._server = self._server, None
        self._connections.clear()  # no loss is reported to the machine: members may return to the next master
        if server is not None:
            await server.close("the master stops")
        if self._timer is not None:
            self._timer.cancel()
        if self._journal is not None:
            self._journal.close()

    async def _attend(self, connection: Connection) -> None:
        """Serve a peer or stranger whose first message has come."""
        self._count += 1
        number = self._count
        self._connections[number] = connection
        try:
            await connection.hand_over(partial(self._received, number, connection))
        except PlanetaryError as error:
            if self._connections.pop(number, None) is not None:
                self._handle(Closed(number, str(error)))
            raise

    def _received(self, number: int, connection: Connection, message: Message) -> None:
        if number not in self._connections:
            return  # it is to go
        if not _is_heard(message):
            raise RemoteProtocolError(f"expected a peer's message, found {type(message).__name__}")
        if isinstance(message, m.Register):
            refusal = self._judge(message)
            if refusal is not None:
                self._carry_out(Send(number, refusal))
                self._carry_out(Close(number, refusal.reason))
                return
        self._handle(Received(number, message, host=connection.peer_host))

    def _judge(self, hello: m.Register) -> m.Refused | None:
        tokens = None
        if (authority := self._authority) is not None:
            tokens = TokenCheck(
                secret=authority.invite_secret,
                authority_fingerprint=authority.fingerprint,
                revoked=self._revoked,
                lapses=self._invites_lapse,
            )
        return judge_hello(
            hello,
            m.PROTOCOL,
            welcome=None,  # it is the machine's
            software=__version__,
            tokens=tokens,
            now=self._ports.clock.wall(),
            server="master",
        )

    def _handle(self, event: Event) -> None:
        if self._server is None:
            return  # it stops
        try:
            instructions = self._machine.handle(event, self._now())
            self._ports.observe(self._machine, event, instructions)
            for instruction in instructions:
                self._carry_out(instruction)
            if self._journal is not None and self._journal.long:
                self._journal.rewrite(self._machine.records())
        except Exception:
            log.exception("the master failed; it stops")
            self._fail()
            return
        self._set_timer()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send(number, message):
                connection = self._connections.get(number)
                if connection is not None:
                    self._send(number, connection, message)
            case Close(number, reason):
                connection = self._connections.pop(number, None)
                if connection is not None:
                    log.info("closing the connection of %s: %s", connection.peer, reason)
                    task = asyncio.get_running_loop().create_task(self._part(connection, reason))
                    self._parting.add(task)
                    task.add_done_callback(self._parting.discard)
            case Append(record):
                if self._journal is not None:
                    self._journal.append(record)
            case Solve():
                self._problems.put(instruction)

    def _send(self, number: int, connection: Connection, message: Message) -> None:
        if isinstance(message, m.Registered):
            connection.accept_peer()
            connection.dismissal = _remove
        try:
            connection.post(message)
        except LocalProtocolError as error:
            log.error("a message to %s could not be sent: %s", connection.peer, error)
            del self._connections[number]
            connection.abort()
            asyncio.get_running_loop().call_soon(self._handle, Closed(number, str(error)))
        except PlanetaryError:
            return  # `_attend` reports the end of the connection
        if isinstance(message, m.Registered):
            connection.keep_alive(message.heartbeat_s, message.silent_after_s)

    @staticmethod
    async def _part(connection: Connection, reason: str) -> None:
        """Close once queued messages are sent, or after a short wait."""
        with contextlib.suppress(PlanetaryError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await connection.send(m.Goodbye(reason=reason))  # behind everything else
        await connection.close(reason)

    def _set_timer(self) -> None:
        """Have a `Tick` when the machine has something to do."""
        deadline = self._machine.next_deadline()
        if self._server is None or deadline is None:
            return
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= self._now():
            self._handle(Tick())
        else:
            self._set_timer()

    def _fail(self) -> None:
        """End as `stop` does, from within; `wait` returns."""
        if self._server is None or self._loop is None:
            return
        task = asyncio.get_running_loop().create_task(self._close())
        self._parting.add(task)
        loop = self._loop
        task.add_done_callback(lambda _: loop.stop(_LINGER_S))

    def _solve(self, loop: BackgroundLoop) -> None:
        """Solve problems, one after the other, until there is None.

        A thread of the master's whole life: Python 3.12 starts none while a program ends, and a master may serve then.
        """
        while (problem := self._problems.get()) is not None:
            try:
                ring = solve(problem.costs)
            except Exception:
                log.exception("no ring was found for the %d peers of group %d", len(problem.peers), problem.group)
                ring = None  # as where no ring is possible: the old one stays
            loop.post(self._handle, Solved(problem.group, problem.peers, ring, problem.purpose))


def _remove(reason: str) -> m.Removed:
    return m.Removed(reason=reason)


def _is_heard(message: Message) -> TypeGuard[m.FromPeer]:
    return type(message) in _HEARD
