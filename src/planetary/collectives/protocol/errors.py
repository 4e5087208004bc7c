"""Errors of collectives, below the classes of `planetary.core.errors`.

PeerError
├── AbortedError             the operation failed on every peer; inputs are intact and it can be retried at once
│   └── PeerLostError        ... because a peer, or the master, is gone
├── StragglerError           a deadline passed; the text names the missing peers and their activity
└── RemovedError             the master removed this peer; the text has the reason
UserError
├── DisagreementError        peers called the same operation with different arguments; nothing was changed
└── TooFewPeersError         the group is smaller than the caller allows
"""

from __future__ import annotations

from planetary.core.errors import PeerError, PlanetaryError, UserError


class AbortedError(PeerError):
    """An operation failed on all peers alike; the arrays are unchanged.

    Attributes:
        peers: names of the responsible peers; empty for none.
    """

    def __init__(self, text: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.peers = peers


class PeerLostError(AbortedError):
    """A peer (or `"master"`) died or fell silent during the operation; see `AbortedError`."""


class StragglerError(PeerError):
    """Some peers did not make a call in time.

    Attributes:
        peers: names of the peers that were missing.
    """

    def __init__(self, text: str, peers: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.peers = peers


class RemovedError(PeerError):
    """The master removed this peer from the group. Close the communicator; a new one may join again."""


class DisagreementError(UserError):
    """Peers called one operation with different arguments; the text names the peers and both values."""


class PendingOperationsError(UserError):
    """The topology and the shared state can change only while no operation of this peer is under way."""


class TooFewPeersError(UserError):
    """The group has fewer peers than the caller asked for."""


def error_of(code: str, text: str, peers: tuple[str, ...] = ()) -> PlanetaryError:
    """Return the exception that a failure code of `messages.Code` stands for."""
    match code:
        case "lost":
            return PeerLostError(text, peers)
        case "straggler":
            return StragglerError(text, peers)
        case "disagreement":
            return DisagreementError(text)
        case "too_few":
            return TooFewPeersError(text)
        case "removed":
            return RemovedError(text)
        case _:
            return AbortedError(text, peers)
