"""What travels between peers: typed messages, their frames, and two state machines that parse and order them.

No sockets here. `messages` says what can be said, `frames` how bytes are laid out, `Inbox` turns bytes into
messages, `Outbox` turns messages into frames.
"""

from planetary.wire.inbox import Allocate, Inbox, Received, allocate_any, expect_tensors, refuse_tensors
from planetary.wire.limits import Limits
from planetary.wire.outbox import Outbox

__all__ = [
    "Allocate",
    "Inbox",
    "Limits",
    "Outbox",
    "Received",
    "allocate_any",
    "expect_tensors",
    "refuse_tensors",
]
