"""The messages of connections themselves, which every protocol over `planetary.net` has."""

from __future__ import annotations

from planetary.core.errors import ClosedError, PeerError, PlanetaryError, TrustError
from planetary.wire.message import Message


class Greeting(Message, frozen=True, kw_only=True):
    """Base of a protocol's first message, client to server."""

    role: str  # requested role, which the client's invite token has to allow
    protocol: int
    software: str  # version of planetary
    token: str  # invite token; empty only on loopback without TLS
    identity: str = ""  # public key of the sender's machine, hexadecimal; see `net.identity`
    proof: str = ""  # proof of the sender's key: a signature, hexadecimal

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

    code: str  # "protocol", "token", "busy" or "finished"; a package with more reasons has its own
    reason: str  # one sentence for people: expected value, actual value, which side to upgrade
    retry: bool = False  # trying again later can help
    kind: str = ""  # kind of failure for which the client is banned


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent in both directions when nothing else was sent for `heartbeat_s`."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The sender closes the connection on purpose."""

    reason: str


SESSION = (Welcome, Refused, Heartbeat, Goodbye)
"""The messages a protocol needs beside the greeting and its own."""


def refusal_error(refused: Refused, server: str = "gateway") -> PlanetaryError:
    """Return the client's error for a refusal by `server` (a name for people).

    `ClosedError` when the run is finished, `PeerError` when trying again later can help, else `TrustError`.
    """
    text = f"the {server} refused this client: {refused.reason}"
    if refused.code == "finished":
        return ClosedError(text)
    return PeerError(text) if refused.retry else TrustError(text)
