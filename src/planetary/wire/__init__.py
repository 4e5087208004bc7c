"""One codec for everything that peers say to each other: messages, their frames, and two machines that move them.

No sockets here, and no message of anybody: a `Protocol` is given the classes of those that speak it. `frames` says how
bytes are laid out, `Inbox` turns bytes into messages, `Outbox` turns messages into frames.
"""

from planetary.wire.inbox import Allocate, Inbox, ReceivedMessage, allocate_any, expect_tensors, refuse_tensors
from planetary.wire.limits import Limits
from planetary.wire.message import Message, Order
from planetary.wire.outbox import Outbox
from planetary.wire.protocol import Protocol

__all__ = [
    "Allocate",
    "Inbox",
    "Limits",
    "Message",
    "Order",
    "Outbox",
    "Protocol",
    "ReceivedMessage",
    "allocate_any",
    "expect_tensors",
    "refuse_tensors",
]
