"""An event loop in a thread of its own, for programs that compute or wait in theirs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from planetary.core.errors import ClosedError

T = TypeVar("T")


class LoopThread:
    """Runs until `stop`. Its methods may be called from any thread.

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
        """Run a coroutine on the loop and wait for it, by default as long as it takes. Raises what it raises.

        `ClosedError` when the loop was stopped, meanwhile, too; `concurrent.futures.TimeoutError` after `timeout_s`
        seconds.
        """
        with self._lock:
            if self.stopped:
                coroutine.close()
                raise ClosedError("the connection was closed here")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ClosedError("the connection was closed here") from None
        except BaseException:
            future.cancel()  # an interrupt from the keyboard, or the timeout: nobody waits for it any more
            raise

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
        """Cancel what runs on the loop, and wait for its end. Does nothing the second time."""
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
