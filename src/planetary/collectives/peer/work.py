"""The handle of a call that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planetary.core.errors import PlanetaryError
from planetary.core.threads import Threads

if TYPE_CHECKING:
    from planetary.collectives.peer.active_calls import ActiveCall


class Work:
    """A call that goes on in the background. Thread-safe."""

    def __init__(self, title: str, threads: Threads) -> None:
        """Made by `Communicator`."""
        self.title = title
        self._done = False
        self._until_done = threads.lock()  # held until then; costs less than a `threading.Event`
        self._until_done.acquire()
        self._error: PlanetaryError | None = None
        self._value: Any = None
        self.sent_bytes = self.received_bytes = 0  # payload, once the call is over
        self.world_size = 0  # number of participants of a successful collective

    @property
    def done(self) -> bool:
        """Whether the call is over."""
        return self._done

    def wait(self) -> Any:
        """Wait until the call is over, on all peers alike; return the result or raise the error.

        The call's deadlines bound the wait. May be called again, from any thread.
        """
        with self._until_done:
            pass
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value


class OpenWork(Work):
    """The same call, with `end` for the owner."""

    def __init__(self, title: str, threads: Threads, active: ActiveCall | None = None) -> None:
        """`active`: the transfer or synchronisation that follows; None for a call the master answers."""
        super().__init__(title, threads)
        self.active = active

    def end(self, error: PlanetaryError | None, value: Any) -> None:
        """Set the outcome: keep or restore changed arrays, and wake the waiting threads. Runs once."""
        if self.active is not None:
            try:
                value = self.active.end(error is None, value)
            except PlanetaryError as failure:
                error = error or failure
            self.sent_bytes, self.received_bytes = self.active.sent, self.active.received
            self.world_size = self.active.world_size if error is None else 0
        self._error, self._value, self._done = error, value, True
        self._until_done.release()
