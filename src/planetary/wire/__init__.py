"""One codec for all messages between peers: messages, their frames, and two machines that move them.

It has no sockets and no messages: a `Protocol` gets the participants' message classes. `frames` defines the layout of
bytes, `streams` turns bytes into messages (`Inbox`) and messages into frames (`Outbox`).
"""

from planetary.wire.limits import Limits
from planetary.wire.message import Message, Order
from planetary.wire.protocol import Protocol
from planetary.wire.streams import (
    Allocate,
    Inbox,
    Outbox,
    ReceivedMessage,
    allocate_any,
    expect_tensors,
    refuse_tensors,
)

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
