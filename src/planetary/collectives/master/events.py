"""Events and instructions of the master's machine beside the kernel's, and the journal's records."""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.collectives.protocol.messages import Counts, PeerInfo
from planetary.machine.events import Event, Instruction

SolvePurpose = Literal["better", "watch", "detour"]
"""Why a ring is sought: peers asked for a better one, measurements in the background changed, or a link broke."""


class Solved(Event, frozen=True):
    """The answer to `Solve`: `order` of the peers, None when no ring is possible."""

    group: int
    peers: tuple[str, ...]
    order: tuple[int, ...] | None
    purpose: SolvePurpose


class Solve(Instruction, frozen=True):
    """Find the best ring; off the machine's thread, since it may take seconds."""

    group: int
    peers: tuple[str, ...]
    costs: tuple[tuple[float, ...], ...]
    purpose: SolvePurpose


class MemberRecord(msgspec.Struct, frozen=True):
    """A member, and the secret by which it proves to be the same after a restart."""

    info: PeerInfo
    secret: str
    digests: tuple[str, ...]
    agreed: bool = False  # the group's revision comes from a synchronisation with this peer


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


class Decided(msgspec.Struct, frozen=True, tag=True):
    """An operation was declared a success. One that is not recorded failed."""

    group: int
    seq: int


Record = GroupRecord | Decided
