"""How connections are made: `TCP` is the real way; the simulator passes another `Network`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol

from planetary.net.authority import SERVER_NAME
from planetary.net.sockets import listening_socket

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class Listener(Protocol):
    """A listening socket."""

    @property
    def address(self) -> tuple[str, int]:
        """Numeric address and port."""
        ...

    def close(self) -> None:
        """Stop listening; connections that were made stay."""
        ...

    async def wait_closed(self) -> None:
        """Wait until it is closed."""
        ...


class Network(Protocol):
    """Dials and listens. Methods belong to the event loop's thread."""

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        """Connect and return the transport of the protocol that `make` returned. Raises `OSError`, `ssl.SSLError`."""
        ...

    async def listen(
        self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None, handshake_s: float
    ) -> Listener:
        """Listen; each connection gets a protocol of `make`, after a TLS handshake of at most `handshake_s` seconds.

        Raises `ResourceError` and `UserError` as `planetary.net.server.serve` says.
        """
        ...


class TcpListener:
    """The `Listener` of `TcpNetwork`."""

    def __init__(self, server: asyncio.Server, address: tuple[str, int]) -> None:
        self.address = address
        self._server = server

    def close(self) -> None:
        """See `Listener`."""
        self._server.close()

    async def wait_closed(self) -> None:
        """See `Listener`."""
        await self._server.wait_closed()


class TcpNetwork:
    """Sockets of the operating system, on the running event loop."""

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        """See `Network`."""
        transport, _ = await asyncio.get_running_loop().create_connection(
            make,
            host,
            port,
            ssl=tls,
            server_hostname=SERVER_NAME if tls is not None else None,
            ssl_shutdown_timeout=1.0 if tls is not None else None,
        )
        return transport

    async def listen(
        self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None, handshake_s: float
    ) -> Listener:
        """See `Network`."""
        sock = listening_socket(host, port)
        try:
            server = await asyncio.get_running_loop().create_server(
                make,
                sock=sock,
                ssl=tls,
                ssl_handshake_timeout=handshake_s if tls is not None else None,
                ssl_shutdown_timeout=1.0 if tls is not None else None,
            )
        except BaseException:
            sock.close()
            raise
        return TcpListener(server, sock.getsockname()[:2])


TCP: Network = TcpNetwork()
