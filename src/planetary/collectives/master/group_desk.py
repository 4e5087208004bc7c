"""The master's state of one peer group: peers, their ring, and the messages to them. It decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from planetary.collectives.master.events import GroupRecord, MemberRecord
from planetary.collectives.protocol import messages as m
from planetary.machine.events import Append, Instruction, Send

IDLE = "nothing in the group"


@dataclass
class Peer:
    """A peer as the master knows it.

    Attributes:
        agreed: whether it took part in the synchronisation that elected the group's revision.
    """

    info: m.PeerInfo
    secret: str
    digests: tuple[str, ...]
    connection: int | None  # None while it may return to a restarted master
    agreed: bool = False
    return_by: float = math.inf
    doing: str = IDLE
    since: float = 0.0


class GroupDesk:
    """State and messages the parts of a `GroupMachine` share.

    Attributes:
        key: secret of the group, shown by bulk connections.
        ring: ids of the members, in order.
        epoch: number of the ring.
        revision: revision of the last elected shared state.
        content: digest of that state, by `sync_election.content_digest`.
        seq: number of the last operation.
        counts: answered calls of each kind.
        pending: the last answer to whether newcomers wait.
        out: instructions of the event that is being handled.
    """

    def __init__(self, number: int, draw: Callable[[], str], everyone: Callable[[], tuple[int, int, int]]) -> None:
        self.number, self.key = number, draw()
        self.peers: dict[str, Peer] = {}
        self.ring: list[str] = []
        self.epoch = 0
        self.revision: int | None = None
        self.content = ""
        self.seq = 0
        self.counts = m.Counts()
        self.pending = False
        self.out: list[Instruction] = []
        self._draw, self._everyone = draw, everyone

    @property
    def emptied(self) -> bool:
        """Whether a state was elected and all peers that agreed on it have left: newcomers do not have it."""
        return self.revision is not None and not any(self.peers[peer].agreed for peer in self.ring)

    def agree(self, peers: Iterable[str], revision: int, content: str) -> None:
        """Record the shared state that these peers have agreed on."""
        self.revision, self.content = revision, content
        agreeing = set(peers)
        for name, known in self.peers.items():
            known.agreed = name in agreeing
        self.remember()

    def name(self, peer: str) -> str:
        """Return the user's name of a peer."""
        return self.peers[peer].info.name

    def whereabouts(self, peer: str) -> str:
        """Return the name and activity of a peer, for error texts."""
        return f"{self.name(peer)} is in: {self.peers[peer].doing}"

    def doing(self, peer: str, what: str, now: float) -> None:
        """Set a peer's activity, for error texts."""
        self.peers[peer].doing, self.peers[peer].since = what, now

    def next_seq(self) -> int:
        """Return the number of a new operation."""
        self.seq += 1
        return self.seq

    def count(self, **counts: int) -> None:
        """Record the number of answered calls, for a restarted master too."""
        self.counts = msgspec.structs.replace(self.counts, **counts)
        self.remember()

    def lay(self, ring: Sequence[str]) -> None:
        """Make this the ring, once all operations on the old one have ended."""
        self.ring = list(ring)
        self.epoch += 1
        if not ring:
            self.key = self._draw()  # refuses links of the old members
        self.remember()

    def remember(self) -> None:
        """Append the group's record to the journal."""
        self.out.append(Append(self.record()))

    def record(self) -> GroupRecord:
        """Return the group's record for a restarted master."""
        members = (self.peers[peer] for peer in self.ring)
        ring = tuple(MemberRecord(known.info, known.secret, known.digests, known.agreed) for known in members)
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
        )

    def topology(self) -> m.RingChanged:
        """Return the message that describes the present ring."""
        world, groups, largest = self._everyone()
        members = [self.peers[peer] for peer in self.ring]
        common = [d for d in members[0].digests if all(d in known.digests for known in members)] if members else []
        return m.RingChanged(
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
