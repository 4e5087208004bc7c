"""What happens to the master machine, what it wants done, and what it keeps on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from planetary.collectives.protocol.messages import Counts, FromPeer, Message, PeerInfo

SolvePurpose = Literal["better", "watch", "detour"]
"""Why a ring is sought: peers asked for a better one, measurements in the background changed, or a link broke."""


@dataclass(frozen=True)
class Received:
    """A message came over a connection. The shell has checked the token of a `Register`."""

    connection: int
    message: FromPeer
    seen_host: str = ""  # the address it came from


@dataclass(frozen=True)
class Closed:
    """A connection ended."""

    connection: int
    reason: str


@dataclass(frozen=True)
class Tick:
    """A deadline may have passed."""


@dataclass(frozen=True)
class Solved:
    """The answer to `Solve`: `order` of the peers, None when no ring is possible."""

    group: int
    peers: tuple[str, ...]
    order: tuple[int, ...] | None
    purpose: SolvePurpose


Event = Received | Closed | Tick | Solved


@dataclass(frozen=True)
class Send:
    """Send a message."""

    connection: int
    message: Message


@dataclass(frozen=True)
class Close:
    """Close a connection after what was sent on it."""

    connection: int
    reason: str


@dataclass(frozen=True)
class Append:
    """Write a record to the journal before anything that follows is sent."""

    record: Record


@dataclass(frozen=True)
class Solve:
    """Find the best ring; off the machine's thread, since it may take seconds."""

    group: int
    peers: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]
    purpose: SolvePurpose


Instruction = Send | Close | Append | Solve


class MemberRecord(msgspec.Struct, frozen=True):
    """A member, and the secret by which it proves to be the same after a restart."""

    info: PeerInfo
    secret: str
    digests: tuple[str, ...]


class GroupRecord(msgspec.Struct, frozen=True, tag=True):
    """All of a group; replaces the earlier record of the same number."""

    number: int
    key: str
    epoch: int
    seq: int
    revision: int | None
    counts: Counts
    pending: bool  # the last answer to `AskPending`
    ring: tuple[MemberRecord, ...]
    content: str = ""  # digest of the shared state of `revision`
    emptied: bool = False  # whether all members have gone since that was agreed on


class Decided(msgspec.Struct, frozen=True, tag=True):
    """An operation was declared a success. One that is not recorded failed."""

    group: int
    seq: int


Record = GroupRecord | Decided
