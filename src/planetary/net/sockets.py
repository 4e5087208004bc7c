"""Sockets of the operating system, set up alike for every connection of planetary."""

from __future__ import annotations

import errno
import os
import socket
from asyncio.trsock import TransportSocket

from planetary.core.errors import PlanetaryError, ResourceError, UserError
from planetary.net.addresses import address_text, port_holder, resolve_listen_address

_BACKLOG = 256


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen. Raises `UserError` for an address that is not this machine's, `ResourceError` naming a port's holder."""
    family, address = resolve_listen_address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # lets a restarted server have its port back; elsewhere it would let two share it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address[0] != "::" else 0)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _listen_error(host, port, error) from None
    return sock


def prepare(sock: socket.socket | TransportSocket) -> None:
    """Send small frames at once, and notice machines that vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _listen_error(host: str, port: int, error: OSError) -> PlanetaryError:
    where = address_text(host, port)
    if error.errno == errno.EADDRINUSE:
        holder = port_holder(port) or "another process (its name is hidden from this user)"
        return ResourceError(
            f"cannot listen on {where}: the port is in use by {holder}. Stop it, choose another port "
            f"(e.g. {port + 1 if port < 65535 else 18010}), or port 0 for any free one"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ResourceError(f"cannot listen on {where}: this user may not use the port. Choose one above 1023")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"cannot listen on {where}: the address is not one of this machine's")
    return ResourceError(f"cannot listen on {where}: {error}")
