"""The messages of connections themselves, which every protocol over `planetary.net` has."""

from __future__ import annotations

from typing import Literal

from planetary.wire.message import Message


class Greeting(Message, frozen=True, kw_only=True):
    """Base of a protocol's first message, client to server."""

    role: str  # that the client asks for, and that its invite token has to allow
    protocol: int
    software: str  # version of planetary
    token: str  # invite token; empty only on loopback without TLS

    def sender(self) -> str:
        """Return who introduces itself, for people."""
        return self.role


class Welcome(Message, frozen=True, kw_only=True):
    """The server accepts the connection."""

    run: str
    heartbeat_s: float  # each side sends at least one frame per this many seconds
    silent_after_s: float  # a side that was silent for longer is lost


class Refused(Message, frozen=True, kw_only=True):
    """The server refuses the connection and closes it."""

    code: Literal["protocol", "token", "iree", "target", "busy", "banned", "finished", "role"]
    reason: str  # one sentence for people: what was expected, what was found, which side to upgrade
    retry: bool = False  # whether trying again later can help
    kind: str = ""  # of what failed, for which the client is banned


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent in both directions when nothing else was sent for `heartbeat_s`."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The sender closes the connection on purpose."""

    reason: str


SESSION = (Welcome, Refused, Heartbeat, Goodbye)
"""What a protocol needs beside its greeting and its own messages."""
