"""How long a worker may take for a piece of work, an evaluation or a last state before it counts as stuck."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from planetary.fleet.controller.stalls import Wait
from planetary.machine.board import InFlight

Task = tuple[int, Literal["work", "evaluation", "state"], int]
"""Session, kind, and number: of the work, of the round, or of the shard whose last state is due."""

_LACKS = {
    "work": "had no answer to its work",
    "evaluation": "had no answer to its evaluation",
    "state": "did not send the last state of its shard",
}

STUCK_FACTOR = 20.0
"""A task is stuck after this many times the longest duration seen for its kind; before, after so many times the granted
minimum."""


class Patience:
    """Deadlines of tasks. Times are monotonic seconds. Payloads in flight extend a deadline: a line may be slow.

    A worker does one thing after the other, so an answer to one task is a sign of life for all that it has.
    """

    def __init__(self, least_s: float) -> None:
        """`least_s`: the least time every task has."""
        self._least_s = least_s
        self._waited: dict[Task, InFlight] = {}
        self._longest: dict[str, float] = {}
        self._arriving: dict[int, set[int]] = {}  # message ids by session

    def observe(
        self, tasks: Collection[Task], live: Collection[int], now: float, under_way: Callable[[int], int]
    ) -> None:
        """Take the tasks that are given and not answered. `live`: sessions; `under_way`: payloads for a session."""
        for task in [task for task in self._waited if task not in tasks]:
            took = now - self._waited.pop(task).complete_at
            if task[0] in live:  # it was answered
                self._longest[task[1]] = max(took, self._longest.get(task[1], 0.0))
                self._lives(task[0], now)
        self._arriving = {session: ids for session, ids in self._arriving.items() if session in live and ids}
        for task in tasks:
            if task not in self._waited:
                self._waited[task] = InFlight(awaits=under_way(task[0]), complete_at=now)

    def sent(self, session: int, now: float) -> None:
        """A payload has left the gateway for good."""
        for task, one in self._waited.items():
            if task[0] == session:
                one.sent(now)

    def arrives(self, session: int, message: int) -> None:
        """A message with a payload has begun to arrive: a result, or a message ahead of one."""
        self._arriving.setdefault(session, set()).add(message)

    def arrived(self, session: int, message: int, now: float) -> None:
        if message in self._arriving.get(session, ()):
            self._arriving[session].discard(message)
            self._lives(session, now)

    def waits(self) -> Iterator[Wait]:
        """Return until when each task has to be answered."""
        for task in sorted(self._waited):
            session, what, _ = task
            one = self._waited[task]
            if one.awaits or self._arriving.get(session):  # a connection on which no byte moves ends by itself
                continue
            kinds = {other[1] for other in self._waited if other[0] == session}
            longest = max(self._longest.get(kind, self._least_s) for kind in kinds)
            until = one.complete_at + max(self._least_s, STUCK_FACTOR * longest)
            yield Wait(session, one.complete_at, until, _LACKS[what])

    def _lives(self, session: int, now: float) -> None:
        for task, one in self._waited.items():
            if task[0] == session:
                one.complete_at = now
