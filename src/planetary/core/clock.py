"""Clocks. Machines never read one: a shell passes `now` in. Shells take a `Clock`, so tests pass a fake."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of time, both in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin; never goes back. For deadlines and durations."""
        ...

    def wall(self) -> float:
        """Unix time in seconds. For journals and people, never for deadlines."""
        ...


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
