"""Measured durations of tasks, and what is under way of one: the limit of an answer follows from both."""

from __future__ import annotations

import msgspec

STUCK_FACTOR = 20.0
"""A task is stuck after this many times the longest duration seen for its kind."""


class InFlight(msgspec.Struct, kw_only=True):
    """A task a session has not answered yet.

    Attributes:
        awaits: payloads that have not left the gateway and without which it cannot begin.
        complete_at: from when on it is waited for: when the last of them had left, or a sign of life came.
    """

    awaits: int = 0
    complete_at: float = 0.0

    def sent(self, now: float) -> None:
        """A payload has left the gateway."""
        if self.awaits > 0:
            self.awaits, self.complete_at = self.awaits - 1, now


class TaskTimes:
    """Measured durations of tasks, and the limits that follow from them. Times are seconds."""

    def __init__(self, least_s: float, first_s: float, *, apart: bool = True) -> None:
        """Start without a measured duration.

        Args:
            least_s: smallest limit.
            first_s: limit of a kind without a measured duration.
            apart: measure each session for itself, as a worker may compile a function when it is first called.
        """
        self._least_s, self._first_s, self._apart = least_s, first_s, apart
        self._longest: dict[tuple[int, str], float] = {}

    def observe(self, session: int, kind: str, seconds: float) -> None:
        """Take note of an answered task's duration."""
        key = self._key(session, kind)
        self._longest[key] = max(seconds, self._longest.get(key, 0.0))

    def limit_s(self, session: int, kind: str) -> float:
        """Return after how many seconds a task of this kind is stuck."""
        longest = self._longest.get(self._key(session, kind))
        return self._first_s if longest is None else max(self._least_s, STUCK_FACTOR * longest)

    def forget(self, session: int) -> None:
        """A connection has ended."""
        self._longest = {key: seconds for key, seconds in self._longest.items() if key[0] != session}

    def _key(self, session: int, kind: str) -> tuple[int, str]:
        return (session if self._apart else -1), kind
