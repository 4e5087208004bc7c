"""Simulated processes: tasks that share a fate, with threads, child processes and an exit status."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from asyncio.events import _get_running_loop  # exported for authors of event loops
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from planetary.simulation.event_loop import CURRENT, Callback, ProcessKilled, ProcessTask, SimulatedLoop

T = TypeVar("T")

KILLED = -signal.SIGKILL


class Process:
    """One simulated process. Made by `World.start`.

    Attributes:
        name: for people.
        node: the machine it runs on.
        pid: process number.
        alive: whether callbacks run.
        status: exit status, negative for a signal; None while it runs.
        error: the exception that ended it, if one did.
        thread_s: seconds until a call in a thread begins, at most, and as much until the result is seen.
        calls_in_threads: whether such a call may wait; without, it runs on the event loop, which is faster.
    """

    def __init__(self, loop: SimulatedLoop, name: str, node: str, pid: int, whole: Process | None = None) -> None:
        """`whole`: the process that this one is a part of."""
        self.loop, self.name, self.node, self.pid = loop, name, node, pid
        self.alive = True
        self.status: int | None = None
        self.error: BaseException | None = None
        self.thread_s = 0.02
        self.calls_in_threads = False
        self.on_exit: list[Callable[[Process], None]] = []  # the system's part: connections, descriptors, parents
        self._whole = whole
        self._parts: list[Process] = []
        self._stopped_until = 0.0
        self._held: list[tuple[Process, Callback]] = []  # callbacks of a stopped process
        self._context: Context = copy_context()
        self._context.run(CURRENT.set, self)
        self._tasks: dict[ProcessTask[Any], None] = {}
        self._threads: list[SimulatedThread] = []
        self._signals: dict[int, Callable[[], object]] = {}
        self._ended = loop.create_future()

    def run(self, main: Callable[[], Coroutine[Any, Any, int]]) -> None:
        """Begin; the process ends with the status that `main` returns, or 1 for an exception."""

        async def guarded() -> None:
            status = 1
            try:
                status = await main()
            except Exception as error:  # noqa: BLE001 - as an interpreter does
                self.error = error
            self.exit(status)

        self.in_context(lambda: self.loop.create_task(guarded(), name=self.name))

    @property
    def context(self) -> Context:
        """A context in which callbacks belong to this process."""
        return self._context.copy()

    def in_context(self, work: Callable[[], T]) -> T:
        """Call `work` as a part of this process."""
        return self.context.run(work)

    async def wait(self) -> int:
        """Wait for the end; return the exit status."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End at once, as by SIGKILL: nothing of the process runs any more."""
        self.exit(KILLED)

    def terminate(self) -> None:
        """Deliver SIGTERM: to the process's handler, which may take time; without a handler the process ends."""
        handler = self._signals.get(signal.SIGTERM)
        if handler is None:
            self.exit(-signal.SIGTERM)
        elif self.alive:
            self.in_context(lambda: self.loop.call_soon(handler))

    def part(self, name: str) -> Process:
        """Return a process that is a part of this one: it can end before it, and ends and stops with it."""
        part = Process(self.loop, f"{self.name}: {name}", self.node, self.pid, self)
        self._parts.append(part)
        self.on_exit.append(lambda _: part.exit(KILLED))
        return part

    @property
    def tasks(self) -> list[ProcessTask[Any]]:
        """The tasks that have not ended, oldest first."""
        return list(self._tasks)

    @property
    def live_threads(self) -> list[SimulatedThread]:
        """The threads that are in the midst of a call."""
        return [thread for thread in self._threads if not thread.is_idle]

    @property
    def is_stopped(self) -> bool:
        """Whether the process stands still, as after SIGSTOP."""
        return self._whole.is_stopped if self._whole is not None else self._stopped_until > self.loop.clock.monotonic()

    def stop(self, seconds: float) -> None:
        """Stand still for `seconds`: connections stay, and events meanwhile are delivered afterwards, in order."""
        self._stopped_until = max(self._stopped_until, self.loop.clock.monotonic() + seconds)
        no_process = copy_context()
        no_process.run(CURRENT.set, None)
        self.loop.call_at(self._stopped_until, self._go_on, context=no_process)

    def hold(self, handle: Callback, part: Process | None = None) -> None:
        """Keep a callback of a process that is stopped, or of a `part`."""
        if self._whole is not None:
            self._whole.hold(handle, part or self)
        else:
            self._held.append((part or self, handle))

    def _go_on(self) -> None:
        if not self.is_stopped:
            held, self._held = self._held, []
            for process, handle in held:
                self.loop.run_soon(process, handle)

    def exit(self, status: int) -> None:
        """End with a status; the system closes the process's files and connections."""
        if not self.alive:
            return
        self.alive, self.status = False, status
        for release in self.on_exit:
            release(self)
        if not self._ended.done():
            self._ended.set_result(status)

    def bury(self) -> None:
        """Unwind the stacks of a process that is not alive. Nothing they still do reaches the world."""
        for thread in self._threads:
            thread.unwind()
        for part in self._parts:
            part.bury()
        while self._tasks:  # a `finally` may begin further ones
            task, _ = self._tasks.popitem()
            task.forget()
            if not task.done():
                coroutine = task.get_coro()
                for _ in range(20):  # a `finally` may await, which refuses to be closed; then the next one is reached
                    try:
                        self.in_context(coroutine.close)  # type: ignore[union-attr]
                    except BaseException:  # noqa: BLE001 - a dead process may raise anything
                        continue
                    break

    # --- calls of the process itself --------------------------------------------------------------------------

    def adopt(self, task: ProcessTask[Any]) -> None:
        """Count a task as a part of this process."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def on_signal(self, number: int, handler: Callable[[], object]) -> None:
        """Let `handler` be called for a signal."""
        self._signals[number] = handler

    def thread_delays(self, func: Callable[..., object]) -> tuple[float, float]:
        """Return the seconds until a call in a thread begins, and from its end until the result is seen."""
        source = self.loop.random
        return source.uniform(0.0, self.thread_s), source.uniform(0.0, self.thread_s)

    def aside(self, name: str, work: Callable[[], object]) -> None:
        """Call a function in a detached thread; see `fleet.shell.system.System.aside`."""
        self.threads(name).submit(work)

    def start_thread(self, name: str, work: Callable[[], object]) -> SimulatedThread:
        """Call a function in a thread that ends with it."""
        thread = self.threads(name)
        thread.submit(work)
        thread.shutdown(wait=False)
        return thread

    def start_call(self, func: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a thread that ends with it, and return the future."""
        thread = self.threads("call")
        future = thread.submit(func, *args)
        thread.shutdown(wait=False)
        return future

    def threads(self, name: str) -> SimulatedThread:
        """Return an executor with one thread; see `fleet.shell.system.System.threads`."""
        thread = SimulatedThread(self, name)
        self._threads.append(thread)
        return thread

    def threads_named(self, name: str) -> list[SimulatedThread]:
        """Return the open threads of that name."""
        return [thread for thread in self._threads if thread.name == name and not thread.is_closed]


