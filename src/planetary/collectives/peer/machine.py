"""A peer's side of the protocol with the master. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planetary.collectives.peer import events as e
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.errors import PeerLostError, RemovedError, StragglerError, error_of
from planetary.collectives.protocol.operation_states import PEER_MEMBERSHIP, PEER_OPERATION
from planetary.core.errors import LocalProtocolError, PlanetaryError, RemoteProtocolError
from planetary.machine.machine import check_invariants
from planetary.machine.redial import Redial
from planetary.machine.state_table import advance
from planetary.net.session import refusal_error

_REDIAL_FIRST_S, _REDIAL_LIMIT_S = 0.1, 1.0
_ANSWER_SLACK_S = 5.0  # the master's deadline comes first; this one is for a master that forgot

FIRST_SESSION = 1
"""The shell dials it before there is a machine."""


@dataclass
class PendingCall:
    """A call of the user that has not returned."""

    title: str
    state: str  # state of `PEER_OPERATION`, for calls that become operations
    deadline: float
    seq: int = 0
    operation: bool = False  # an operation goes on after it was commenced
    gave_data: bool = False  # success without this peer's knowledge is possible


class PeerMachine:
    """Implements `machine.machine.Machine` for one peer.

    Every call ends: with the master's answer, or with an error when the master is gone for longer than the grace
    time or forgets a call. The shell detects stalled transfers and reports them with `LocalFault`.

    Attributes:
        grace_s: seconds within which a restarting master must return.
        state: see `PEER_MEMBERSHIP`. Each call that becomes an operation has a state of `PEER_OPERATION`, and the
            connection one of `machine.redial.LINK`.
        peer: the id the master gave; "" before.
        topology: the ring, while this peer is a member of it.
        counts: answered calls of the group, by the master's count.
        error: the reason why every call fails; None while calls may succeed.
    """

    def __init__(self, hello: Callable[[], m.Register], *, grace_s: float) -> None:
        """`hello` returns the registration of a new peer. `grace_s`: how long a restarting master is waited for."""
        self._hello = hello
        self.grace_s = grace_s
        self.state = "outside"
        self.peer = ""
        self._secret = ""
        self.topology: m.RingChanged | None = None
        self.counts = m.Counts()
        self._calls: dict[int, PendingCall] = {}
        self._link = Redial("peer", first_s=_REDIAL_FIRST_S, limit_s=_REDIAL_LIMIT_S)
        self._link.dial(0.0)  # `FIRST_SESSION`
        self._away_since = 0.0
        self.error: PlanetaryError | None = None
        self._out: list[e.Instruction] = []

    # --- machine.machine.Machine

    def handle(self, event: e.Event, now: float) -> list[e.Instruction]:
        match event:
            case e.Received():
                if event.session == self._link.session:
                    self._received(event.message)
            case e.PiecesComplete():
                self._pieces_complete(event)
            case e.LocalFault(call, reason, blame):
                self._fault(call, reason, blame)
            case e.CallCollective(call, timeout_s, tag, spec, data):
                title = f"{spec.kind} with tag {tag}"
                # A restarted master would not know the outcome, so a peer that may return sends no data.
                data = data if self.grace_s == 0 else None
                start = m.Start(call=call, timeout_s=timeout_s, tag=tag, spec=spec, data=data)
                self._call(call, title, timeout_s, start, now)
            case e.CallVote(call, timeout_s, min_world):
                vote = m.Vote(call=call, number=self.counts.votes + 1, timeout_s=timeout_s, min_world=min_world)
                self._call(call, "update_topology", timeout_s, vote, now)
            case e.CallPending(call, timeout_s):
                ask = m.AskPending(call=call, number=self.counts.asks + 1, timeout_s=timeout_s)
                self._call(call, "are_peers_pending", timeout_s, ask, now)
            case e.CallOptimize(call, timeout_s):
                optimize = m.Optimize(call=call, number=self.counts.optimizes + 1, timeout_s=timeout_s)
                self._call(call, "optimize_topology", timeout_s, optimize, now)
            case e.CallSync(call, timeout_s):
                sync = m.Sync(
                    call=call,
                    timeout_s=timeout_s,
                    revision=event.revision,
                    strategy=event.strategy,
                    entries=event.entries,
                    restart=event.restart,
                )
                self._call(call, "sync_shared_state", timeout_s, sync, now)
            case e.Declined(kind, tag, reason, timeout_s):
                self._send(m.Decline(kind=kind, tag=tag, reason=reason, timeout_s=timeout_s))
            case e.LinkMeasured(seq, to, bytes_per_s, latency_s):
                self._send(m.Measured(seq=seq, to=to, bytes_per_s=bytes_per_s, latency_s=latency_s))
            case e.Opened():
                if self._link.opened(event.session):
                    self._say_hello()
            case e.Closed():
                if self._link.closed(event.session, now):
                    self._disconnected(event.reason, now)
            case e.CallLeave():
                self._send(m.Leave())
            case e.Tick():
                self._tick(now)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        times = [call.deadline for call in self._calls.values()]
        dial_at = self._link.next_deadline()
        if dial_at is not None and self.error is None:
            times.append(dial_at)
        if self.state == "away":
            times.append(self._away_since + self.grace_s)
        first = min(times, default=math.inf)
        return None if math.isinf(first) else first

    def validate(self) -> None:
        self._link.validate()
        check_invariants(f"peer {self.peer}", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        states = [call.state for call in self._calls.values()]
        if self.error is not None:
            yield self.state == "outside" and not states, f"it is out for good, and {self.state} with calls {states}"
            return
        linked = self._link.connected
        yield self.state not in {"waiting", "member"} or linked, f"it is {self.state} without a connection"
        yield self.topology is None or self.state in {"member", "away"}, f"it is {self.state} and knows a ring"
        yield "in doubt" not in states or self.state in {"away", "member"}, f"calls are {states} while {self.state}"
        for call in self._calls.values():
            begun = call.state in {"running", "completed", "faulty", "in doubt"}
            yield begun == (call.seq > 0), f"{call.title} is {call.state} with number {call.seq}"
            yield begun or call.deadline < math.inf, f"{call.title} has no deadline"

    @property
    def rank(self) -> int:
        """Rank of this peer in the ring; -1 outside."""
        ring = self.topology.ring if self.topology is not None else ()
        return next((i for i, info in enumerate(ring) if info.peer == self.peer), -1)

    # --- calls

    def _call(self, call: int, title: str, timeout_s: float, message: m.Message, now: float) -> None:
        operation = isinstance(message, m.Start | m.Sync)
        gave_data = isinstance(message, m.Start) and message.data is not None
        deadline = now + timeout_s + _ANSWER_SLACK_S
        self._calls[call] = PendingCall(title, "wanted", deadline, operation=operation, gave_data=gave_data)
        if self.error is not None:
            self._end(call, self.error)
        elif self.state == "away" or not self._link.connected:
            self._end(call, self._master_lost("the master is not connected"))
        else:
            self._send(message)

    def _master_lost(self, reason: str) -> PeerLostError:
        return PeerLostError(f"the connection to the master ended: {reason}", ("master",))

    def _end(self, call: int, error: PlanetaryError | None = None, value: object = None) -> None:
        if self._calls.pop(call, None) is not None:
            self._out.append(e.FinishCall(call, error, value))

    def _pieces_complete(self, event: e.PiecesComplete) -> None:
        call = self._calls.get(event.call)
        if call is None:
            return
        call.state = advance(PEER_OPERATION, call.state, "all pieces came")
        if call.state == "completed":
            sync = call.title == "sync_shared_state"
            done = (
                m.SyncDone(seq=call.seq, ok=True)
                if sync
                else m.Done(seq=call.seq, ok=True, digest=event.digest, bytes_per_s=event.bytes_per_s)
            )
            self._send(done)

    def _fault(self, number: int, reason: str, blame: str) -> None:
        call = self._calls.get(number)
        if call is None or call.state == "wanted":
            return
        before = call.state
        call.state = advance(PEER_OPERATION, before, "link fault")
        if before == "running":
            sync = call.title == "sync_shared_state"
            done = (
                m.SyncDone(seq=call.seq, ok=False, reason=reason)
                if sync
                else m.Done(seq=call.seq, ok=False, reason=reason, blame=blame)
            )
            self._send(done)

    # --- the master's messages

    def _received(self, message: m.Message) -> None:
        if self.error is not None:
            return  # it is out already; this was under way
        try:
            self._from_master(message)
        except LocalProtocolError as error:  # a step that is not in the tables, which the master asked for
            self._hang_up(RemoteProtocolError(f"the master sent {type(message).__name__}: {error}"))

    def _from_master(self, message: m.Message) -> None:
        match message:
            case m.Registered():
                self.peer, self._secret = message.peer, message.secret
                self.state = advance(PEER_MEMBERSHIP, self.state, "returned" if message.member else "registered")
                if not message.member:
                    self._out.append(e.FinishCall(0))
            case m.Refused(retry=True) if self.state == "away":
                pass  # the session ends, and the next is dialled within the grace time
            case m.Refused():
                error = refusal_error(message, "master")
                self._hang_up(RemovedError(str(error)) if message.code == "unknown" else error)
            case m.Removed():
                self._hang_up(RemovedError(f"the master removed this peer: {message.reason}"))
            case m.RingChanged():
                self.topology = message
                self.state = advance(PEER_MEMBERSHIP, self.state, "admitted" if self.state == "waiting" else "topology")
                self._out.append(e.UseTopology(message, self.rank))
            case m.Voted(call=call, counts=counts):
                self.counts = counts
                self._end(call)
            case m.Pending(call=call, counts=counts, pending=pending):
                self.counts = counts
                self._end(call, value=pending)
            case m.Optimized(call=call, counts=counts, gain=gain):
                self.counts = counts
                self._end(call, value=gain)
            case m.CallFailed(call=call):
                self._end(call, error_of(message.code, message.reason, message.peers))
            case m.Commence(seq=seq, epoch=epoch) if self.topology is None or epoch != self.topology.epoch:
                self._send(m.Done(seq=seq, ok=False, reason=f"it does not know ring {epoch}"))
            case m.Commence(call=call, seq=seq, epoch=epoch) if call in self._calls:
                self._commence(call, seq)
                self._out.append(e.BeginTransfer(call, seq, epoch))
            case m.SyncPlan(call=call, seq=seq) if call in self._calls:
                self._commence(call, seq)
                self._out.append(e.BeginFetch(call, seq, message.revision, message.fetch))
            case m.Commence(seq=seq):
                self._send(m.Done(seq=seq, ok=False, reason="it gave the call up before it began"))
            case m.SyncPlan(seq=seq):
                self._send(m.SyncDone(seq=seq, ok=False, reason="it gave the call up before it began"))
            case m.Contributions(call=call) if call in self._calls:
                self._calls[call].state = advance(PEER_OPERATION, self._calls[call].state, "committed")
                self._end(call, value=message)
            case m.Outcome():
                self._outcome(message)
            case m.Probe():
                self._out.append(e.RunProbe(message, message.to))
            case _:
                pass  # the answer to a call that is over

    def _commence(self, number: int, seq: int) -> None:
        call = self._calls[number]
        call.state = advance(PEER_OPERATION, call.state, "commence")
        call.seq, call.deadline = seq, math.inf  # from here on the transfer's own stall deadlines count

    def _outcome(self, outcome: m.Outcome) -> None:
        for number, call in list(self._calls.items()):
            if call.operation and call.seq == outcome.seq and call.state != "wanted":
                call.state = advance(PEER_OPERATION, call.state, "committed" if outcome.ok else "aborted")
                self._end(number, None if outcome.ok else error_of(outcome.code, outcome.reason, outcome.peers))

    # --- the connection

    def _say_hello(self) -> None:
        hello = self._hello()
        if self.state == "away":
            undecided = tuple(call.seq for call in self._calls.values() if call.state == "in doubt")
            fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
            hello = m.Register(**{**fields, "peer": self.peer, "secret": self._secret, "undecided": undecided})
        self._send(hello)

    def _disconnected(self, reason: str, now: float) -> None:
        if self.error is not None:
            return
        if self.state == "member":
            self._away_since = now
        self.state = advance(PEER_MEMBERSHIP, self.state, "master lost") if self.state != "outside" else "outside"
        lost = self._master_lost(reason)
        for number, call in list(self._calls.items()):
            if call.operation:
                call.state = advance(PEER_OPERATION, call.state, "master lost")
            if not call.operation or call.state == "failed":
                self._end(number, lost)
        if self.state != "away" or now >= self._away_since + self.grace_s:
            self._give_up(lost)

    def _give_up(self, error: PlanetaryError) -> None:
        for call in self._calls.values():
            if call.state == "in doubt":
                call.state = advance(PEER_OPERATION, call.state, "gave up")
        self._hang_up(error)

    def _hang_up(self, error: PlanetaryError) -> None:
        self.error = error
        self.state = "outside"
        self.topology = None
        for number in list(self._calls):
            self._end(number, error)
        self._out.append(e.FinishCall(0, error))
        self._out.append(e.Hangup(error))

    def _tick(self, now: float) -> None:
        if self.state == "away" and now >= self._away_since + self.grace_s:
            self._give_up(self._master_lost(f"it did not come back within {self.grace_s:g} s"))
        session = self._link.dial(now) if self.error is None else None
        if session is not None:
            self._out.append(e.Dial(session))
        for number, call in list(self._calls.items()):
            if now >= call.deadline:
                text = f"{call.title}: the master did not answer in time, though it is connected"
                if call.gave_data and call.state == "wanted":
                    self._hang_up(PeerLostError(text, ("master",)))  # others may have the result: no longer one of them
                    return
                self._end(number, StragglerError(text, ("master",)))

    def _send(self, message: m.Message) -> None:
        if self._link.connected:
            self._out.append(e.Send(self._link.session, message))
