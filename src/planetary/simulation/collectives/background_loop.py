"""The event loops that a simulated process has beside its threads: parts of the one loop of the world."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from planetary.core.errors import ClosedError
from planetary.net.network import Listener, MakeGuest, MakeProtocol
from planetary.net.strangers import Door
from planetary.simulation.event_loop import current_process
from planetary.simulation.process import Process, current_thread
from planetary.simulation.simulated_network import NetworkOf, SimulatedNetwork

T = TypeVar("T")


def call_on_loop(process: Process, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """In a simulated thread: run a coroutine as a part of `process`, and wait for it.

    Raises what it raises, and `TimeoutError` after `timeout_s` seconds.
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
    """See `net.loop_thread.LoopThread`: what runs on it is a part of the process that can end before the rest."""

    def __init__(self, process: Process, network: SimulatedNetwork, name: str) -> None:
        """Begin."""
        self.stopped = False
        self._part = process.part(name)
        self._whole, self._loop = process, process.loop
        network.of(self._part)  # whose connections and listeners end with it

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """See `BackgroundLoop`."""
        if self.stopped:
            coroutine.close()
            raise ClosedError("the connection was closed here")
        try:
            return call_on_loop(self._part, coroutine, timeout_s)
        except asyncio.CancelledError:
            raise ClosedError("the connection was closed here") from None

    def post(self, action: Callable[..., object], *arguments: Any) -> None:
        """See `BackgroundLoop`."""
        if not self.stopped:
            self._part.in_context(lambda: self._loop.call_soon(action, *arguments))

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `BackgroundLoop`."""
        if self._part.alive:
            thread = current_thread()
            if thread is None:
                raise RuntimeError("the event loop would wait here, where only a thread may")
            thread.wait(lambda resume: self._part.on_exit.append(lambda _: resume()), timeout_s)
        return not self._part.alive

    def stop(self, timeout_s: float) -> None:
        """See `BackgroundLoop`."""
        if self.stopped:
            return
        self.stopped = True
        self._part.in_context(lambda: self._loop.call_soon(self._finish))
        if current_thread() is not None:
            self.wait(timeout_s)

    def _finish(self) -> None:
        """Cancel what runs, and end when it has ended."""
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
    """The network of whatever process, or part of one, calls; see `net.network.Network`."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        """See `Network`."""
        return await NetworkOf(self._network, current_process()).dial(make, host, port, tls)

    async def listen(self, make: MakeGuest, host: str, port: int, tls: ssl.SSLContext | None, door: Door) -> Listener:
        """See `Network`."""
        return await NetworkOf(self._network, current_process()).listen(make, host, port, tls, door)
