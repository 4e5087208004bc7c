"""How connections are made: `TCP` is the real way; the simulator passes another `Network`."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from planetary.net.addresses import listening_socket
from planetary.net.authority import SERVER_NAME
from planetary.net.strangers import Door, Place

log = logging.getLogger(__name__)

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_RESOURCES_S = 0.05  # time until some may be free again

MakeProtocol = Callable[[], asyncio.BaseProtocol]
MakeGuest = Callable[[Place], asyncio.BaseProtocol]
"""Makes the protocol of a connection that was accepted, which leaves the stranger's place when it is none any more."""


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

    async def listen(self, make: MakeGuest, host: str, port: int, tls: ssl.SSLContext | None, door: Door) -> Listener:
        """Listen; each connection that `door` lets in gets a protocol of `make`, after the TLS handshake.

        Raises `ResourceError` and `UserError` as `planetary.net.server.serve` does.
        """
        ...


class TcpListener:
    """The `Listener` of `TcpNetwork`. It accepts itself: a stranger is counted before anything is made for it."""

    def __init__(self, sock: socket.socket, make: MakeGuest, tls: ssl.SSLContext | None, door: Door) -> None:
        """Begin to accept on the running event loop."""
        self.address: tuple[str, int] = sock.getsockname()[:2]
        self._sock, self._make, self._tls, self._door = sock, make, tls, door
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        for task in (self._accepting, *self._handshakes):
            task.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    continue  # it was gone before it was accepted
                log.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(_RESOURCES_S)
                continue
            now = self._loop.time()
            place = self._door.enter(str(address[0]), now)
            if news := self._door.news(now):
                log.warning("%s", news)
            if place is None:
                sock.close()
                continue
            place.end = sock.close  # until there is a transport, which closes it then
            task = self._loop.create_task(self._shake_hands(sock, place))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket, place: Place) -> None:
        if sock.fileno() < 0:
            return  # the place was given to another
        task = asyncio.current_task()
        assert task is not None
        place.end = task.cancel
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(place),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._door.limits.introduction_s if self._tls is not None else None,
                ssl_shutdown_timeout=1.0 if self._tls is not None else None,
            )
        except (OSError, asyncio.CancelledError) as error:  # `ssl.SSLError` and a handshake that is late are `OSError`
            log.debug("a stranger from %s left: %r", place.host, error)
            place.leave()


class TcpNetwork:
    """Sockets of the operating system, on the running event loop."""

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        transport, _ = await asyncio.get_running_loop().create_connection(
            make,
            host,
            port,
            ssl=tls,
            server_hostname=SERVER_NAME if tls is not None else None,
            ssl_shutdown_timeout=1.0 if tls is not None else None,
        )
        return transport

    async def listen(self, make: MakeGuest, host: str, port: int, tls: ssl.SSLContext | None, door: Door) -> Listener:
        return TcpListener(listening_socket(host, port), make, tls, door)


TCP: Network = TcpNetwork()
