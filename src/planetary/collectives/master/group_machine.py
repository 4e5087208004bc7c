"""One peer group at the master: calls wait for every member, newcomers for a vote, and nothing for a lost peer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from planetary.collectives.master.events import Solved
from planetary.collectives.master.group_desk import IDLE, GroupDesk
from planetary.collectives.master.group_links import GroupLinks
from planetary.collectives.master.group_measurement import LinkWatch, RingMeasurement
from planetary.collectives.master.group_operations import GroupOperations, Running, disagreement, elect, elect_again
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.operation_states import MASTER_OPERATION
from planetary.collectives.reduction.small_operations import data_bytes, is_small
from planetary.machine.events import Close, Instruction, Send
from planetary.machine.state_table import advance

Request = m.Vote | m.AskPending | m.Start | m.Sync | m.Optimize


@dataclass
class Gathering:
    """Calls that wait until every member has made the same one."""

    title: str
    opened: float
    deadline: float
    requests: dict[str, Request] = field(default_factory=dict)
    state: str = "gathering"


@dataclass
class DeclinedCall:
    """A call a member cannot make.

    Attributes:
        peer: that member.
        reason: for the other members.
        untold: members that have not made the call yet.
        until: time at which it expires.
    """

    peer: str
    reason: str
    untold: set[str]
    until: float


Key = tuple[str, int]
_VOTE: Key = ("vote", 0)


class GroupMachine:
    """Decides for one group. Every method takes the time and returns instructions.

    A call is answered as soon as all members have made it, or refused at the deadline with the names of the missing
    members and their activity. A loss aborts running operations, and the ring closes without the lost peer.

    Attributes:
        desk: members, ring and instructions, shared by the parts.
        links: measured links between members.
        operations: running operations; each has a state of `MASTER_OPERATION`, as has each call that gathers members.
    """

    def __init__(
        self,
        number: int,
        draw: Callable[[], str],
        everyone: Callable[[], tuple[int, int, int]],
        *,
        remeasure_s: float = 0.0,
    ) -> None:
        """`draw` returns a new secret; `everyone` members of all groups, number of groups, members of the largest.

        `remeasure_s`: seconds between two measurements in the background; 0 for none.
        """
        self.desk = GroupDesk(number, draw, everyone)
        self.links = GroupLinks()
        self.operations = GroupOperations(self.desk, self.links)
        self._measurement = RingMeasurement(self.desk, self.links)
        self._watch = LinkWatch(self.desk, self.links, remeasure_s)
        self._waiting: dict[str, tuple[m.Vote, float]] = {}  # newcomers that want to be admitted
        self._gatherings: dict[Key, Gathering] = {}
        self._declined: dict[Key, list[DeclinedCall]] = {}  # declined calls, in the order in which peers come to them

    # --- events

    def request(self, peer: str, message: m.Message, now: float) -> list[Instruction]:
        """Handle a message of a registered peer."""
        match message:
            case m.Vote(number=number) if peer in self.desk.ring and number <= self.desk.counts.votes:
                self.desk.answer(peer, self.desk.topology())
                self.desk.answer(peer, m.Voted(call=message.call, counts=self.desk.counts))
            case m.AskPending(number=number) if number <= self.desk.counts.asks:
                self.desk.answer(peer, m.Pending(call=message.call, counts=self.desk.counts, pending=self.desk.pending))
            case m.Optimize(number=number) if number <= self.desk.counts.optimizes:
                self.desk.answer(peer, m.Optimized(call=message.call, counts=self.desk.counts, gain=1.0))
            case m.Vote() if peer not in self.desk.ring:
                self._waiting[peer] = (message, now + message.timeout_s)
                self.desk.doing(peer, "waiting to be admitted", now)
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
            case m.Decline():
                self._decline(peer, message, now)
            case m.Done() | m.SyncDone():
                self.operations.done(peer, message, now)
            case m.Measured():
                self._measurement.measured(peer, message)
                self._watch.measured(peer, message, now)
            case m.Leave():
                self._lose(peer, "left", now)
        self._check(now)
        return self.desk.take()

    def lose(self, peer: str, reason: str, now: float) -> list[Instruction]:
        """Handle the loss of a peer."""
        self._lose(peer, reason, now)
        self._check(now)
        return self.desk.take()

    def tick(self, now: float) -> list[Instruction]:
        """Handle passed deadlines."""
        for peer in [name for name, known in self.desk.peers.items() if known.return_by <= now]:
            self._lose(peer, "did not return to the restarted master in time", now)
        for peer, (vote, deadline) in list(self._waiting.items()):
            if deadline <= now:
                del self._waiting[peer]
                self.desk.answer(peer, self._late_admission(vote, now))
        for key, gathering in list(self._gatherings.items()):
            if gathering.deadline <= now:
                self._expire(key, gathering, now)
        self._keep_declined(lambda declined: declined.until > now)
        self.operations.expire(now)
        self._measurement.expire(now)
        self._watch.expire(now)
        self._check(now)
        return self.desk.take()

    def next_deadline(self) -> float:
        """When `tick` has something to do; infinite for never."""
        times = [gathering.deadline for gathering in self._gatherings.values()]
        times += [deadline for _, deadline in self._waiting.values()]
        times += [declined.until for calls in self._declined.values() for declined in calls]
        times += [known.return_by for known in self.desk.peers.values()]
        times += [self.operations.deadline(), self._measurement.deadline(), self._watch.deadline(quiet=self._quiet())]
        return min(times, default=math.inf)

    def invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the group's invariants: whether each holds, and the text of a violation."""
        ring, peers = self.desk.ring, self.desk.peers
        yield len(set(ring)) == len(ring), f"a peer is twice in the ring {ring}"
        yield peers.keys() >= set(ring), f"the ring {ring} has others than the peers {sorted(peers)}"
        waiting = sorted(self._waiting)
        yield peers.keys() - set(ring) >= set(waiting), f"{waiting} wait to be admitted, and are members or gone"
        for peer, known in peers.items():
            held = known.connection is not None or known.return_by < math.inf
            yield held, f"{peer} has no connection, and no time by which it has to return"
        for gathering in self._gatherings.values():
            yield set(gathering.requests) <= set(ring), f"{gathering.title} gathers peers outside the ring {ring}"
            yield gathering.deadline < math.inf, f"{gathering.title} waits without a deadline"
        for declined in (declined for calls in self._declined.values() for declined in calls):
            yield (
                set(ring) >= {declined.peer, *declined.untold},
                f"a call is declined among others than the ring {ring}",
            )
            yield bool(declined.untold), f"{declined.reason!r} is kept though all members were answered"
        for seq, running in self.operations.running.items():
            yield set(running.done) <= set(running.peers), f"operation {seq} was completed by others than its peers"
            expected = "running" if running.fault is None else "faulty"
            yield running.state == expected, f"operation {seq} is under way and {running.state}, not {expected}"

    def solved(self, event: Solved, now: float) -> list[Instruction]:
        """Handle the solver's answer: a ring, or none."""
        match event.purpose:
            case "detour":
                self.operations.detour(event.peers, event.order)
            case "better":
                self._measurement.solved(event.peers, event.order)
            case "watch":
                self._watch.solved(event.peers, event.order)
        self._check(now)
        return self.desk.take()

    def returned(self, peer: str, undecided: tuple[int, ...]) -> list[Instruction]:
        """Handle a member's return after a restart: send the outcomes of undecided operations."""
        self.desk.peers[peer].return_by = math.inf
        self.desk.answer(peer, self.desk.topology())
        for seq in undecided:
            ok = seq in self.operations.decided
            reason = "" if ok else "the master was restarted before all peers had completed the operation"
            self.desk.answer(peer, m.Outcome(seq=seq, ok=ok, code="master", reason=reason))
        return self.desk.take()

    # --- gathering

    def _gather(
        self,
        peer: str,
        key: Key,
        title: str,
        message: Request,
        now: float,
    ) -> None:
        if peer not in self.desk.ring:
            reason = f"{title}: this peer is no member of group {self.desk.number} yet; call update_topology first"
            self.desk.answer(peer, m.CallFailed(call=message.call, code="aborted", reason=reason))
            return
        declined = self._first_declined(key, peer)
        if declined is not None:
            self._tell_declined(declined, {peer: message})
            return
        gathering = self._gatherings.get(key)
        if gathering is None:
            gathering = self._gatherings[key] = Gathering(title, now, math.inf)
        if peer in gathering.requests:
            self._remove(peer, f"it called {title} twice at the same time", now)
            return
        gathering.requests[peer] = message
        gathering.deadline = min(gathering.deadline, now + message.timeout_s)
        self.desk.doing(peer, title, now)

    def _decline(self, peer: str, message: m.Decline, now: float) -> None:
        if peer not in self.desk.ring:
            return
        key = ("start", message.tag)
        earlier = self._first_declined(key, peer)
        if earlier is not None:  # this peer cannot make that call either
            earlier.untold.discard(peer)
            self._keep_declined()
            return
        reason = f"{message.kind} with tag {message.tag}: {self.desk.name(peer)} cannot take part: {message.reason}"
        declined = DeclinedCall(peer, reason, set(self.desk.ring) - {peer}, now + message.timeout_s)
        self._declined.setdefault(key, []).append(declined)
        gathering = self._gatherings.pop(key, None)
        if gathering is not None:
            gathering.state = advance(MASTER_OPERATION, gathering.state, "arguments differ")
            for caller in gathering.requests:
                self.desk.doing(caller, IDLE, now)
        self._tell_declined(declined, {} if gathering is None else gathering.requests)

    def _first_declined(self, key: Key, peer: str) -> DeclinedCall | None:
        """Return the declined call a peer's next message of this key belongs to; None: it has come past them."""
        return next((declined for declined in self._declined.get(key, []) if peer in declined.untold), None)

    def _tell_declined(self, declined: DeclinedCall, calls: Mapping[str, Request]) -> None:
        for peer, message in calls.items():
            failed = m.CallFailed(call=message.call, code="disagreement", reason=declined.reason)
            self.desk.answer(peer, failed)
            declined.untold.discard(peer)
        self._keep_declined()

    def _keep_declined(self, wanted: Callable[[DeclinedCall], bool] = lambda _: True) -> None:
        """Drop declined calls made by all members, and those not `wanted`."""
        kept = {
            key: [declined for declined in calls if declined.untold and wanted(declined)]
            for key, calls in self._declined.items()
        }
        self._declined = {key: calls for key, calls in kept.items() if calls}

    def _check(self, now: float) -> None:
        """Go on with everything that waits for no peer any more; each step may let another one go on."""
        progressed = True
        while progressed:
            progressed = self.operations.check() or self._check_vote(now) or self._measurement.check(now)
            for key, gathering in list(self._gatherings.items()):
                if key != _VOTE and self.desk.ring and all(peer in gathering.requests for peer in self.desk.ring):
                    progressed |= self._complete(key, gathering, now)
        self._watch.check(now, quiet=self._quiet())

    def _quiet(self) -> bool:
        """Whether the group's links are idle."""
        return not self.operations.running and not self._measurement.under_way

    def _complete(self, key: Key, gathering: Gathering, now: float) -> bool:
        """Answer a call that all members have made; false while it must wait for running operations."""
        kind = key[0]
        if kind in ("sync", "optimize") and self.operations.running:
            return False  # peers do not call these while they reduce; a lost one's operations end first
        del self._gatherings[key]
        for peer in gathering.requests:
            self.desk.doing(peer, f"running {gathering.title}", now)
        match kind:
            case "pending":
                self.desk.pending = bool(self._waiting)
                self.desk.count(asks=self.desk.counts.asks + 1)
                for peer, message in gathering.requests.items():
                    answer = m.Pending(call=message.call, counts=self.desk.counts, pending=self.desk.pending)
                    self.desk.answer(peer, answer)
            case "start":
                self._commence(gathering)
            case "sync":
                self._elect(gathering, now)
            case "optimize":
                self._measurement.begin({p: r for p, r in gathering.requests.items() if isinstance(r, m.Optimize)})
        return True

    def _check_vote(self, now: float) -> bool:
        gathering = self._gatherings.get(_VOTE)
        votes = dict(gathering.requests) if gathering is not None else {}
        if self.operations.running or any(peer not in votes for peer in self.desk.ring):
            return False
        if not (self.desk.ring or self._waiting):
            return False
        callers = {**votes, **{peer: vote for peer, (vote, _) in self._waiting.items()}}
        if not callers or len(callers) < max(vote.min_world for vote in callers.values() if isinstance(vote, m.Vote)):
            return False
        self._gatherings.pop(_VOTE, None)
        self._admit(list(self._waiting))
        self._waiting.clear()
        self.desk.count(votes=self.desk.counts.votes + 1)
        for peer, vote in callers.items():
            self.desk.doing(peer, IDLE, now)
            self.desk.answer(peer, self.desk.topology())
            self.desk.answer(peer, m.Voted(call=vote.call, counts=self.desk.counts))
        return True

    def _admit(self, newcomers: list[str]) -> None:
        ring = self._take_better()
        for peer in newcomers:
            # Beside a peer on the same machine, so the ring crosses the network as rarely as possible.
            machine = self.desk.peers[peer].info.machine
            near = [i for i, other in enumerate(ring) if self.desk.peers[other].info.machine == machine]
            ring.insert(near[-1] + 1 if near else len(ring), peer)
        if ring != self.desk.ring:
            self.desk.lay(ring)

    def _take_better(self) -> list[str]:
        """Return the ring to lay, once: a better one if it has the present members. A requested one comes first."""
        ring = self.desk.ring
        better = [
            found for found in (self._measurement.better, self._watch.better) if found and set(found) == set(ring)
        ]
        self._measurement.better = self._watch.better = None
        return list(better[0]) if better else list(ring)

    def _expire(self, key: Key, gathering: Gathering, now: float) -> None:
        del self._gatherings[key]
        missing = [peer for peer in self.desk.ring if peer not in gathering.requests]
        waited = now - gathering.opened
        if key == _VOTE and not missing:
            count = len(self.desk.ring) + len(self._waiting)
            text = f"update_topology: {count} peers came within {waited:.1f} s, too few"
            self._refuse(gathering, "too_few", text, ())
            return
        names = tuple(self.desk.name(peer) for peer in missing)
        doing = "; ".join(
            f"{self.desk.whereabouts(peer)} (for {now - self.desk.peers[peer].since:.1f} s)" for peer in missing
        )
        count = f"{len(missing)} of {len(self.desk.ring)}"
        text = f"{gathering.title}: waited {waited:.1f} s, {count} peers did not come: {doing}"
        self._refuse(gathering, "straggler", text, names)

    def _late_admission(self, vote: m.Vote, now: float) -> m.CallFailed:
        size = len(self.desk.ring) + len(self._waiting) + 1
        votes = self._gatherings.get(_VOTE)
        missing = [peer for peer in self.desk.ring if votes is None or peer not in votes.requests]
        names = tuple(self.desk.name(peer) for peer in missing)
        if not missing:
            reason = f"update_topology: {size} peers came within {vote.timeout_s:.1f} s, expected {vote.min_world}"
            return m.CallFailed(call=vote.call, code="too_few", reason=reason)
        doing = "; ".join(self.desk.whereabouts(peer) for peer in missing)
        reason = (
            f"not admitted within {vote.timeout_s:.1f} s: the members of group {self.desk.number} have not all called "
            f"update_topology: {doing}"
        )
        return m.CallFailed(call=vote.call, code="straggler", reason=reason, peers=names)

    def _refuse(self, gathering: Gathering, code: m.Code, text: str, names: tuple[str, ...]) -> None:
        gathering.state = advance(
            MASTER_OPERATION, gathering.state, "arguments differ" if code == "disagreement" else "deadline"
        )
        for peer, message in gathering.requests.items():
            self.desk.answer(peer, m.CallFailed(call=message.call, code=code, reason=text, peers=names))

    # --- collectives

    def _commence(self, gathering: Gathering) -> None:
        starts = {peer: message for peer, message in gathering.requests.items() if isinstance(message, m.Start)}
        differences = disagreement([(self.desk.name(peer), start.spec) for peer, start in starts.items()])
        if differences:
            self._refuse(gathering, "disagreement", f"{gathering.title}: {differences}", ())
            return
        spec = next(iter(starts.values())).spec
        if spec.root and spec.root not in self.desk.ring:
            self._refuse(gathering, "disagreement", f"{gathering.title}: the root is no member of the group", ())
            return
        data = (starts[peer].data for peer in self.desk.ring)
        brought = tuple(part for part in data if part is not None and len(part) == data_bytes(spec))
        if len(brought) == len(self.desk.ring) and is_small(spec, len(self.desk.ring)):
            gathering.state = advance(MASTER_OPERATION, gathering.state, "all brought their data")
            for peer, message in starts.items():
                self.desk.peers[peer].doing = IDLE
                self.desk.answer(peer, m.Contributions(call=message.call, data=brought))
            return
        state = advance(MASTER_OPERATION, gathering.state, "all members came")
        seq = self.operations.begin(Running(gathering.title, tuple(self.desk.ring), spec.verify, state=state))
        for peer, message in starts.items():
            self.desk.answer(peer, m.Commence(call=message.call, seq=seq, epoch=self.desk.epoch))

    # --- shared state

    def _elect(self, gathering: Gathering, now: float) -> None:
        offers = {peer: gathering.requests[peer] for peer in self.desk.ring}
        syncs = {peer: offer for peer, offer in offers.items() if isinstance(offer, m.Sync)}
        desk, algorithm = self.desk, self.desk.topology().digest
        if desk.emptied and desk.revision is not None:
            election = elect_again(syncs, desk.revision, desk.content, algorithm)
        else:
            election = elect(syncs, desk.revision, algorithm)
        stay = tuple(peer for peer in self.desk.ring if peer not in election.removed)
        if election.failure or election.revision is None:
            for peer in stay:
                reason = f"sync_shared_state: {election.failure}"
                self.desk.answer(peer, m.CallFailed(call=syncs[peer].call, code="disagreement", reason=reason))
        else:
            agreed = Running("sync_shared_state", stay, revision=election.revision, content=election.content)
            seq = self.operations.begin(agreed)
            for peer in stay:
                plan = m.SyncPlan(
                    call=syncs[peer].call, seq=seq, revision=election.revision, fetch=election.fetch[peer]
                )
                self.desk.answer(peer, plan)
        for peer, reason in election.removed.items():
            self._remove(peer, reason, now, aborts=False)

    # --- loss

    def _remove(self, peer: str, reason: str, now: float, *, aborts: bool = True) -> None:
        connection = self.desk.peers[peer].connection
        if connection is not None:
            self.desk.out.append(Send(connection, m.Removed(reason=reason)))
            self.desk.out.append(Close(connection, reason))
        self._lose(peer, f"was removed: {reason}", now, aborts=aborts)

    def _lose(self, peer: str, reason: str, now: float, *, aborts: bool = True) -> None:
        known = self.desk.peers.pop(peer, None)
        if known is None:
            return
        self._waiting.pop(peer, None)
        for key, gathering in list(self._gatherings.items()):
            gathering.requests.pop(peer, None)
            if not gathering.requests:
                del self._gatherings[key]
        for declined in (declined for calls in self._declined.values() for declined in calls):
            declined.untold.discard(peer)
        self._keep_declined(lambda declined: declined.peer != peer)
        self._measurement.lose(peer)
        self._watch.lose(peer, now)
        self.links.forget(peer)
        if peer not in self.desk.ring:
            return
        self.operations.lose(peer, known.info.name, reason, aborts=aborts)
        self.desk.lay([other for other in self.desk.ring if other != peer])
        self.desk.tell_ring()
