"""The operations that run in one peer group: each ends alike on all peers, and a failing link is avoided.

Which shared state wins, who lacks parts of it and who breaks a rule is one pure decision (`elect`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from planetary.collectives.master.events import Decided, Solve
from planetary.collectives.master.group_desk import IDLE, GroupDesk
from planetary.collectives.master.group_links import GroupLinks
from planetary.collectives.master.ring_order import tour_cost
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.messages import ArrayEntry, Fetch, Sync
from planetary.collectives.protocol.operation_states import MASTER_OPERATION
from planetary.collectives.protocol.options import Spec, SyncStrategy
from planetary.machine.events import Append
from planetary.machine.state_table import advance


@dataclass(frozen=True)
class Election:
    """The outcome of an election.

    Attributes:
        revision: of the elected state; None when there is none, see `failure`.
        removed: peer -> the rule it broke.
        fetch: peer -> the arrays it lacks; an empty tuple for none.
        failure: the reason for a failed election; empty otherwise.
        content: digest of the elected state.
    """

    revision: int | None = None
    removed: Mapping[str, str] = field(default_factory=dict)
    fetch: Mapping[str, tuple[Fetch, ...]] = field(default_factory=dict)
    failure: str = ""
    content: str = ""


def elect_again(offers: Mapping[str, Sync], last: int, content: str, algorithm: str) -> Election:
    """Decide for a group without any peer of the last agreement, on revision `last` with digest `content`.

    The state the new members go on from must be that one, or one more revision trained from it; or every sending peer
    asks for a restart. PCCL's report (section 8) promises the same. `algorithm` names the digests; a content digested
    by another one is known by revision only.
    """
    senders = [offer for offer in offers.values() if offer.strategy is not SyncStrategy.RECEIVE_ONLY]
    if senders and all(offer.restart for offer in senders):
        return elect(offers, None, algorithm)
    election = elect(offers, last, algorithm)
    if election.failure or election.revision is None:
        return election
    same_kind = content.partition(":")[0] == algorithm
    if election.revision == last + 1 or (election.revision == last and (not same_kind or election.content == content)):
        return election
    found = "another content" if election.revision == last else f"revision {election.revision}"
    return Election(
        failure=f"the group agreed on revision {last}, all peers that did have left, and {found} is on offer. Restore "
        f"a checkpoint of revision {last}, or call sync_shared_state(restart=True) on every peer that offers a state "
        "to begin anew"
    )


def content_digest(entries: Sequence[ArrayEntry], algorithm: str) -> str:
    """Return a digest of a whole state, after the name of the entries' algorithm."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    return f"{algorithm}:{hashlib.sha256(msgspec.json.encode(ordered)).hexdigest()}"


def elect(offers: Mapping[str, Sync], current: int | None, algorithm: str = "") -> Election:
    """Decide. `offers` is peer -> state, in ring order; `current` the group's last revision, None for the first.

    1. A revision may be one more than the current one at most; the first one is free.
    2. Among the sending peers (all but RECEIVE_ONLY) the highest revision wins over lower ones, and then the content of
       most peers; at a tie the one whose first holder comes first in the ring. It is older than the current one only if
       no peer offers that one.
    3. Names, types and shapes of all peers must be the winner's. Contents marked as free to differ are not compared.
    4. SEND_ONLY peers must have the winning content.

    `algorithm` names the digests of the entries; it is part of the elected content's digest.
    """
    removed: dict[str, str] = {}
    if current is not None:
        for peer, offer in offers.items():
            if offer.revision > current + 1 and offer.strategy is not SyncStrategy.RECEIVE_ONLY:
                removed[peer] = (
                    f"shared state: expected revision {current + 1} at most (the last one was {current}), found "
                    f"{offer.revision}; raise it by one before each synchronisation"
                )
    senders = {
        peer: offer
        for peer, offer in offers.items()
        if peer not in removed and offer.strategy is not SyncStrategy.RECEIVE_ONLY
    }
    if not senders:
        return Election(removed=removed, failure="no peer offers a state: every peer is RECEIVE_ONLY or was removed")
    revision = max(offer.revision for offer in senders.values())
    if current is not None and revision < current <= max(offer.revision for offer in offers.values()):
        text = f"the newest state on offer has revision {revision}, the group is at {current} already"
        return Election(removed=removed, failure=text)
    newest = {peer: offer for peer, offer in senders.items() if offer.revision == revision}
    contents = {peer: _content(offer) for peer, offer in newest.items()}
    votes = Counter(contents.values())
    most = max(votes.values())
    winner = next(offer for peer, offer in newest.items() if votes[contents[peer]] == most)
    shapes, shape = {peer: _shape(offer) for peer, offer in offers.items()}, _shape(winner)
    entries = {peer: {entry.name: entry for entry in offer.entries} for peer, offer in offers.items()}
    fetch: dict[str, tuple[Fetch, ...]] = {}
    holders = [peer for peer in newest if shapes[peer] == shape]
    donors: dict[str, list[str]] = {
        entry.name: [peer for peer in holders if entries[peer][entry.name] == entry] for entry in winner.entries
    }
    for peer, offer in offers.items():
        if peer in removed:
            continue
        if shapes[peer] != shape:
            removed[peer] = f"shared state: {_difference(winner, offer)}"
            continue
        own = entries[peer]
        lacks = tuple(
            Fetch(entry.name, entry.digest, tuple(donors[entry.name]))
            for entry in winner.entries
            if entry.digest and own[entry.name].digest != entry.digest
        )
        if lacks and offer.strategy is SyncStrategy.SEND_ONLY:
            names = ", ".join(item.name for item in lacks[:5])
            removed[peer] = f"shared state: this peer is SEND_ONLY, but another content was elected for {names}"
            continue
        fetch[peer] = lacks
    # A donor that broke a rule cannot be asked.
    fetch = {
        peer: tuple(Fetch(f.name, f.digest, tuple(d for d in f.donors if d not in removed)) for f in items)
        for peer, items in fetch.items()
    }
    return Election(revision, removed, fetch, content=content_digest(winner.entries, algorithm))


