"""What the master holds of one peer group: its peers, their ring, and what it says to them. It decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from planetary.collectives.master.master_events import GroupRecord, MemberRecord
from planetary.collectives.protocol import messages as m
from planetary.machine.events import Append, Instruction, Send

IDLE = "nothing in the group"


@dataclass
class Peer:
    """A peer as the master knows it."""

    info: m.PeerInfo
    secret: str
    digests: tuple[str, ...]
    connection: int | None  # None while it may return to a restarted master
    return_by: float = math.inf
    doing: str = IDLE
    since: float = 0.0


class GroupDesk:
    """Shared by the parts of a `GroupMachine`.

    Attributes:
        key: what bulk connections within the group show.
        ring: ids of the members, in order.
        epoch: number of the ring.
        revision: of the shared state that the members agreed on last.
        content: digest of that state, by `sync_election.content_digest`.
        emptied: whether the group has lost all its members since.
        seq: number of the last operation.
        counts: how often calls were answered.
        pending: the last answer to whether newcomers wait.
        out: instructions of the event that is being handled.
    """

    def __init__(self, number: int, draw: Callable[[], str], everyone: Callable[[], tuple[int, int, int]]) -> None:
        """See `GroupMachine`."""
        self.number, self.key = number, draw()
        self.peers: dict[str, Peer] = {}
        self.ring: list[str] = []
        self.epoch = 0
        self.revision: int | None = None
        self.content = ""
        self.emptied = False
        self.seq = 0
        self.counts = m.Counts()
        self.pending = False
        self.out: list[Instruction] = []
        self._draw, self._everyone = draw, everyone

    def name(self, peer: str) -> str:
        """What the user calls a peer."""
        return self.peers[peer].info.name

    def whereabouts(self, peer: str) -> str:
        """Who a peer is and what it does, for error texts."""
        return f"{self.name(peer)} is in: {self.peers[peer].doing}"

    def doing(self, peer: str, what: str, now: float) -> None:
        """A peer begins to do something; error texts say it."""
        self.peers[peer].doing, self.peers[peer].since = what, now

    def next_seq(self) -> int:
        """Return the number of a new operation."""
        self.seq += 1
        return self.seq

    def count(self, **counts: int) -> None:
        """Remember, beyond a restart, that a call was answered."""
        self.counts = msgspec.structs.replace(self.counts, **counts)
        self.remember()

    def lay(self, ring: Sequence[str]) -> None:
        """Make this the ring. What runs on the old one has ended."""
        self.ring = list(ring)
        self.epoch += 1
        if not ring:
            # Links of the old members are not welcome any more. The state that they agreed on is remembered: who comes
            # next must not go on from another one unnoticed.
            self.key, self.emptied = self._draw(), self.revision is not None
        self.remember()

    def remember(self) -> None:
        """Have the journal say what is here."""
        self.out.append(Append(self.record()))

    def record(self) -> GroupRecord:
        """Return what a restarted master needs."""
        members = (self.peers[peer] for peer in self.ring)
        ring = tuple(MemberRecord(known.info, known.secret, known.digests) for known in members)
        return GroupRecord(
            self.number,
            self.key,
            self.epoch,
            self.seq,
            self.revision,
            self.counts,
            self.pending,
            ring,
            self.content,
            self.emptied,
        )

    def topology(self) -> m.Topology:
        """Return the message that describes the ring now."""
        world, groups, largest = self._everyone()
        members = [self.peers[peer] for peer in self.ring]
        common = [d for d in members[0].digests if all(d in known.digests for known in members)] if members else []
        return m.Topology(
            epoch=self.epoch,
            ring=tuple(known.info for known in members),
            key=self.key,
            digest=common[0] if common else "",
            world=world,
            groups=groups,
            largest=largest,
        )

    def answer(self, peer: str, message: m.Message) -> None:
        """Send to a peer, if it is connected."""
        connection = self.peers[peer].connection
        if connection is not None:
            self.out.append(Send(connection, message))

    def tell_ring(self) -> None:
        """Send the topology to all members."""
        for peer in self.ring:
            self.answer(peer, self.topology())

    def take(self) -> list[Instruction]:
        """Return the instructions of this event, once."""
        out, self.out = self.out, []
        return out
