"""When a participant dials the other side, and dials again: one connection with named states. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from enum import StrEnum

from planetary.machine.machine import check_invariants
from planetary.machine.state_table import Table, advance


def pause_before(attempt: int, first_s: float, limit_s: float, who: str) -> float:
    """Seconds to wait before attempt number `attempt` (2 = the first repetition).

    Doubles from `first_s` to `limit_s`. The last quarter depends on `who`, so many participants that failed at one
    moment do not come back at one moment; it is the same in every run, so machines stay deterministic.
    """
    pause = min(limit_s, first_s * 2.0 ** min(attempt - 2, 60))
    spread = (zlib.crc32(who.encode()) & 0xFFFF) / 0xFFFF
    return pause * (0.75 + 0.25 * spread)


class LinkState(StrEnum):
    """The state of a connection that this side makes."""

    WAITING = "waiting"  # pause before the next attempt
    DIALLING = "dialling"
    CONNECTED = "connected"


LINK: Table = {
    (LinkState.WAITING, "pause over"): LinkState.DIALLING,
    (LinkState.DIALLING, "opened"): LinkState.CONNECTED,
    (LinkState.DIALLING, "closed"): LinkState.WAITING,
    (LinkState.CONNECTED, "closed"): LinkState.WAITING,
}


class Redial:
    """A participant's connection to the side it dials; pauses between attempts double, up to a limit.

    A participant that has ended, or stops, calls `dial` no more.

    Attributes:
        state: see `LinkState`; a row of `LINK` for every change.
        session: number of the newest attempt or connection, 0 before the first. Events of older ones are stale.
    """

    def __init__(self, who: str, *, first_s: float, limit_s: float) -> None:
        """Begin without a connection; the first attempt is due at once. `who` spreads the pauses of many."""
        self.state = LinkState.WAITING
        self.session = 0
        self._who, self._first_s, self._limit_s = who, first_s, limit_s
        self._attempts = 0  # attempts since the last connection
        self._due: float | None = 0.0  # when to dial, while waiting
        self._lost_at: float | None = None  # start of the time without a connection

    @property
    def connected(self) -> bool:
        """Whether messages can be sent on `session`."""
        return self.state is LinkState.CONNECTED

    def away_s(self, now: float) -> float:
        """Return for how many seconds there has been no connection, from the first attempt on."""
        return 0.0 if self._lost_at is None else now - self._lost_at

    def dial(self, now: float) -> int | None:
        """Return the number of the session to dial now; None while it is not time."""
        if self._due is None or now < self._due:
            return None
        self._advance("pause over")
        if self._lost_at is None:
            self._lost_at = now
        self._due = None
        self._attempts += 1
        self.session += 1
        return self.session

    def opened(self, session: int, *, of_use: bool = True) -> bool:
        """Take a connection that was made; return whether it is the newest attempt's.

        `of_use`: False for one that this side is about to close: the pauses go on growing.
        """
        if session != self.session or self.state is not LinkState.DIALLING:
            return False
        self._advance("opened")
        self._lost_at = None
        if of_use:
            self._attempts = 0
        return True

    def closed(self, session: int, now: float) -> bool:
        """Take the end of a connection, or of an attempt, and wait; return whether it was the newest."""
        if session != self.session or self.state not in {LinkState.DIALLING, LinkState.CONNECTED}:
            return False
        self._advance("closed")
        if self._lost_at is None:
            self._lost_at = now
        self._due = now + pause_before(self._attempts + 1, self._first_s, self._limit_s, self._who)
        return True

    def next_deadline(self) -> float | None:
        """Return the monotonic time of the next attempt; None while none is due."""
        return self._due

    def validate(self) -> None:
        check_invariants(f"the connection of {self._who}", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        yield (
            (self._due is not None) == (self.state is LinkState.WAITING),
            f"{self.state}, the next attempt at {self._due}",
        )
        yield not self.connected or self._lost_at is None, f"connected, and lost since {self._lost_at}"

    def _advance(self, event: str) -> None:
        self.state = LinkState(advance(LINK, self.state, event))
