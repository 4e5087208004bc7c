"""Host names, addresses, ports, and the sockets that are bound and connected with them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from asyncio.trsock import TransportSocket
from pathlib import Path

from planetary.core.errors import PlanetaryError, ResourceError, UserError


def is_loopback(address: str) -> bool:
    """Whether a numeric address is this machine's own loopback."""
    try:
        parsed = ipaddress.ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def is_local_name(host: str) -> bool:
    """Whether a host, as it was given, is this machine's own loopback."""
    return host.lower().rstrip(".") in ("localhost", "ip6-localhost") or is_loopback(host)


def own_address() -> str:
    """Return the address that this machine has in the network; "" without one."""
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # of documentation
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((somewhere, 9))  # chooses a route, and sends nothing
            if not is_loopback(address := str(sock.getsockname()[0])):
                return address
    return ""


def address_text(host: str, port: int) -> str:
    """Return `"host:port"`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, with an IPv6 host in brackets. Raises `UserError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"expected HOST:PORT, e.g. gateway.example:8080, found {text!r}")
    return host.strip("[]"), int(port)


def resolve_listen_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return family and numeric address to listen on; of several, an IPv4 one. Raises `UserError`.

    An empty host means all of this machine's addresses.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UserError(f"cannot listen on {host!r}: {error}; give an address of this machine") from None
    found.sort(key=lambda item: item[0] is not socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def port_holder(port: int) -> str | None:
    """Name the process that listens on a TCP port, e.g. `"process 4711 (python3)"`; None when it cannot be
    found.

    Reads /proc, so it finds nothing on other systems or for another user's process.
    """
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            listens = fields[3] == "0A"
            if listens and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            if any(_target(link) in inodes for link in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""  # closed since it was listed


_BACKLOG = 256


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen. Raises `UserError` for an address that is not this machine's, `ResourceError` naming a port's holder."""
    family, address = resolve_listen_address(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # lets a restarted server have the port back; elsewhere it would let two share it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if address[0] != "::" else 0)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise _listen_error(host, port, error) from None
    return sock


def prepare_socket(sock: socket.socket | TransportSocket) -> None:
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
