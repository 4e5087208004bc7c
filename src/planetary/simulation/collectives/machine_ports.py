"""The ports of masters and peers in a simulated process: threads, and the locks they wait with.

One thread runs at any time, and another one follows where it waits. With a `preempt_chance` it may also be stopped for
a moment before it takes a lock, so other threads and the event loop get between any two critical sections, and into the
outer one of two nested ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from planetary.artifacts.durable_files import DurableFiles
from planetary.collectives.transport.ports import Ports
from planetary.core.threads import Condition, Lock, Queue, Thread
from planetary.machine.machine import Machine
from planetary.simulation.collectives.background_loop import NetworkHere, SimulatedBackgroundLoop, SimulatedBulkNetwork
from planetary.simulation.process import Process, SimulatedThread, current_thread
from planetary.simulation.world import World

_PREEMPT_S = 0.002  # at most


class SimulatedThreads:
    """The threads of one process; see `core.threads.Threads`.

    Attributes:
        preempt_chance: of a stop before a lock is taken.
    """

    def __init__(self, process: Process, preempt_chance: float = 0.0) -> None:
        self.preempt_chance = preempt_chance
        self._process, self._loop = process, process.loop
        self._preempted: dict[SimulatedThread, None] = {}

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        """An exception of `work` is one of the event loop: nothing may fail unseen."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a test finds it there
                self._loop.call_exception_handler({"message": f"thread {name} failed", "exception": error})

        return _Started(self._process.start_thread(name, guarded))

    def sleep(self, seconds: float) -> None:
        self.current().wait(lambda _: None, seconds)

    def lock(self) -> Lock:
        return SimulatedLock(self)

    def rlock(self) -> Lock:
        return SimulatedLock(self, reentrant=True)

    def condition(self) -> Condition:
        return SimulatedCondition(self)

    def queue(self) -> Queue[Any]:
        return SimulatedQueue(self)

    # --- for the locks

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self._process.alive

    @property
    def now(self) -> float:
        """Simulated monotonic seconds."""
        return self._loop.time()

    def current(self) -> SimulatedThread:
        """Return the calling thread. Raises `RuntimeError` on the event loop, which must never wait."""
        thread = current_thread()
        if thread is None:
            raise RuntimeError("the event loop would wait here, where only a thread may")
        return thread

    def maybe_preempt(self) -> None:
        """Before a lock is taken: stop the calling thread for a moment, or do not."""
        thread = current_thread()
        if thread is None or not self.preempt_chance or not self._process.alive:
            return
        if self._loop.random.random() < self.preempt_chance:
            self._preempted[thread] = None
            try:
                thread.wait(lambda _: None, self._loop.random.uniform(0.0, _PREEMPT_S))
            finally:
                self._preempted.pop(thread, None)

    def go_on(self, holder: SimulatedThread | None) -> None:
        """On the event loop: let the holder of a lock go on, which was stopped. Raises `RuntimeError` if it waits."""
        if holder is None or holder not in self._preempted:
            raise RuntimeError("the event loop would wait for a lock whose holder waits for something else")
        holder.go_on()

    def go_on_until(self, predicate: Callable[[], bool]) -> None:
        """On the event loop: let stopped threads go on until `predicate` is true. Raises `RuntimeError` without any."""
        while not predicate():
            self.go_on(next(iter(self._preempted), None))


class SimulatedLock:
    """A lock between simulated threads."""

    def __init__(self, threads: SimulatedThreads, *, reentrant: bool = False) -> None:
        self._threads, self._reentrant = threads, reentrant
        self._depth = 0
        self._holder: SimulatedThread | None = None  # None also for the event loop
        self._waiting: list[Callable[[], None]] = []

    def acquire(self, blocking: bool = True) -> bool:
        threads, thread = self._threads, current_thread()
        if self._reentrant and self._depth and self._holder is thread:
            self._depth += 1
            return True
        if blocking:
            threads.maybe_preempt()
        while self._depth:
            if not blocking:
                return False
            if thread is None:
                threads.go_on(self._holder)
            else:
                thread.wait(self._waiting.append)
        self._depth, self._holder = 1, thread
        return True

    def release(self) -> None:
        if not self._depth:
            if not self._threads.alive:
                return  # the stack is unwound
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if not self._depth:
            self._holder = None
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedCondition:
    """A condition between simulated threads."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._lock = SimulatedLock(threads)
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        threads = self._threads
        if current_thread() is None:
            self._lock.release()
            threads.go_on_until(predicate)
            self._lock.acquire()
        deadline = None if timeout is None else threads.now + timeout
        while not (found := predicate()):
            left = None if deadline is None else deadline - threads.now
            if left is not None and left <= 0:
                break
            thread = threads.current()
            self._lock.release()
            try:
                thread.wait(self._waiting.append, left)
            finally:
                if threads.alive:
                    self._lock.acquire()
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class SimulatedQueue:
    """A queue between simulated threads."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._items: deque[Any] = deque()
        self._waiting: list[Callable[[], None]] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def get(self) -> Any:
        while not self._items:
            self._threads.current().wait(self._waiting.append)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class _Started:
    def __init__(self, thread: SimulatedThread) -> None:
        self._thread = thread

    def join(self, timeout: float | None = None) -> None:
        caller = current_thread()
        if caller is None:
            raise RuntimeError("the event loop would wait here, where only a thread may")
        if not self._thread.is_idle:
            caller.wait(self._thread.when_idle, timeout)


Observe = Callable[[Machine[Any, Any], object, Sequence[object]], None]


def simulated_ports(
    world: World, process: Process, files: DurableFiles, observe: Observe, *, preempt_chance: float = 0.0
) -> Ports:
    """Return the ports of a master or peer in `process`. Called once for a process."""
    network = world.network
    network.of(process)  # bulk connections and listeners end with it
    return Ports(
        clock=world.clock,
        threads=SimulatedThreads(process, preempt_chance),
        start_loop=lambda name: SimulatedBackgroundLoop(process, network, name),
        network=NetworkHere(network),
        bulk=SimulatedBulkNetwork(network, process),
        files=files,
        machine=lambda: process.node,
        draw_id=lambda: f"{world.random.getrandbits(128):032x}",
        observe=observe,
    )