def _shape(offer: Sync) -> tuple[tuple[str, str, tuple[int, ...], bool], ...]:
    return tuple(sorted((e.name, e.dtype, e.shape, bool(e.digest)) for e in offer.entries))


def _content(offer: Sync) -> tuple[ArrayEntry, ...]:
    return tuple(sorted(offer.entries, key=lambda entry: entry.name))


def _difference(winner: Sync, offer: Sync) -> str:
    expected, found = ({e.name: _description(e) for e in entries} for entries in (winner.entries, offer.entries))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"{name!r}: expected {expected.get(name, 'no such entry')}, found {found.get(name, 'no such entry')}"
    return "two entries have one name"


def _description(entry: ArrayEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}{'' if entry.digest else ' (may differ)'}"


_VERDICT_S = 0.25  # time for the master's connection to an unreachable peer to break, too
_REMEMBERED = 4096  # outcomes of past operations, for peers that return in doubt


@dataclass(frozen=True)
class LinkFault:
    """A fault of the link between two peers, of which one may be gone."""

    reporter: str
    blamed: str
    name: str  # name of the blamed peer
    reason: str
    verdict_at: float  # the blamed peer lives if it is not lost until then


@dataclass
class Running:
    """An operation that began."""

    title: str
    peers: tuple[str, ...]
    verify: bool = False
    revision: int | None = None  # revision after a synchronisation
    content: str = ""  # digest of the state it elected
    done: dict[str, m.Done | m.SyncDone] = field(default_factory=dict)
    state: str = "running"
    fault: LinkFault | None = None  # the first that was reported; the state is `faulty` then


