"""Keeps the network's threads out of a caller's memory once a call is over."""

from __future__ import annotations

from planetary.core.threads import THREADS, Threads


class BufferGuard:
    """Counts the users of a buffer and shuts it.

    Once `close` has returned, the memory is not read or written any more, even if the network still delivers. No one
    may wait for the network between `enter` and `leave`, so `close` is quick.
    """

    def __init__(self, threads: Threads = THREADS) -> None:
        """Open, for `threads`."""
        self._condition = threads.condition()
        self._users = 0
        self._closed = False

    def enter(self) -> bool:
        """Begin to use the memory; false when it is shut and must not be touched."""
        with self._condition:
            if self._closed:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """End what `enter` began."""
        with self._condition:
            self._users -= 1
            if self._closed and not self._users:
                self._condition.notify_all()

    def close(self) -> None:
        """Shut it, and wait until it is not in use."""
        with self._condition:
            self._closed = True
            self._condition.wait_for(lambda: not self._users)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed
