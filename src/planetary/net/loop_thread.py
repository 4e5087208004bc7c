"""An event loop in a separate thread, for programs that compute or wait in theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from planetary.core.errors import ClosedError
from planetary.net.addresses import address_text
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import say_hello
from planetary.net.session import Greeting, Refused, Welcome
from planetary.wire.limits import Limits
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Allocate, ReceivedMessage, allocate_any

T = TypeVar("T")


class BackgroundLoop(typing.Protocol):
    """An event loop beside the threads that use it; see `LoopThread`. The simulator has another one."""

    @property
    def stopped(self) -> bool:
        """Whether nothing more is taken."""
        ...

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it; see `LoopThread.call`."""
        ...

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call something on the loop soon, and wait for nothing. Dropped when the loop was stopped."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the loop has ended; false when it has not within `timeout_s` seconds."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Cancel all tasks of the loop, and wait for their end. Does nothing the second time."""
        ...


class LoopThread:
    """Runs until `stop`. Methods may be called from any thread.

    Attributes:
        stopped: whether nothing more is taken.
    """

    def __init__(self, name: str) -> None:
        """Begin; `name` is the thread's."""
        self.stopped = False
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it, by default as long as it takes. Raises the task's exceptions.

        `ClosedError` when the loop was stopped, meanwhile, too; `concurrent.futures.TimeoutError` after `timeout_s`
        seconds.
        """
        future = self.begin(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ClosedError("the connection was closed here") from None
        except BaseException:
            future.cancel()  # an interrupt from the keyboard, or the timeout: the caller is gone
            raise

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop; `stop` cancels it. Raises `ClosedError` when the loop was stopped."""
        with self._lock:
            if self.stopped:
                coroutine.close()
                raise ClosedError("the connection was closed here")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        """Call something on the loop soon, and wait for nothing. Dropped when the loop was stopped."""
        with self._lock:
            if not self.stopped:
                self._loop.call_soon_threadsafe(action, *arguments)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; false when it has not within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Cancel all tasks of the loop, and wait for the end. Does nothing the second time."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0


class ThreadedConnection:
    """A connection to a gateway whose calls block. All of them may come from any thread, `close` included.

    Heartbeats are answered however long the main thread computes, as long as that lets other threads run (numpy and
    IREE do).

    Attributes:
        answer: of the gateway to the `Hello`. After a `Refused` the connection is closed already.
    """

    answer: Welcome | Refused

    def __init__(
        self,
        host: str,
        port: int,
        trust: Trust,
        protocol: Protocol,
        hello: Greeting,
        *,
        timeout_s: float = _CONNECT_TIMEOUT_S,
        limits: Limits | None = None,
        allocate: Allocate = allocate_any,
    ) -> None:
        """Connect and introduce this client, each within `timeout_s` seconds. Raises as `connect` and
        `say_hello`.

        `allocate` is called in the background thread.
        """
        self._loop = LoopThread(f"planetary connection to {address_text(host, port)}")

        async def open_connection() -> tuple[Connection, Welcome | Refused]:
            connection = await connect(
                host, port, trust, protocol, timeout_s=timeout_s, limits=limits, allocate=allocate
            )
            try:
                answer = await say_hello(connection, hello, timeout_s)
            except BaseException:
                connection.abort()
                raise
            if isinstance(answer, Refused):
                await connection.close("refused")
            return connection, answer

        try:
            self._connection, self.answer = self._loop.call(open_connection())
        except BaseException:
            self._loop.stop(_CLOSE_TIMEOUT_S)
            raise
        if isinstance(self.answer, Refused):
            self._loop.stop(_CLOSE_TIMEOUT_S)

    def send(self, message: Message, tensors: Mapping[str, np.ndarray] | None = None) -> int:
        """Send a message; return how many bytes it took when all were handed over. See `Connection.send`."""
        return self._loop.call(self._connection.send(message, tensors))

    def receive(self, timeout_s: float | None) -> ReceivedMessage | None:
        """Return the next message, or None when none came within `timeout_s` seconds (0: look only).

        None instead of a number waits until the gateway is silent for too long. Raises as
        `Connection.receive`.
        """
        if timeout_s is not None and timeout_s <= 0 and not self._connection.unread:
            if self._connection.error is not None:
                raise self._connection.error.with_traceback(None)
            return None
        try:
            return self._loop.call(self._connection.receive(timeout_s))
        except TimeoutError:
            return None

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames given to the socket, before TLS."""
        return self._connection.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of frames taken from the socket, after TLS."""
        return self._connection.bytes_received

    @property
    def peer(self) -> str:
        """Address of the gateway, for people."""
        return self._connection.peer

    @property
    def error(self) -> Exception | None:
        """Why the connection is over, or None while it is up."""
        return self._connection.error

    def close(self, reason: str) -> None:
        """Say goodbye, close and end the background thread. Does nothing the second time."""
        if self._loop.stopped:
            return
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.call(self._connection.close(reason), _CLOSE_TIMEOUT_S)
        self._loop.stop(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> ThreadedConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("done" if kind is None else f"failed with {kind.__name__}")
