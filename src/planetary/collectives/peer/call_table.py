"""The calls of a peer that have not returned."""

from __future__ import annotations

import itertools
import threading

from planetary.collectives.peer.active_calls import ActiveCollective
from planetary.collectives.peer.work import OpenWork
from planetary.collectives.protocol.errors import PendingOperationsError
from planetary.collectives.reduction.operation import Operation
from planetary.core.errors import UserError


class CallTable:
    """Thread-safe.

    Attributes:
        works: by number of the call; 0 is the registration.
        transfers: collectives that began, by number of the call.
    """

    def __init__(self, lock: threading.RLock) -> None:
        """`lock` guards the peer's state, of which this is a part."""
        self.works: dict[int, OpenWork] = {}
        self.transfers: dict[int, ActiveCollective] = {}
        self._lock = lock
        self._tags: set[int] = set()
        self._number = itertools.count(1)

    def open(self, work: OpenWork) -> int:
        """Return the number of a new call."""
        call = next(self._number)
        with self._lock:
            self.works[call] = work
        return call

    def take(self, call: int) -> OpenWork | None:
        """Remove a call that is over."""
        with self._lock:
            self.transfers.pop(call, None)
            return self.works.pop(call, None)

    def take_all(self) -> list[OpenWork]:
        """Remove all calls."""
        with self._lock:
            works = list(self.works.values())
            self.works.clear()
            self.transfers.clear()
            return works

    def claim(self, tag: int, kind: str) -> None:
        """Reserve a tag. Raises `UserError` when an operation with it is under way."""
        with self._lock:
            if tag in self._tags:
                raise UserError(f"{kind}: an operation with tag {tag} is under way; choose another or wait for it")
            self._tags.add(tag)

    def release(self, tag: int) -> None:
        """The operation with this tag is over."""
        with self._lock:
            self._tags.discard(tag)

    def expect_none(self, what: str) -> None:
        """Raise `PendingOperationsError` when operations are under way."""
        with self._lock:
            if self._tags:
                raise PendingOperationsError(
                    f"{what}: operations are under way with the tags {sorted(self._tags)}; wait for them"
                )

    def over(self, peer: str) -> list[int]:
        """Return the transfers that a peer is a neighbour in."""
        with self._lock:
            return [call for call, transfer in self.transfers.items() if peer in transfer.neighbours]

    def of(self, operation: Operation) -> int | None:
        """Return the call of a transfer."""
        with self._lock:
            return next((call for call, one in self.transfers.items() if one.operation is operation), None)

    def stalled(self, now: float) -> list[tuple[int, ActiveCollective]]:
        """Return the transfers to which nothing has come for too long."""
        with self._lock:
            return [(call, one) for call, one in self.transfers.items() if one.stalled(now)]
