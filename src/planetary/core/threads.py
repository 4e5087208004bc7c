"""Threads and their synchronisation. `THREADS` are the operating system's; a simulator passes others.

Only primitives that block, or may be held by a blocked thread, have to come from here: a lock under which nothing waits
can be a `threading.Lock` in both worlds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Lock(Protocol):
    """`threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; false when `blocking` is false and it is held."""
        ...

    def release(self) -> None:
        """Give the lock back."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Condition(Protocol):
    """`threading.Condition` over a lock that is not reentrant."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate` is true, `timeout` seconds at most; return the value."""
        ...

    def notify_all(self) -> None:
        """Let those that wait look again."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Queue(Protocol[T]):
    """`queue.SimpleQueue`."""

    def put(self, item: T) -> None:
        """Append an item; never waits."""
        ...

    def get(self) -> T:
        """Remove the first item; waits for one."""
        ...

    def empty(self) -> bool:
        """Whether `get` would wait."""
        ...


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, `timeout` seconds at most."""
        ...


class Threads(Protocol):
    """Starts threads and makes their synchronisation primitives."""

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        """Call `work` in a separate thread, which does not keep the program from ending."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let so much time pass in the calling thread."""
        ...

    def lock(self) -> Lock:
        """Make a lock; any thread may release it."""
        ...

    def rlock(self) -> Lock:
        """Make a reentrant lock."""
        ...

    def condition(self) -> Condition:
        """Make a condition with a separate lock."""
        ...

    def queue(self) -> Queue[Any]:
        """Make a queue without a bound."""
        ...


class SystemThreads:
    """The operating system's threads; see `Threads`."""

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> Lock:
        return threading.Lock()

    def rlock(self) -> Lock:
        return threading.RLock()

    def condition(self) -> Condition:
        return threading.Condition(threading.Lock())

    def queue(self) -> Queue[Any]:
        return queue.SimpleQueue()


THREADS: Threads = SystemThreads()
"""The operating system's threads."""