class ChildOf:
    """A process as its parent sees it: a `fleet.shell.child.ChildProcess`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    async def end(self, within_s: float) -> int:
        self._process.terminate()
        try:
            async with asyncio.timeout(within_s):
                return await self._process.wait()
        except TimeoutError:
            self._process.kill()
            return await self._process.wait()


class SimulatedThread(Executor):
    """An executor whose calls may block, in simulated time: they run in a real thread, for which the loop waits.

    One of the two runs at any time: the loop hands over to the thread and waits until the thread parks, in `sleep` or
    at the end of the work. So the story stays a function of the seed.
    """

    def __init__(self, process: Process, name: str) -> None:
        self.name = name
        self._process, self._loop = process, process.loop
        self._is_paused = False
        self._work: deque[tuple[_Result[Any], Callable[[], Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._busy = False  # the thread is in the midst of a call
        self._due = False  # a resumption is scheduled
        self._turn = 0  # number of the parking; a timer of an earlier parking resumes nothing
        self._hurry = False  # a caller waits for the end: sleeping takes no time
        self._closed = False
        self._over = False  # the real thread does nothing any more
        self._hangs_until = 0.0
        self._until_idle: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        result: _Result[T] = _Result(self)
        self._work.append((result, lambda: fn(*args, **kwargs)))
        if not self._busy and not self._due:
            self._due = True
            self._process.in_context(lambda: self._loop.call_soon(self._resume, self._turn))
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The wait takes no simulated time."""
        self._closed = True
        if cancel_futures:
            while self._work:
                self._work.popleft()[0].cancel()
        if wait:
            self.drain()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no calls any more."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._work)

    def pause(self) -> None:
        """Begin no call, as on a machine without time for this thread."""
        self._is_paused = True

    def resume(self) -> None:
        """End a pause."""
        self._is_paused = False
        self._process.in_context(lambda: self._loop.call_soon(self._resume, self._turn))

    def drain(self) -> None:
        """Go on until all work is done, in no time. Not called by the thread itself."""
        self._hurry = True
        while self._process.alive and (self._busy or self._work):
            self._hand_over()
        self._hurry = False

    def sleep(self, seconds: float) -> None:
        """In the thread: let so much simulated time pass."""
        if self._hurry:
            return
        self._turn += 1
        self._loop.call_later(seconds, self._resume, self._turn)
        self._park()

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return not self._busy and not self._work

    def when_idle(self, resume: Callable[[], None]) -> None:
        """Let `resume` be called when all work is done."""
        self._until_idle.append(resume)

    def wait(self, register: Callable[[Callable[[], None]], object], seconds: float | None = None) -> None:
        """In the thread: wait until the function that `register` gets is called, `seconds` at most."""
        self._turn += 1
        turn = self._turn
        register(lambda: self._process.in_context(lambda: self._loop.call_soon(self._resume, turn)) and None)
        if seconds is not None:
            self._loop.call_later(max(seconds, 0.0), self._resume, turn)
        self._park()

    def go_on(self) -> None:
        """On the event loop: end the present wait of the thread, and let it run."""
        self._turn += 1
        self._hand_over()

    def hang(self, seconds: float) -> None:
        """Let the thread's next steps wait for so long."""
        self._hangs_until = self._loop.time() + seconds

    def park_until(self, register: Callable[[Callable[[], None]], object]) -> None:
        """In the thread: wait until the function that `register` gets is called, from anywhere."""
        if self._hurry:
            return
        self._turn += 1
        turn = self._turn
        register(lambda: self._process.in_context(lambda: self._loop.call_soon(self._resume, turn)) and None)
        self._park()

    def unwind(self) -> None:
        """End the real thread of a process that is not alive."""
        if self._thread is not None:
            if not self._over:
                self._hand_over()
            self._thread.join()
            self._thread = None

    def _resume(self, turn: int) -> None:
        self._due = False
        if self._is_paused and not self._busy:
            return
        if self._loop.time() < self._hangs_until:
            self._loop.call_at(self._hangs_until, self._resume, turn)
        elif turn == self._turn or (self._work and not self._busy):
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the thread run until it parks."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"simulated {self.name}", daemon=True)
            self._thread.start()
        outer = _get_running_loop()
        self._go.release()
        self._back.acquire()
        assert _get_running_loop() is outer

    def _park(self) -> None:
        if not self._process.alive:
            raise ProcessKilled
        self._back.release()
        self._go.acquire()
        if not self._process.alive:
            raise ProcessKilled

    def _main(self) -> None:
        self._go.acquire()
        with contextlib.suppress(ProcessKilled):
            self._process.in_context(self._work_for_ever)
        self._over = True
        self._back.release()

    def _work_for_ever(self) -> None:
        _THREAD.current = self
        while self._process.alive:
            while self._work:
                result, call = self._work.popleft()
                self._busy = True
                if result.set_running_or_notify_cancel():
                    try:
                        result.set_result(call())
                    except Exception as error:  # noqa: BLE001 - raised by `result`
                        result.set_exception(error)
                self._busy = False
            self._turn += 1
            waiting, self._until_idle = self._until_idle, []
            for resume in waiting:
                resume()
            if self._closed:
                return
            self._park()


class _Current(threading.local):
    current: SimulatedThread | None = None


_THREAD = _Current()


def current_thread() -> SimulatedThread | None:
    """Return the simulated thread that calls; None on the event loop."""
    return _THREAD.current


def sleep(seconds: float) -> None:
    """Let simulated time pass in the thread of a simulated process."""
    thread = _THREAD.current
    if thread is None:
        raise RuntimeError("only a simulated thread can sleep; on the event loop use asyncio.sleep")
    thread.sleep(seconds)


class Signal:
    """A single event for simulated threads to wait for."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        """It has happened."""
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def wait(self) -> None:
        """In a simulated thread: wait for it; return without it when the thread is to end."""
        thread = _THREAD.current
        if thread is None:
            raise RuntimeError("only a simulated thread can wait for a signal")
        if not self._is_set:
            thread.park_until(self._waiting.append)


class _Result(Future[T]):
    """The result of a call in a simulated thread; waiting for it lets the call go on, in no time."""

    def __init__(self, thread: SimulatedThread) -> None:
        super().__init__()
        self._of = thread

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._of.drain()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._of.drain()
        return super().exception(0)
