"""The connections of a simulated peer: event loops beside threads, and bulk connections.

Event loops are parts of the one loop of the world. Bulk connections are blocking reads and writes on the simulated
network's connections.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from planetary.collectives.transport.bulk_network import BulkListener, Incoming
from planetary.collectives.transport.sockets import DataConnection, SocketOptions
from planetary.core.errors import ClosedError, PeerError, UserError
from planetary.net.addresses import address_text
from planetary.net.network import Listener, MakeGuest, MakeProtocol
from planetary.net.strangers import Door
from planetary.simulation.event_loop import current_process
from planetary.simulation.process import Process, current_thread
from planetary.simulation.simulated_network import HOST, NetworkOf, SimulatedNetwork

T = TypeVar("T")


def call_on_loop(process: Process, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """In a simulated thread: run a coroutine as a part of `process`, and wait for it.

    Raises the coroutine's errors, and `TimeoutError` after `timeout_s` seconds.
    """
    caller = current_thread()
    if caller is None:
        coroutine.close()
        raise RuntimeError("the event loop would wait here, where only a thread may")
    task = process.in_context(lambda: process.loop.create_task(coroutine))
    try:
        caller.wait(lambda resume: task.add_done_callback(lambda _: resume()), timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise TimeoutError
    return task.result()


class SimulatedBackgroundLoop:
    """A loop thread whose tasks are a part of the simulated process, which can end before the rest."""

    def __init__(self, process: Process, network: SimulatedNetwork, name: str) -> None:
        """Begin."""
        self.stopped = False
        self._part = process.part(name)
        self._whole, self._loop = process, process.loop
        network.of(self._part)  # whose connections and listeners end with it

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        if self.stopped:
            coroutine.close()
            raise ClosedError("the connection was closed here")
        try:
            return call_on_loop(self._part, coroutine, timeout_s)
        except asyncio.CancelledError:
            raise ClosedError("the connection was closed here") from None

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        if not self.stopped:
            self._part.in_context(lambda: self._loop.call_soon(action, *arguments))

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._part.alive:
            thread = current_thread()
            if thread is None:
                raise RuntimeError("the event loop would wait here, where only a thread may")
            thread.wait(lambda resume: self._part.on_exit.append(lambda _: resume()), timeout_s)
        return not self._part.alive

    def stop(self, timeout_s: float) -> None:
        if self.stopped:
            return
        self.stopped = True
        self._part.in_context(lambda: self._loop.call_soon(self._finish))
        if current_thread() is not None:
            self.wait(timeout_s)

    def _finish(self) -> None:
        """Cancel all tasks, and end once they have ended."""
        tasks = self._part.tasks
        for task in tasks:
            task.cancel()
        left = len(tasks)

        def one_less(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._end()

        for task in tasks:
            task.add_done_callback(one_less, context=self._whole.context)
        if not tasks:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon(self._part.exit, 0, context=self._whole.context)


class NetworkHere:
    """The network of the calling process, or part of one; see `net.network.Network`."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        return await NetworkOf(self._network, current_process()).dial(make, host, port, tls)

    async def listen(self, make: MakeGuest, host: str, port: int, tls: ssl.SSLContext | None, door: Door) -> Listener:
        return await NetworkOf(self._network, current_process()).listen(make, host, port, tls, door)


_HELD_BYTES = 64 * 1024  # size of a connection's receive buffer; the sender waits while it is full
_CUT_SHORT = 0.05  # chance a read or write is short although it could be whole


