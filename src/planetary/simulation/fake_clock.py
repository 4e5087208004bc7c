"""A clock that moves only by `advance_to`."""

from __future__ import annotations


class FakeClock:
    """Implements `core.clock.Clock`."""

    def __init__(self, start: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        """`start`: the first monotonic reading; `wall`: the Unix time at that moment."""
        self._now = start
        self._wall_offset = wall - start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance_to(self, time: float) -> None:
        """Move forward to `time`; a clock never goes back."""
        if time < self._now:
            raise ValueError(f"cannot go back from {self._now} to {time}")
        self._now = time
