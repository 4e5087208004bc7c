"""What every control message has."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all control messages."""

    id: int = 0  # stamped by the connection that sends it
