"""What was given to connections and has not left this machine completely: on a slow line that takes minutes."""

from __future__ import annotations

from collections import deque

from planetary.machine.events import Payload
from planetary.wire.message import Message, Order


class UnderWay:
    """Payloads of messages that are sent in turn, by session and in that order."""

    def __init__(self) -> None:
        """Start with no payload in flight."""
        self._queues: dict[int, deque[Payload]] = {}

    def add(self, session: int, message: Message, payload: Payload | None) -> None:
        """A message was given to a connection."""
        if payload is not None and message.sending_order() is Order.IN_TURN:
            self._queues.setdefault(session, deque()).append(payload)

    def sent(self, session: int, message: Message) -> bool:
        """A message with a payload has left; return whether it was one of these."""
        queue = self._queues.get(session)
        if not queue or message.sending_order() is not Order.IN_TURN:
            return False
        queue.popleft()
        return True

    def count(self, session: int) -> int:
        """Return how many are under way on a connection."""
        return len(self._queues.get(session, ()))

    def payloads(self) -> list[Payload]:
        """Return all of them."""
        return [payload for queue in self._queues.values() for payload in queue]

    def forget(self, session: int) -> None:
        """A connection has ended."""
        self._queues.pop(session, None)
