"""Whom a run waits for: workers without progress, and the report of a stuck run."""

from __future__ import annotations

import math

import msgspec

from planetary.fleet.controller.desk import AnyDesk
from planetary.fleet.protocol.records import Stalled


class Wait(msgspec.Struct, frozen=True):
    """A worker that has to show progress; it is stuck, and restarted, when it has not in time. Monotonic seconds.

    Attributes:
        session: of the worker.
        since: last sign of progress.
        until: when it counts as stuck.
        lacks: which progress it has not made since, as "took no step".
    """

    session: int
    since: float
    until: float
    lacks: str

    def why(self, now: float) -> str:
        """Return the sentence with which the worker is restarted at `now`."""
        return f"it {self.lacks} for {now - self.since:.0f} s"


class Stalls:
    """Puts a stall into the journal, once, after it has lasted for the grace time: brief stalls are routine.

    While workers prepare, a wait is no stall; the grace time begins when they are ready, lost, or too long about it.

    Attributes:
        why: the reason for which the run cannot go on now, "" while it can.
    """

    def __init__(self, desk: AnyDesk, grace_s: float, now: float) -> None:
        """Start without a stall at monotonic time `now`; `grace_s` in seconds."""
        self._desk, self._grace_s = desk, grace_s
        self.why = ""
        self._since, self._reported = now, False
        self._preparing_until = -math.inf

    def observe(self, why: str, now: float, preparing_until: float = -math.inf) -> None:
        """Take the present reason, "" for none, and until when workers may prepare; both times are monotonic."""
        # Preparation seen by the previous observation lasted until now, or until the preparation's limit.
        self._since = max(self._since, min(now, self._preparing_until))
        self.why, self._preparing_until = why, preparing_until
        if not why:
            self._since, self._reported = now, False
        elif not self._reported and now >= self._due_at:
            self._reported = True
            self._desk.append(Stalled(why=why))

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which the present stall is to be reported; None without an unreported one."""
        return self._due_at if self.why and not self._reported and math.isfinite(self._due_at) else None

    @property
    def _due_at(self) -> float:
        return max(self._since, self._preparing_until) + self._grace_s
