"""One peer group at the master: who is in, what they are waiting for together, and what is running."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from planetary.collectives import messages as m
from planetary.collectives import sync_election
from planetary.collectives.group_links import GroupLinks
from planetary.collectives.master_events import (
    Append,
    Close,
    Decided,
    GroupRecord,
    Instruction,
    MemberRecord,
    Send,
    Solve,
)
from planetary.collectives.options import Spec
from planetary.collectives.probe_schedule import ProbeRound, schedule
from planetary.collectives.ring_order import solve, tour_cost
from planetary.collectives.small_operations import data_bytes, is_small
from planetary.collectives.states import MASTER_OPERATION, advance

_PROBE_S = 0.4
_PROBE_SLACK_S = 5.0
_REMEMBERED = 4096  # outcomes of past operations, for peers that return in doubt


@dataclass
class Peer:
    """A peer as the master knows it."""

    info: m.PeerInfo
    secret: str
    digests: tuple[str, ...]
    connection: int | None  # None while it may return to a restarted master
    return_by: float = math.inf
    doing: str = "nothing in the group"
    since: float = 0.0


@dataclass
class Gathering:
    """Calls that wait until every member has made the same one."""

    title: str
    opened: float
    deadline: float
    requests: dict[str, m.Vote | m.AskPending | m.Start | m.Sync | m.Optimize] = field(default_factory=dict)
    state: str = "gathering"


@dataclass
class Running:
    """An operation that began."""

    title: str
    peers: tuple[str, ...]
    verify: bool = False
    revision: int | None = None  # of a synchronisation
    done: dict[str, m.Done | m.SyncDone] = field(default_factory=dict)
    state: str = "running"


Key = tuple[str, int]
_VOTE: Key = ("vote", 0)


class GroupMachine:
    """Decides for one group. Every method takes the time and returns what to do.

    A call is answered as soon as all members have made it, or refused at its deadline with the names of who is
    missing and what they do instead. A loss aborts what is running, and the ring closes without the lost peer.
    """

    def __init__(self, number: int, draw: Callable[[], str], everyone: Callable[[], tuple[int, int, int]]) -> None:
        """`draw` returns a new secret; `everyone` members of all groups, number of groups, members of the largest."""
        self.number, self.key = number, draw()
        self._draw = draw
        self.peers: dict[str, Peer] = {}
        self.ring: list[str] = []  # members, in order
        self.epoch = 0
        self.revision: int | None = None
        self.seq = 0
        self.counts = m.Counts()
        self.pending = False  # the last answer to whether newcomers wait
        self.better: tuple[str, ...] | None = None  # ring to take at the next vote
        self.running: dict[int, Running] = {}
        self.decided: dict[int, None] = {}
        self._everyone = everyone
        self._waiting: dict[str, tuple[m.Vote, float]] = {}  # newcomers that want to be admitted
        self._gatherings: dict[Key, Gathering] = {}
        self._links = GroupLinks()
        self._probe: ProbeRound | None = None
        self._optimizing: dict[str, m.Optimize] = {}
        self._out: list[Instruction] = []

    # --- events

    def request(self, peer: str, message: m.Message, now: float) -> list[Instruction]:
        """A registered peer said something."""
        known = self.peers[peer]
        match message:
            case m.Vote(number=number) if peer in self.ring and number <= self.counts.votes:
                self._answer(peer, self.topology())
                self._answer(peer, m.Voted(call=message.call, counts=self.counts))
            case m.AskPending(number=number) if number <= self.counts.asks:
                self._answer(peer, m.Pending(call=message.call, counts=self.counts, pending=self.pending))
            case m.Optimize(number=number) if number <= self.counts.optimizes:
                self._answer(peer, m.Optimized(call=message.call, counts=self.counts, gain=1.0))
            case m.Vote() if peer not in self.ring:
                self._waiting[peer] = (message, now + message.timeout_s)
                known.doing, known.since = "waiting to be admitted", now
            case m.Vote():
                self._gather(peer, _VOTE, "update_topology", message, now)
            case m.AskPending():
                self._gather(peer, ("pending", 0), "are_peers_pending", message, now)
            case m.Optimize():
                self._gather(peer, ("optimize", 0), "optimize_topology", message, now)
            case m.Sync():
                self._gather(peer, ("sync", 0), "sync_shared_state", message, now)
            case m.Start():
                self._gather(peer, ("start", message.tag), f"{message.spec.kind} with tag {message.tag}", message, now)
            case m.Done() | m.SyncDone():
                self._done(peer, message)
            case m.Measured():
                self._measured(peer, message, now)
            case m.Leave():
                self._lose(peer, "left", now)
        self._check(now)
        return self._take()

    def lose(self, peer: str, reason: str, now: float) -> list[Instruction]:
        """A peer is gone."""
        self._lose(peer, reason, now)
        self._check(now)
        return self._take()

    def tick(self, now: float) -> list[Instruction]:
        """Let deadlines pass."""
        for peer in [name for name, known in self.peers.items() if known.return_by <= now]:
            self._lose(peer, "did not return to the restarted master in time", now)
        for peer, (vote, deadline) in list(self._waiting.items()):
            if deadline <= now:
                del self._waiting[peer]
                self._answer(peer, self._late_admission(vote, now))
        for key, gathering in list(self._gatherings.items()):
            if gathering.deadline <= now:
                self._expire(key, gathering, now)
        if self._probe is not None and self._probe.deadline <= now:
            for pair in list(self._probe.outstanding):
                self._links.unusable(pair)
                self._probe.outstanding.discard(pair)
        self._check(now)
        return self._take()

    def next_deadline(self) -> float:
        """When `tick` has something to do; infinite for never."""
        times = [gathering.deadline for gathering in self._gatherings.values()]
        times += [deadline for _, deadline in self._waiting.values()]
        times += [known.return_by for known in self.peers.values()]
        if self._probe is not None and self._probe.outstanding:
            times.append(self._probe.deadline)
        return min(times, default=math.inf)

    def solved(self, peers: tuple[str, ...], order: tuple[int, ...] | None, now: float) -> list[Instruction]:
        """The better ring was found."""
        self._finish_optimizing(peers, order)
        self._check(now)
        return self._take()

    def record(self) -> GroupRecord:
        """Return what a restarted master needs."""
        members = (self.peers[peer] for peer in self.ring)
        ring = tuple(MemberRecord(known.info, known.secret, known.digests) for known in members)
        return GroupRecord(self.number, self.key, self.epoch, self.seq, self.revision, self.counts, self.pending, ring)

    def returned(self, peer: str, undecided: tuple[int, ...]) -> list[Instruction]:
        """A member is back after a restart: tell it what became of the operations it left."""
        self.peers[peer].return_by = math.inf
        self._answer(peer, self.topology())
        for seq in undecided:
            ok = seq in self.decided
            reason = "" if ok else "the master was restarted before all peers had completed the operation"
            self._answer(peer, m.Outcome(seq=seq, ok=ok, code="master", reason=reason))
        return self._take()

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

    # --- gathering

    def _gather(
        self,
        peer: str,
        key: Key,
        title: str,
        message: m.Vote | m.AskPending | m.Start | m.Sync | m.Optimize,
        now: float,
    ) -> None:
        if peer not in self.ring:
            reason = f"{title}: this peer is no member of group {self.number} yet; call update_topology first"
            self._answer(peer, m.CallFailed(call=message.call, code="aborted", reason=reason))
            return
        gathering = self._gatherings.get(key)
        if gathering is None:
            gathering = self._gatherings[key] = Gathering(title, now, math.inf)
        if peer in gathering.requests:
            self._remove(peer, f"it called {title} twice at the same time", now)
            return
        gathering.requests[peer] = message
        gathering.deadline = min(gathering.deadline, now + message.timeout_s)
        self.peers[peer].doing, self.peers[peer].since = title, now

    def _check(self, now: float) -> None:
        """Go on with everything that waits for nobody any more; each step may let another one go on."""
        progressed = True
        while progressed:
            progressed = self._check_running() or self._check_vote(now) or self._check_probe(now)
            for key, gathering in list(self._gatherings.items()):
                if key != _VOTE and self.ring and all(peer in gathering.requests for peer in self.ring):
                    progressed |= self._complete(key, gathering, now)

    def _complete(self, key: Key, gathering: Gathering, now: float) -> bool:
        """All members came. False when it has to wait for something else."""
        kind = key[0]
        if kind in ("sync", "optimize") and self.running:
            return False  # peers do not call these while they reduce; a lost one's operations end first
        del self._gatherings[key]
        for peer in gathering.requests:
            self.peers[peer].doing, self.peers[peer].since = f"running {gathering.title}", now
        match kind:
            case "pending":
                self.pending = bool(self._waiting)
                self._count(asks=self.counts.asks + 1)
                for peer, message in gathering.requests.items():
                    self._answer(peer, m.Pending(call=message.call, counts=self.counts, pending=self.pending))
            case "start":
                self._commence(gathering)
            case "sync":
                self._elect(gathering, now)
            case "optimize":
                self._begin_probing(gathering, now)
        return True

    def _check_vote(self, now: float) -> bool:
        gathering = self._gatherings.get(_VOTE)
        votes = dict(gathering.requests) if gathering is not None else {}
        if self.running or any(peer not in votes for peer in self.ring) or not (self.ring or self._waiting):
            return False
        callers = {**votes, **{peer: vote for peer, (vote, _) in self._waiting.items()}}
        if not callers or len(callers) < max(vote.min_world for vote in callers.values() if isinstance(vote, m.Vote)):
            return False
        self._gatherings.pop(_VOTE, None)
        self._admit(list(self._waiting))
        self._waiting.clear()
        self._count(votes=self.counts.votes + 1)
        for peer, vote in callers.items():
            self.peers[peer].doing, self.peers[peer].since = "nothing in the group", now
            self._answer(peer, self.topology())
            self._answer(peer, m.Voted(call=vote.call, counts=self.counts))
        return True

    def _admit(self, newcomers: list[str]) -> None:
        ring = list(self.ring)
        if self.better is not None and set(self.better) == set(ring):
            ring = list(self.better)
        self.better = None
        for peer in newcomers:
            # Beside a peer on the same machine, so that the ring crosses the network as rarely as possible.
            machine = self.peers[peer].info.machine
            near = [i for i, other in enumerate(ring) if self.peers[other].info.machine == machine]
            ring.insert(near[-1] + 1 if near else len(ring), peer)
        if ring != self.ring:
            self._lay(ring)

    def _count(self, **counts: int) -> None:
        """Remember, beyond a restart, that a call was answered."""
        self.counts = msgspec.structs.replace(self.counts, **counts)
        self._out.append(Append(self.record()))

    def _lay(self, ring: list[str]) -> None:
        """Make this the ring. What runs on the old one has ended."""
        self.ring = ring
        self.epoch += 1
        if not ring:
            # Whoever comes next knows nothing of what was: its state may start anywhere, and links of the old
            # members are not welcome.
            self.revision, self.key = None, self._draw()
        self._out.append(Append(self.record()))

    def _expire(self, key: Key, gathering: Gathering, now: float) -> None:
        del self._gatherings[key]
        missing = [peer for peer in self.ring if peer not in gathering.requests]
        waited = now - gathering.opened
        if key == _VOTE and not missing:
            text = f"update_topology: {len(self.ring) + len(self._waiting)} peers came within {waited:.1f} s, too few"
            self._refuse(gathering, "too_few", text, ())
            return
        names = tuple(self.peers[peer].info.name for peer in missing)
        doing = "; ".join(
            f"{self.peers[peer].info.name} is in: {self.peers[peer].doing} (for {now - self.peers[peer].since:.1f} s)"
            for peer in missing
        )
        text = (
            f"{gathering.title}: waited {waited:.1f} s, {len(missing)} of {len(self.ring)} peers did not come: {doing}"
        )
        self._refuse(gathering, "straggler", text, names)

    def _late_admission(self, vote: m.Vote, now: float) -> m.CallFailed:
        size = len(self.ring) + len(self._waiting) + 1
        votes = self._gatherings.get(_VOTE)
        missing = [peer for peer in self.ring if votes is None or peer not in votes.requests]
        names = tuple(self.peers[peer].info.name for peer in missing)
        if not missing:
            reason = f"update_topology: {size} peers came within {vote.timeout_s:.1f} s, expected {vote.min_world}"
            return m.CallFailed(call=vote.call, code="too_few", reason=reason)
        doing = "; ".join(f"{self.peers[p].info.name} is in: {self.peers[p].doing}" for p in missing)
        reason = (
            f"not admitted within {vote.timeout_s:.1f} s: the members of group {self.number} have not all called "
            f"update_topology: {doing}"
        )
        return m.CallFailed(call=vote.call, code="straggler", reason=reason, peers=names)

    def _refuse(self, gathering: Gathering, code: m.Code, text: str, names: tuple[str, ...]) -> None:
        gathering.state = advance(
            MASTER_OPERATION, gathering.state, "arguments differ" if code == "disagreement" else "deadline"
        )
        for peer, message in gathering.requests.items():
            self._answer(peer, m.CallFailed(call=message.call, code=code, reason=text, peers=names))

    # --- collectives

    def _commence(self, gathering: Gathering) -> None:
        starts = {peer: message for peer, message in gathering.requests.items() if isinstance(message, m.Start)}
        specs = {message.spec for message in starts.values()}
        if len(specs) > 1:
            self._refuse(gathering, "disagreement", f"{gathering.title}: {self._disagreement(starts)}", ())
            return
        spec = specs.pop()
        if spec.root and spec.root not in self.ring:
            self._refuse(gathering, "disagreement", f"{gathering.title}: the root is no member of the group", ())
            return
        data = (starts[peer].data for peer in self.ring)
        brought = tuple(part for part in data if part is not None and len(part) == data_bytes(spec))
        if len(brought) == len(self.ring) and is_small(spec, len(self.ring)):
            gathering.state = advance(MASTER_OPERATION, gathering.state, "all brought their data")
            for peer, message in starts.items():
                self.peers[peer].doing = "nothing in the group"
                self._answer(peer, m.Contributions(call=message.call, data=brought))
            return
        self.seq += 1
        state = advance(MASTER_OPERATION, gathering.state, "all members came")
        self.running[self.seq] = Running(gathering.title, tuple(self.ring), spec.verify, state=state)
        for peer, message in starts.items():
            self._answer(peer, m.Commence(call=message.call, seq=self.seq, epoch=self.epoch))

    def _disagreement(self, starts: dict[str, m.Start]) -> str:
        fields = [name for name in Spec.__struct_fields__ if len({getattr(s.spec, name) for s in starts.values()}) > 1]
        parts = []
        for name in fields:
            values: dict[str, list[str]] = {}
            for peer, start in starts.items():
                values.setdefault(str(getattr(start.spec, name)), []).append(self.peers[peer].info.name)
            parts.append(f"{name}: " + ", ".join(f"{value} from {' and '.join(who)}" for value, who in values.items()))
        return "peers disagree on " + "; ".join(parts)

    def _done(self, peer: str, message: m.Done | m.SyncDone) -> None:
        running = self.running.get(message.seq)
        if running is None or peer not in running.peers:
            return  # it was aborted while the message travelled
        if message.ok:
            running.done[peer] = message
            if isinstance(message, m.Done) and peer in self.ring:
                before = self.ring[self.ring.index(peer) - 1]
                self._links.observed((before, peer), message.bytes_per_s)
            return
        reporter = self.peers[peer].info.name
        blamed = self.peers.get(message.blame) if isinstance(message, m.Done) else None
        text = f"{running.title}: {reporter} reports: {message.reason}"
        self._abort(message.seq, "aborted", text, (blamed.info.name if blamed else reporter,))
        if blamed is not None:
            self._fault(peer, message.blame if isinstance(message, m.Done) else "")

    def _fault(self, reporter: str, blamed: str) -> None:
        if not self._links.blame((reporter, blamed)) or reporter not in self.ring or blamed not in self.ring:
            return
        self._links.give_up((reporter, blamed))
        order = solve(self._links.costs(self.ring))
        if order is None or len(self.ring) < 3:
            return  # there is no way around; the peers go on trying until their budget ends
        self._abort_all("aborted", "the ring was laid anew around a broken link", ())
        self._lay([self.ring[i] for i in order])
        for peer in self.ring:
            self._answer(peer, self.topology())

    def _check_running(self) -> bool:
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
                self.revision = running.revision
                self._out.append(Append(self.record()))
            self._out.append(Append(Decided(self.number, seq)))
            self.decided[seq] = None
            while len(self.decided) > _REMEMBERED:
                del self.decided[next(iter(self.decided))]
            self._links.forgive()
            self._end(seq, running, m.Outcome(seq=seq, ok=True))
        return ended

    def _odd_ones(self, running: Running) -> tuple[str, ...]:
        found = {peer: done.digest for peer, done in running.done.items() if isinstance(done, m.Done)}
        common = Counter(found.values()).most_common(1)[0][0]
        return tuple(self.peers[peer].info.name for peer, digest in found.items() if digest != common)

    def _abort(self, seq: int, code: m.Code, text: str, names: tuple[str, ...]) -> None:
        running = self.running[seq]
        running.state = advance(MASTER_OPERATION, running.state, "a peer failed or is gone")
        self._end(seq, running, m.Outcome(seq=seq, ok=False, code=code, reason=text, peers=names))

    def _abort_all(self, code: m.Code, text: str, names: tuple[str, ...]) -> None:
        for seq, running in list(self.running.items()):
            self._abort(seq, code, f"{running.title}: {text}", names)

    def _end(self, seq: int, running: Running, outcome: m.Outcome) -> None:
        del self.running[seq]
        for peer in running.peers:
            if peer in self.peers:
                self.peers[peer].doing = "nothing in the group"
                self._answer(peer, outcome)

    # --- shared state

    def _elect(self, gathering: Gathering, now: float) -> None:
        offers = {peer: gathering.requests[peer] for peer in self.ring}
        syncs = {peer: offer for peer, offer in offers.items() if isinstance(offer, m.Sync)}
        election = sync_election.elect(syncs, self.revision)
        self.seq += 1
        seq = self.seq
        stay = tuple(peer for peer in self.ring if peer not in election.removed)
        if election.failure or election.revision is None:
            for peer in stay:
                reason = f"sync_shared_state: {election.failure}"
                self._answer(peer, m.CallFailed(call=syncs[peer].call, code="disagreement", reason=reason))
        else:
            self.running[seq] = Running("sync_shared_state", stay, revision=election.revision)
            for peer in stay:
                plan = m.SyncPlan(
                    call=syncs[peer].call, seq=seq, revision=election.revision, fetch=election.fetch[peer]
                )
                self._answer(peer, plan)
        for peer, reason in election.removed.items():
            self._remove(peer, reason, now, aborts=False)

    # --- topology

    def _begin_probing(self, gathering: Gathering, now: float) -> None:
        self._optimizing = {p: r for p, r in gathering.requests.items() if isinstance(r, m.Optimize)}
        self._probe = ProbeRound(schedule(self.ring, self._links.known()))

    def _check_probe(self, now: float) -> bool:
        probe = self._probe
        if probe is None or probe.outstanding:
            return False
        if probe.rounds:
            self.seq += 1
            probe.seq, probe.deadline = self.seq, now + _PROBE_S + _PROBE_SLACK_S
            pairs = [(a, b) for a, b in probe.rounds.pop(0) if a in self.ring and b in self.ring]
            probe.outstanding = set(pairs)
            for a, b in pairs:
                self._answer(a, m.Probe(seq=probe.seq, to=self.peers[b].info, seconds=_PROBE_S))
            return True
        self._probe = None
        if self._optimizing:
            self._out.append(Solve(self.number, tuple(self.ring), self._links.costs(self.ring)))
        return True

    def _measured(self, peer: str, message: m.Measured, now: float) -> None:
        probe = self._probe
        if probe is None or message.seq != probe.seq or (peer, message.to) not in probe.outstanding:
            return
        probe.outstanding.discard((peer, message.to))
        self._links.measured((peer, message.to), message.bytes_per_s, message.latency_s)

    def _finish_optimizing(self, peers: tuple[str, ...], order: tuple[int, ...] | None) -> None:
        gain = 1.0
        if order is not None and peers == tuple(self.ring):
            costs = self._links.costs(self.ring)
            before, after = tour_cost(costs, range(len(peers))), tour_cost(costs, order)
            if after < 0.99 * before:
                self.better = tuple(peers[i] for i in order)
                gain = before / after if math.isfinite(before) else math.inf
        self._count(optimizes=self.counts.optimizes + 1)
        for peer, request in self._optimizing.items():
            answer = m.Optimized(call=request.call, counts=self.counts, gain=min(gain, 1e9))
            self._answer(peer, answer)
        self._optimizing = {}

    # --- loss

    def _remove(self, peer: str, reason: str, now: float, *, aborts: bool = True) -> None:
        connection = self.peers[peer].connection
        if connection is not None:
            self._out.append(Send(connection, m.Removed(reason=reason)))
            self._out.append(Close(connection, reason))
        self._lose(peer, f"was removed: {reason}", now, aborts=aborts)

    def _lose(self, peer: str, reason: str, now: float, *, aborts: bool = True) -> None:
        known = self.peers.pop(peer, None)
        if known is None:
            return
        self._waiting.pop(peer, None)
        self._optimizing.pop(peer, None)
        for key, gathering in list(self._gatherings.items()):
            gathering.requests.pop(peer, None)
            if not gathering.requests:
                del self._gatherings[key]
        if self._probe is not None:
            self._probe.outstanding = {pair for pair in self._probe.outstanding if peer not in pair}
        self._links.forget(peer)
        if peer not in self.ring:
            return
        name = known.info.name
        for seq, running in list(self.running.items()):
            if peer not in running.peers:
                continue
            if running.revision is not None:
                # Donors are replaceable: the others go on, and who cannot says so itself.
                running.peers = tuple(other for other in running.peers if other != peer)
                running.done.pop(peer, None)
                if not running.peers:
                    del self.running[seq]
            elif aborts:
                self._abort(seq, "lost", f"{running.title}: {name} {reason}", (name,))
        self._lay([other for other in self.ring if other != peer])
        for other in self.ring:
            self._answer(other, self.topology())

    # --- sending

    def _answer(self, peer: str, message: m.Message) -> None:
        connection = self.peers[peer].connection
        if connection is not None:
            self._out.append(Send(connection, message))

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out
