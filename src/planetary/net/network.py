"""How connections are made: `TCP` is the real way; the simulator passes another `Network`."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from planetary.core.errors import PlanetaryError, ResourceError, UserError
from planetary.net.addresses import port_holder, resolve_listen_address
from planetary.net.authority import SERVER_NAME

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
        sock = _listening_socket(host, port)
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


def _listening_socket(host: str, port: int) -> socket.socket:
    family, address = resolve_listen_address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # lets a restarted gateway have its port back; elsewhere it would let two share it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address[0] != "::" else 0)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _listen_error(host, port, error) from None
    return sock


def _listen_error(host: str, port: int, error: OSError) -> PlanetaryError:
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port) or "another process (its name is hidden from this user)"
        return ResourceError(
            f"cannot listen on {host}:{port}: the port is in use by {holder}. Stop it, choose another port "
            f"(e.g. {port + 1 if port < 65535 else 18010}), or port 0 for any free one"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(f"cannot listen on {host}:{port}: this user may not use the port. Choose one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"cannot listen on {host}:{port}: the address is not one of this machine's")
    return ResourceError(f"cannot listen on {host}:{port}: {error}")