class GroupOperations:
    """Part of a `GroupMachine`.

    Attributes:
        running: operations by number.
        decided: numbers of those that succeeded, oldest first.
    """

    def __init__(self, desk: GroupDesk, links: GroupLinks) -> None:
        """Start without operations."""
        self.running: dict[int, Running] = {}
        self.decided: dict[int, None] = {}
        self._desk, self._links = desk, links
        self._seeking = False  # search for a way around a broken link is under way

    def begin(self, operation: Running) -> int:
        """Add an operation and return its number, under which the peers begin it."""
        seq = self._desk.next_seq()
        self.running[seq] = operation
        return seq

    def done(self, peer: str, message: m.Done | m.SyncDone, now: float) -> None:
        """A peer has completed an operation, or could not.

        One that blames another peer may have noticed a death before the master: the operation ends with the verdict.
        """
        running = self.running.get(message.seq)
        if running is None or running.fault is not None or peer not in running.peers:
            return  # it was aborted while the message travelled, or will be
        ring = self._desk.ring
        if message.ok:
            running.done[peer] = message
            if isinstance(message, m.Done) and peer in ring:
                self._links.observed((ring[ring.index(peer) - 1], peer), message.bytes_per_s)
            return
        reporter = self._desk.name(peer)
        reason = f"{running.title}: {reporter} reports: {message.reason}"
        blamed = message.blame if isinstance(message, m.Done) else ""
        if blamed not in self._desk.peers:
            self._abort(message.seq, "aborted", reason, (reporter,))
            return
        running.state = advance(MASTER_OPERATION, running.state, "link fault")
        running.fault = LinkFault(peer, blamed, self._desk.name(blamed), reason, now + _VERDICT_S)

    def deadline(self) -> float:
        """Return the time of the next verdict; infinite for none."""
        return min((fault.verdict_at for _, fault in self._faults()), default=math.inf)

    def expire(self, now: float) -> None:
        """Abort operations whose links failed between live peers; avoid an often failing link."""
        for seq, fault in self._faults():
            if fault.verdict_at <= now and seq in self.running:
                self._abort(seq, "aborted", fault.reason, (fault.name,))
                self._broke(fault.reporter, fault.blamed)

    def _faults(self) -> list[tuple[int, LinkFault]]:
        return [(seq, running.fault) for seq, running in self.running.items() if running.fault is not None]

    def check(self) -> bool:
        """End the operations that all peers have completed; true when one has ended."""
        ended = False
        for seq, running in list(self.running.items()):
            if len(running.done) < len(running.peers):
                continue
            ended = True
            digests = {done.digest for done in running.done.values() if isinstance(done, m.Done)}
            if running.verify and len(digests) > 1:
                running.state = advance(MASTER_OPERATION, running.state, "digests differ")
                names = self._odd_ones(running)
                text = f"{running.title}: results differ between peers; different from most: {', '.join(names)}"
                self._end(seq, running, m.Outcome(seq=seq, ok=False, code="aborted", reason=text, peers=names))
                continue
            running.state = advance(MASTER_OPERATION, running.state, "all completed")
            if running.revision is not None:
                self._desk.agree(running.done, running.revision, running.content)
            self._desk.out.append(Append(Decided(self._desk.number, seq)))
            self.decided[seq] = None
            while len(self.decided) > _REMEMBERED:
                del self.decided[next(iter(self.decided))]
            self._links.forgive()
            self._end(seq, running, m.Outcome(seq=seq, ok=True))
        return ended

    def lose(self, peer: str, name: str, reason: str, *, aborts: bool) -> None:
        """Abort the operations of a lost member, except for synchronisations."""
        for seq, running in list(self.running.items()):
            if peer not in running.peers:
                continue
            if running.revision is not None:
                # Donors are replaceable: the others go on; a peer without a donor reports a failure.
                running.peers = tuple(other for other in running.peers if other != peer)
                running.done.pop(peer, None)
                if not running.peers:
                    del self.running[seq]
            elif aborts:
                self._abort(seq, "lost", f"{running.title}: {name} {reason}", (name,))

    def _broke(self, reporter: str, blamed: str) -> None:
        ring = self._desk.ring
        if reporter not in ring or blamed not in ring or not self._links.blame((reporter, blamed)):
            return
        self._links.give_up((reporter, blamed))
        self._seek_detour()

    def _seek_detour(self) -> None:
        ring = self._desk.ring
        if (
            len(ring) >= 3 and not self._seeking
        ):  # with fewer there is no way around; the peers try until their deadline
            self._seeking = True
            self._desk.out.append(Solve(self._desk.number, tuple(ring), self._links.costs(ring), "detour"))

    def detour(self, peers: tuple[str, ...], order: tuple[int, ...] | None) -> None:
        """Lay the solver's ring around a broken link; the old one was in use until now.

        Where the ring is not that of `peers` any more, or a link of the answer broke meanwhile, a way is sought again
        if a broken link is still in the ring. Nothing changes where there is no way around (`order` None).
        """
        self._seeking = False
        ring = self._desk.ring
        costs = self._links.costs(ring)
        if peers != tuple(ring) or (order is not None and math.isinf(tour_cost(costs, order))):
            if math.isinf(tour_cost(costs, range(len(ring)))):
                self._seek_detour()
            return
        if order is None:
            return
        for seq, running in list(self.running.items()):
            self._abort(seq, "aborted", f"{running.title}: the ring was laid anew around a broken link", ())
        self._desk.lay([peers[i] for i in order])
        self._desk.tell_ring()

    def _odd_ones(self, running: Running) -> tuple[str, ...]:
        found = {peer: done.digest for peer, done in running.done.items() if isinstance(done, m.Done)}
        common = Counter(found.values()).most_common(1)[0][0]
        return tuple(self._desk.name(peer) for peer, digest in found.items() if digest != common)

    def _abort(self, seq: int, code: m.Code, text: str, names: tuple[str, ...]) -> None:
        running = self.running[seq]
        running.state = advance(MASTER_OPERATION, running.state, "a peer failed or is gone")
        self._end(seq, running, m.Outcome(seq=seq, ok=False, code=code, reason=text, peers=names))

    def _end(self, seq: int, running: Running, outcome: m.Outcome) -> None:
        del self.running[seq]
        for peer in running.peers:
            if peer in self._desk.peers:
                self._desk.peers[peer].doing = IDLE
                self._desk.answer(peer, outcome)


def disagreement(calls: Sequence[tuple[str, Spec]]) -> str:
    """Describe the fields in which the calls of peers (by name; names may be equal) differ; empty for equal calls."""
    parts = []
    if all(spec == calls[0][1] for _, spec in calls):
        return ""
    for field_name in Spec.__struct_fields__:
        values: dict[str, list[str]] = {}
        for name, spec in calls:
            values.setdefault(str(getattr(spec, field_name)), []).append(name)
        if len(values) > 1:
            said = ", ".join(f"{value} from {' and '.join(who)}" for value, who in values.items())
            parts.append(f"{field_name}: {said}")
    return "peers disagree on " + "; ".join(parts) if parts else ""
