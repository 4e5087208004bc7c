"""A deterministic asyncio event loop in simulated time, which all simulated processes share.

Nothing here reads a clock or waits: when no callback is ready, time jumps to the next timer. Callbacks belong to the
process in whose context they were scheduled; a killed process's callbacks never run, so a kill stops the process at the
present `await`, without any cleanup.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from asyncio.events import _get_running_loop, _set_running_loop  # exported for authors of event loops
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from planetary.simulation.fake_clock import FakeClock

if TYPE_CHECKING:
    from planetary.simulation.process import Process

T = TypeVar("T")

CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)
"""The process that runs now; None for the world itself: connections, faults, the test."""


class ProcessKilled(BaseException):
    """Unwinds the stacks of a killed process; no `except Exception` of the process sees it."""


def current_process() -> Process:
    """Return the process that calls. Raises `RuntimeError` outside of all processes."""
    process = CURRENT.get()
    if process is None:
        raise RuntimeError("no simulated process runs here; use World.start")
    return process


class Callback(asyncio.Handle):
    """A callback that is due."""

    def run(self) -> None:
        """Call it in the callback's context; `SimulatedLoop.call_exception_handler` gets an exception."""
        self._run()


class Timer(asyncio.TimerHandle, Callback):
    """A callback with a time."""


class ProcessTask(asyncio.Task[T]):
    """A task of a process that may be killed."""

    def forget(self) -> None:
        """Let the task vanish without the warning it had not ended."""
        self._log_destroy_pending = False  # asyncio's only switch for that warning


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of a simulated world. Methods the shells do not use raise `NotImplementedError`.

    Attributes:
        clock: simulated time.
        random: the source of everything random in the world, so one seed gives one story.
    """

    def __init__(self, seed: int) -> None:
        """Start at time 0."""
        self.clock = FakeClock()
        self.random = random.Random(seed)
        self.errors: list[dict[str, Any]] = []  # contexts of unhandled exceptions
        self._ready: deque[tuple[Process | None, Callback]] = deque()
        self._timers: list[tuple[float, int, Process | None, Timer]] = []
        self._count = itertools.count()
        self._closed = False

    # --- running ----------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Go on until `until` is true; return false when nothing is left to happen, or time would pass `limit_s`.

        Another event loop may be running in this thread, as in a notebook; it stands still meanwhile.
        """
        with self.as_running():
            while not until():
                if not self._step(limit_s):
                    return False
            return True

    @contextlib.contextmanager
    def as_running(self) -> Iterator[None]:
        """Be the loop that runs in this thread, for code asking for the running loop."""
        outer = _get_running_loop()
        _set_running_loop(self)
        try:
            yield
        finally:
            _set_running_loop(outer)

    def _step(self, limit_s: float) -> bool:
        """Run one callback; return false when there is none within the limit."""
        ready, timers = self._ready, self._timers
        while not ready:
            if not timers or timers[0][0] > limit_s:
                return False
            when, _, process, handle = heapq.heappop(timers)
            if not handle.cancelled() and (process is None or process.alive):
                self.clock.advance_to(max(when, self.clock.monotonic()))
                ready.append((process, handle))
        process, handle = ready.popleft()
        if not handle.cancelled() and (process is None or process.alive):
            if process is not None and process.is_stopped:
                process.hold(handle)
            else:
                handle.run()
        return True

    def close(self) -> None:
        """Drop all scheduled callbacks."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def is_closed(self) -> bool:
        return self._closed

    def is_running(self) -> bool:
        return _get_running_loop() is self

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Append an unhandled exception to `errors`, except for `ProcessKilled`."""
        if not isinstance(context.get("exception"), ProcessKilled) and not self._closed:
            self.errors.append(context)

    # --- callbacks --------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.monotonic()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = Callback(callback, args, self, context)
        self.run_soon(context.get(CURRENT), handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = Timer(when, callback, args, self, context)
        process = context.get(CURRENT)
        if not self._closed and (process is None or process.alive):
            heapq.heappush(self._timers, (when, next(self._count), process, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.monotonic() + delay, callback, *args, context=context)

    def run_soon(self, process: Process | None, handle: Callback) -> None:
        """Run a callback of a process, behind those that are ready."""
        if not self._closed and (process is None or process.alive):
            self._ready.append((process, handle))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Take notice of a cancelled timer, as `asyncio.TimerHandle` asks: it is passed over at the due time."""

    # --- futures, tasks, threads, signals -----------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: ProcessTask[T] = ProcessTask(coro, loop=self, name=name, context=context)
        process = (context.get(CURRENT) if context is not None else None) or CURRENT.get()
        if process is not None:
            process.adopt(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Call `func` in simulated time: a while after now, and all at once where it does not wait in a separate thread
        (`Process.calls_in_threads`); the result follows a while later.

        A process can be killed before, between, and, where it touches the disk, in the midst.
        """
        future: asyncio.Future[T] = self.create_future()
        process = current_process()
        before, after = process.thread_delays(func)

        def finish(result: T | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def ended(done: Future[T]) -> None:
            error = done.exception()
            self.call_later(after, finish, None if error else done.result(), error)

        def call_in_thread() -> None:
            process.start_call(func, *args).add_done_callback(ended)

        def call() -> None:
            _set_running_loop(None)  # a thread has none
            result: T | None = None
            error: BaseException | None = None
            try:
                result = func(*args)
            except ProcessKilled:
                return
            except Exception as raised:  # noqa: BLE001 - raised where the future is awaited
                error = raised
            finally:
                _set_running_loop(self)
            self.call_later(after, finish, result, error)

        self.call_later(before, call_in_thread if process.calls_in_threads else call)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """`Process.terminate` calls the one for SIGTERM."""
        current_process().on_signal(sig, lambda: callback(*args))
