"""The handle of a call that is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from planetary.core.errors import PlanetaryError


class Work:
    """A call that goes on in the background. Thread-safe."""

    def __init__(self, title: str) -> None:
        """Made by `Communicator`."""
        self.title = title
        self._event = threading.Event()
        self._error: PlanetaryError | None = None
        self._value: Any = None
        self.sent_bytes = self.received_bytes = 0  # payload, once the call is over
        self.world_size = 0  # of a collective that succeeded: how many peers took part
        self.begun: Callable[[Any], Any] | None = None  # what to do when the master lets it begin

    @property
    def done(self) -> bool:
        """Whether the call is over."""
        return self._event.is_set()

    def wait(self) -> Any:
        """Wait until the call is over, on all peers alike; return its result or raise its error.

        Its own deadlines bound the wait. May be called again, from any thread.
        """
        self._event.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def _settle(self, error: PlanetaryError | None, value: Any) -> None:
        self._error, self._value = error, value
        self._event.set()
