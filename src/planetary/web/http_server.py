"""One HTTP server on the event loop that runs, or on one in a separate thread: uvicorn, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from planetary.core.errors import ResourceError
from planetary.net.addresses import address_text, port_holder, resolve_listen_address
from planetary.net.network import TcpListener
from planetary.net.strangers import Door, Place, StrangerLimits
from planetary.web.browser_guard import BrowserGuard

MOST_CONNECTIONS = 1024
FIRST_REQUEST_S = 10.0
"""Seconds until a connection's first request must have the head."""
IDLE_S = 30
"""Seconds that a connection may be idle. Python's clients leave theirs after 5: a server that closes it in the same
moment would reset the next request."""
STOP_S = 1
"""Seconds a stopping server waits for responses in progress."""


class WebServer:
    """A running server. Made by `start`.

    Attributes:
        host, port: the numeric listening address.
    """

    def __init__(self, server: uvicorn.Server, listener: socket.socket, scheme: str) -> None:
        self.host, self.port = listener.getsockname()[:2]
        self._scheme = scheme
        self._server = server
        self._task = asyncio.get_running_loop().create_task(server.serve([listener]))

    @staticmethod
    async def start(
        app: BrowserGuard, host: str, port: int, *, what: str, tls: ssl.SSLContext | None = None
    ) -> WebServer:
        """Serve a guarded application on `host` and `port` (0: any free one); errors call it `what`.

        `tls`: context with the server's certificate; None: plain HTTP.

        Raises:
            ResourceError: the port is in use or denied; names the process that holds it, where the system permits.
            UserError: the address is not this machine's.
        """
        return WebServer(_Server(_config(app), tls), listen(host, port, what), "http" if tls is None else "https")

    @property
    def url(self) -> str:
        """URL of the root, without a trailing slash."""
        return f"{self._scheme}://{address_text(self.host, self.port)}"

    async def close(self) -> None:
        """Stop listening; responses in progress have `STOP_S` seconds to end."""
        self._server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(self._task, 3 * STOP_S)


class ThreadServer:
    """A server with an event loop in a daemon thread, from construction to `close`.

    Attributes:
        host, port: as of `WebServer`.
    """

    def __init__(self, app: BrowserGuard, host: str, port: int, *, what: str) -> None:
        """Start; see `WebServer.start`."""
        listener = listen(host, port, what)
        self.host, self.port = listener.getsockname()[:2]
        self._server = _Server(_config(app))
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([listener])), name=what, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{address_text(self.host, self.port)}"

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.should_exit = True
        self._thread.join()


def listen(host: str, port: int, what: str) -> socket.socket:
    """Return a listening socket; see `WebServer.start`."""
    family, address = resolve_listen_address(host, port)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST_CONNECTIONS)  # at once: until then another may bind the port, too
    except OSError as error:
        listener.close()
        holder = port_holder(port) if error.errno == errno.EADDRINUSE else None
        by = f" by {holder}" if holder else ""
        raise ResourceError(
            f"cannot serve {what} on {address_text(host, port)}: {error.strerror or error}{by}; choose another port "
            "for it, or port 0 for any free one"
        ) from error
    return listener


def _config(app: BrowserGuard) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ImpatientProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=IDLE_S,
        server_header=False,
    )


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with a deadline for the first request and a limit of connections.

    uvicorn alone waits for ever, and refuses requests while other connections are idle.
    """

    first_request_s = FIRST_REQUEST_S
    since = 0.0  # the event loop's time when the connection was made

    def __init__(self, *, place: Place, **more: Any) -> None:
        """`place`: where the connection waits until it is made; the other arguments are uvicorn's."""
        super().__init__(**more)
        self._place = place

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._place.leave()
        super().connection_made(transport)
        self.since = self.loop.time()
        self.loop.call_later(self.first_request_s, self._end_if_silent)
        if len(self.connections) >= MOST_CONNECTIONS:
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest connection without a request."""
        others = [one for one in self.connections if isinstance(one, ImpatientProtocol) and one is not self]
        silent = [one for one in others if one.cycle is None]
        if silent:
            oldest = min(silent, key=lambda one: one.since)
            self.connections.discard(oldest)  # at once: the loss is noticed later
            oldest.transport.abort()

    def _end_if_silent(self) -> None:
        if self.cycle is None:  # no request is complete up to the body
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers: signals belong to the enclosing process.

    It accepts as servers of the fabric do: of TLS handshakes, each of which takes 256 KiB, only a few are under way.
    uvicorn alone would begin one for every connection, and give it a minute.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls, self._door = tls, Door(StrangerLimits())
        self._listeners: list[TcpListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._listeners = [TcpListener(one, self._guest, self._tls, self._door) for one in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets)

    def _guest(self, place: Place) -> asyncio.BaseProtocol:
        state = self.lifespan.state
        return ImpatientProtocol(place=place, config=self.config, server_state=self.server_state, app_state=state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
