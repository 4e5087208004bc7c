"""The fields of every control message, of any protocol."""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar, TypeVar

import msgspec


class Order(Enum):
    """When a message is sent queued behind others."""

    AHEAD = auto()  # at once, before all waiting payloads
    IN_TURN = auto()  # after all that were queued before it and are sent in turn
    BESIDE = auto()  # after those sent beside the others; both share the line


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all control messages.

    Most have to arrive in the order in which they were queued. A payload may take minutes on a slow line; a class
    whose messages need not wait for one sets `order`, and overrides `sending_order` where it depends on the message.
    """

    order: ClassVar[Order] = Order.IN_TURN
    id: int = 0  # stamped by the connection that sends it

    def sending_order(self) -> Order:
        """Return when this message is sent."""
        return self.order


M = TypeVar("M", bound=Message)


def stamp(message: M, id: int) -> M:
    """Return the message with this id."""
    return msgspec.structs.replace(message, id=id)
