"""How bulk connections are made: `SOCKETS` is the real way; the simulator passes another `BulkNetwork`."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Protocol

from planetary.collectives.transport.sockets import (
    DataConnection,
    DataSocket,
    SocketOptions,
    dial,
    listen,
    near_options,
    prepare,
)
from planetary.collectives.transport.tls import wrap_to_peer


class Incoming(Protocol):
    """A connection that was accepted, of a stranger.

    Attributes:
        host: numeric address of the stranger.
        address: the same with the port, for people.
    """

    @property
    def host(self) -> str: ...

    @property
    def address(self) -> str: ...

    def open(self, tls: ssl.SSLContext | None, options: SocketOptions, deadline: float) -> DataConnection:
        """Prepare the connection, with a TLS handshake until monotonic time `deadline`. Raises `OSError`."""
        ...

    def end(self) -> None:
        """End the connection; a thread that waits for it wakes."""
        ...

    def close(self) -> None:
        """Close the connection where `open` did not return."""
        ...


class BulkListener(Protocol):
    """A listening socket for bulk connections."""

    @property
    def port(self) -> int: ...

    def accept(self) -> Incoming:
        """Wait for a connection. Raises `OSError`, also when the listener is closed meanwhile."""
        ...

    def close(self) -> None:
        """Stop listening; `accept` wakes."""
        ...


class BulkNetwork(Protocol):
    """Dials and listens, in threads that may wait."""

    def dial(
        self, host: str, port: int, timeout_s: float, options: SocketOptions, certificate: str | None
    ) -> DataConnection:
        """Connect, to a peer with this certificate (a fingerprint); None: without TLS.

        Raises `PeerError`, `TrustError`.
        """
        ...

    def listen(self, host: str, port: int) -> BulkListener:
        """Listen. Raises `UserError`."""
        ...


class AcceptedSocket:
    """An accepted bulk connection over a socket."""

    def __init__(self, sock: socket.socket, address: tuple[str, int]) -> None:
        self._sock = sock
        self.host, self.address = str(address[0]), f"{address[0]}:{address[1]}"

    def open(self, tls: ssl.SSLContext | None, options: SocketOptions, deadline: float) -> DataConnection:
        sock = self._sock
        near = sock.getpeername()[0] == sock.getsockname()[0]
        prepare(sock, near_options(options) if near else options)
        if tls is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))  # for the whole handshake
            self._sock = sock = tls.wrap_socket(sock, server_side=True)
        return DataSocket(sock)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class ListeningSocket:
    """A bulk listener over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.port = int(sock.getsockname()[1])

    def accept(self) -> Incoming:
        sock, address = self._sock.accept()
        return AcceptedSocket(sock, address)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Sockets:
    """Sockets of the operating system; see `BulkNetwork`."""

    def dial(
        self, host: str, port: int, timeout_s: float, options: SocketOptions, certificate: str | None
    ) -> DataConnection:
        sock = dial(host, port, timeout_s, options.source)
        try:
            prepare(sock, options)
            if certificate is not None:
                sock.settimeout(timeout_s)
                sock = wrap_to_peer(sock, certificate)
            return DataSocket(sock)
        except BaseException:
            sock.close()
            raise

    def listen(self, host: str, port: int) -> BulkListener:
        return ListeningSocket(listen(host, port))


SOCKETS: BulkNetwork = Sockets()
"""Sockets of the operating system."""
