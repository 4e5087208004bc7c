"""Listens for peers and hands each one that speaks the protocol to a callback."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from planetary.core.errors import PlanetaryError, UserError
from planetary.net.addresses import is_loopback, resolve_listen_address
from planetary.net.connection import Connection, ConnectionProtocol, Dismissal, Tuning
from planetary.net.network import TCP, Listener, Network
from planetary.net.session import Refused
from planetary.net.strangers import Door, Place, StrangerLimits
from planetary.wire.limits import STRANGER, Limits
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Allocate, allocate_any

log = logging.getLogger(__name__)

OnConnection = Callable[[Connection], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits on a server's cost for strangers."""

    connections: int = 1024  # connections at the same time, strangers after their TLS handshake included
    strangers: StrangerLimits = field(default=StrangerLimits())  # limits until `Connection.accept_peer` is called
    messages: Limits = field(default=STRANGER)  # message limits of a stranger


class Server:
    """A listening socket and the connections. Made by `serve`.

    Attributes:
        host, port: the numeric address listened on; the port is the real one when 0 was asked for.
    """

    def __init__(
        self,
        on_connection: OnConnection,
        protocol: Protocol,
        limits: ServerLimits,
        allocate: Allocate,
        tuning: Tuning | None,
        *,
        network: Network,
        dismissal: Dismissal | None,
    ) -> None:
        self.host = ""
        self.port = 0
        self._on_connection = on_connection
        self._protocol = protocol
        self._limits = limits
        self._allocate = allocate
        self._tuning = tuning
        self._dismissal = dismissal
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._network = network
        self._door = Door(limits.strangers)
        self._listener: Listener | None = None

    @property
    def connections(self) -> int:
        """Number of connections that are up."""
        return len(self._tasks)

    @property
    def strangers(self) -> int:
        """Number of connections, those in their TLS handshake included, that have not shown who they are."""
        return self._door.strangers

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None, *, allow_unencrypted: bool) -> None:
        """Begin to listen; see `serve`."""
        if tls is None and not allow_unencrypted and not is_loopback(resolve_listen_address(host, port)[1][0]):
            raise UserError(
                f"refusing to listen on {host!r} without TLS: anybody on the network could take part, read and change "
                "what is sent. Listen on 127.0.0.1, or show the certificate of an authority (`Authority`)"
            )
        self._listener = await self._network.listen(self._accept, host, port, tls, self._door)
        self.host, self.port = self._listener.address

    async def close(self, reason: str = "the server stops") -> None:
        """Stop listening, say goodbye to every peer, and wait until their callbacks have ended."""
        if self._listener is not None:
            self._listener.close()
        await asyncio.gather(*(connection.close(reason) for connection in self._tasks.values()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            await self._listener.wait_closed()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self, place: Place) -> asyncio.BaseProtocol:
        connection = Connection(
            self._protocol, limits=self._limits.messages, allocate=self._allocate, tuning=self._tuning, place=place
        )
        if self._dismissal is not None:
            connection.dismissal = self._dismissal
        return ConnectionProtocol(connection, self._welcome)

    def _welcome(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._attend(connection))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _attend(self, connection: Connection) -> None:
        if len(self._tasks) > self._limits.connections:
            await self._turn_away(connection)
            return
        connection.expect_message(self._limits.strangers.introduction_s)
        try:
            await connection.wait_for_message()
        except PlanetaryError as error:
            # Port scanners, broken or old clients are worth a line; silent ones have only looked at the
            # certificate, as every client does the first time.
            log.log(logging.INFO if connection.bytes_received else logging.DEBUG, "a stranger left: %s", error)
            return
        try:
            await self._on_connection(connection)
        except PlanetaryError as error:
            log.info("connection to %s ended: %s", connection.peer, error)
            await connection.close(str(error))
        except Exception:
            log.exception("the callback for %s failed", connection.peer)
            await connection.close("internal error of the server")
        else:
            await connection.close("done")
        finally:
            connection.abort()

    async def _turn_away(self, connection: Connection) -> None:
        text = f"the server has its {self._limits.connections} connections; try again later"
        try:
            async with asyncio.timeout(self._limits.strangers.introduction_s):
                await connection.send(Refused(code="busy", reason=text, retry=True))
        except (TimeoutError, PlanetaryError):
            connection.abort()
        await connection.close(text)


async def serve(
    host: str,
    port: int,
    on_connection: OnConnection,
    protocol: Protocol,
    *,
    tls: ssl.SSLContext | None = None,
    limits: ServerLimits | None = None,
    allocate: Allocate = allocate_any,
    tuning: Tuning | None = None,
    network: Network = TCP,
    allow_unencrypted: bool = False,
    dismissal: Dismissal | None = None,
) -> Server:
    """Listen on `host` (loopback: "127.0.0.1") and `port` (0: any free one); return the running server.

    `on_connection` runs as a separate task for each peer whose first message arrived; that message is still to be
    received. When it returns or raises, the connection is closed. Until it calls `accept_peer` the peer may send small
    messages without tensors only.

    `allow_unencrypted`: listen without TLS on other addresses than loopback, too; the caller has warned the user.
    `dismissal`: the last message to strangers that break the protocol; a goodbye by default.

    Raises `ResourceError` when the port is in use (it names the holder where the system tells) or may not be
    used, `UserError` when the address is not this machine's, or is not loopback while `tls` is None, unless that is
    allowed.
    """
    server = Server(
        on_connection, protocol, limits or ServerLimits(), allocate, tuning, network=network, dismissal=dismissal
    )
    await server.start(host, port, tls, allow_unencrypted=allow_unencrypted)
    return server