class SimulatedDataConnection(DataConnection, asyncio.Protocol):
    """One end of a bulk connection."""

    def __init__(self, process: Process) -> None:
        """Connected by the network, which calls `connection_made`."""
        super().__init__(process.loop.clock)
        self._random = process.loop.random
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._over = ""  # reason for the end of the connection; empty while it is open
        self._full = self._paused = False
        self._waiting: list[Callable[[], None]] = []

    # --- see `DataConnection`

    def try_read(self, into: memoryview) -> int:
        received = self._received
        if not received:
            if self._over and len(into):
                raise PeerError(f"reading: {self._over}")
            return 0
        count = self._some(min(len(into), len(received)))
        into[:count] = received[:count]
        del received[:count]
        if self._paused and len(received) <= _HELD_BYTES and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return count

    def try_write(self, *parts: memoryview) -> int:
        if self._over or self._transport is None:
            raise PeerError(f"writing: {self._over or 'it is not connected'}")
        if self._full:
            return 0
        data = b"".join(parts)
        if data:
            data = data[: self._some(len(data))]
            self._transport.write(data)
        return len(data)

    def wait_readable(self, timeout_s: float | None) -> bool:
        return self._wait(lambda: bool(self._received or self._over), timeout_s)

    def wait_writable(self, timeout_s: float | None) -> bool:
        return self._wait(lambda: bool(not self._full or self._over), timeout_s)

    def close(self) -> None:
        self._received.clear()
        self._end("it was closed here")
        if self._transport is not None:
            self._transport.close()

    # --- see `asyncio.Protocol`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0, low=0)
        if self._over:
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._received += data
        if len(self._received) > _HELD_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._end("the connection was closed")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc is not None else "the connection was closed")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    # --- inside

    def _some(self, count: int) -> int:
        return self._random.randint(1, count) if count > 1 and self._random.random() < _CUT_SHORT else count

    def _end(self, why: str) -> None:
        self._over = self._over or why
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else self._clock.monotonic() + timeout_s
        thread = current_thread()
        assert thread is not None, "the event loop would wait here, where only a thread may"
        while not ready():
            left = None if deadline is None else deadline - self._clock.monotonic()
            if left is not None and left <= 0:
                return False
            thread.wait(self._waiting.append, left)
        return True


class _Accepted:
    def __init__(self, connection: SimulatedDataConnection, number: int) -> None:
        self.host, self.address = HOST, f"{HOST}#{number}"
        self._connection = connection

    def open(self, tls: ssl.SSLContext | None, options: SocketOptions, deadline: float) -> DataConnection:
        return self._connection

    def end(self) -> None:
        self._connection.close()

    def close(self) -> None:
        self._connection.close()


class _BulkListener:
    def __init__(self, process: Process) -> None:
        self.port = 0
        self.listener: Listener | None = None
        self._process = process
        self._came: deque[SimulatedDataConnection] = deque()
        self._accepted = 0
        self._closed = False
        self._waiting: list[Callable[[], None]] = []

    def make(self) -> SimulatedDataConnection:
        """Take a connection that was made."""
        connection = SimulatedDataConnection(self._process)
        if self._closed:
            connection.close()
        else:
            self._came.append(connection)
        self._wake()
        return connection

    def accept(self) -> Incoming:
        thread = current_thread()
        assert thread is not None, "the event loop would wait here, where only a thread may"
        while not self._came:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            thread.wait(self._waiting.append)
        self._accepted += 1
        return _Accepted(self._came.popleft(), self._accepted)

    def close(self) -> None:
        self._closed = True
        if self.listener is not None:
            self.listener.close()
        while self._came:
            self._came.popleft().close()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class SimulatedBulkNetwork:
    """The bulk connections of one process; see `collectives.transport.bulk_network.BulkNetwork`."""

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        self._network, self._process = network, process

    def dial(
        self, host: str, port: int, timeout_s: float, options: SocketOptions, certificate: str | None
    ) -> DataConnection:
        if host != HOST or certificate is not None:
            raise UserError(f"the simulated network has plain connections to {HOST} only, asked for was {host}")
        connection = SimulatedDataConnection(self._process)
        try:
            call_on_loop(self._process, self._network.dial(self._process, lambda: connection, port), timeout_s)
        except TimeoutError:
            raise PeerError(f"connecting to {address_text(host, port)}: timed out") from None
        except OSError as error:
            raise PeerError(f"connecting to {address_text(host, port)}: {error.strerror}") from None
        return connection

    def listen(self, host: str, port: int) -> BulkListener:
        made = _BulkListener(self._process)
        made.listener = call_on_loop(self._process, self._network.listen(self._process, made.make, port), None)
        made.port = made.listener.address[1]
        return made
