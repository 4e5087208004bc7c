"""What the mixture controller's parts share: the state, the live connections, the instructions of the current event."""

from __future__ import annotations

from collections.abc import Callable

from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.records import Record
from planetary.fabric.protocol.sessions import SupervisorSession, WorkerSession
from planetary.fabric.shell.under_way import UnderWay
from planetary.moe.controller.mixture_events import MixturePolicy, StoredPayload, WeightsOf, WorkOf
from planetary.moe.controller.records import MixtureState, apply
from planetary.wire import messages as m

Subject = tuple[str, int | str, int]
"""What successive messages to a composer are about, each of which makes the one before it old."""

Make = Callable[[], tuple[m.Message, e.Payload]]
"""Makes the message about a subject when it is sent."""


def subject_of(message: m.Message) -> Subject | None:
    """Return what a message is about, if a later one makes it old."""
    match message:
        case m.FragmentMerged():
            return "fragment", message.tier, message.fragment
        case m.SurrogatesReady():
            return "surrogates", message.shard, 0
        case m.UseExperts():
            return "experts", message.shard, message.layer
        case _:
            return None


def _names(payload: e.Payload) -> frozenset[str]:
    match payload:
        case StoredPayload():
            return frozenset((payload.name,))
        case WeightsOf():
            return frozenset((payload.experts,))
        case WorkOf():
            return frozenset((payload.experts, *payload.lease.work.payloads))
        case _:
            return frozenset()


class MixtureDesk:
    """State, connections and instructions; see `fabric.controller.desk.Lobby`."""

    def __init__(self, policy: MixturePolicy, state: MixtureState) -> None:
        self.policy = policy
        self.state = state
        self.workers: dict[int, WorkerSession] = {}
        self.supervisors: dict[int, SupervisorSession] = {}
        self.out: list[e.Instruction] = []
        self.under_way = UnderWay()
        self._newest: dict[tuple[int, Subject], Make | None] = {}  # on their way; what to send after them

    def append(self, record: Record) -> None:
        """Apply a record to the state and put it in the journal."""
        apply(self.state, record)
        self.out.append(e.Append(record))

    def send(self, session: int, message: m.Message, payload: e.Payload | None = None) -> None:
        """Send a message on a connection."""
        self.under_way.add(session, message, payload)
        self.out.append(e.Send(session, message, payload))

    def send_newest(self, session: int, subject: Subject, make: Make) -> None:
        """Send what there is of a subject: at once or, while an earlier state of it has not left, when that has.

        So a connection that is slower than what happens gets the newest each time, and no queue of what is superseded.
        """
        if (session, subject) in self._newest:
            self._newest[session, subject] = make
        else:
            self._newest[session, subject] = None
            self.send(session, *make())

    def payload_sent(self, session: int, message: m.Message) -> bool:
        """A payload has left the gateway; return whether it was one that is sent in turn."""
        in_turn = self.under_way.sent(session, message)
        subject = subject_of(message)
        make = self._newest.pop((session, subject), None) if subject is not None else None
        if subject is not None and make is not None:
            self.send_newest(session, subject, make)
        return in_turn

    def payloads_under_way(self) -> set[str]:
        """Return the names of payloads that are sent, or will be when their turn comes."""
        return {name for payload in self.under_way.payloads() for name in _names(payload)}

    def forget(self, session: int) -> None:
        """A connection has ended."""
        self.under_way.forget(session)
        self._newest = {key: make for key, make in self._newest.items() if key[0] != session}
