"""The desk of a mixture: of successive payloads on one subject, a slow connection gets the newest."""

from __future__ import annotations

from collections.abc import Callable

from planetary.fleet.controller.desk import Desk
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.events import MixturePolicy, StoredPayload, WeightsOf, WorkOf
from planetary.runs.mixture.records import MixtureState

Subject = tuple[str, int | str, int]
"""The subject of successive messages to a composer, each of which supersedes the one before."""

Make = Callable[[], tuple[m.Message, e.Payload]]
"""Makes the message about a subject when it is sent."""


def subject_of(message: m.Message) -> Subject | None:
    """Return the subject of a message, if a later one supersedes it."""
    match message:
        case mm.FragmentMerged():
            return "fragment", message.tier, message.fragment
        case mm.SurrogatesReady():
            return "surrogates", message.shard, 0
        case mm.ExpertsUpdate():
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
            return frozenset((payload.experts, *payload.work.payloads))
        case _:
            return frozenset()


class MixtureDesk(Desk[MixturePolicy, MixtureState, WorkerSession]):
    """A desk that keeps no queue of superseded payloads."""

    def __init__(self, policy: MixturePolicy, state: MixtureState) -> None:
        """`state` is changed only through `append`."""
        super().__init__(policy, state)
        self._newest: dict[tuple[int, Subject], Make | None] = {}  # message to send after the payload in flight

    def send_newest(self, session: int, subject: Subject, make: Make) -> None:
        """Send the state of a subject: at once or, while an earlier state of it has not left, when that has.

        So a slow connection gets the newest state each time, and no queue of superseded ones.
        """
        if (session, subject) in self._newest:
            self._newest[session, subject] = make
        else:
            self._newest[session, subject] = None
            self.send(session, *make())

    def payload_sent(self, session: int, message: m.Message) -> bool:
        """Then send the state that superseded the payload meanwhile."""
        in_turn = super().payload_sent(session, message)
        subject = subject_of(message)
        make = self._newest.pop((session, subject), None) if subject is not None else None
        if subject is not None and make is not None:
            self.send_newest(session, subject, make)
        return in_turn

    def payloads_under_way(self) -> set[str]:
        """Return the names of payloads that are sent, or will be when their turn comes."""
        return {name for payload in self.under_way.payloads() for name in _names(payload)}

    def forget(self, session: int) -> None:
        super().forget(session)
        self._newest = {key: make for key, make in self._newest.items() if key[0] != session}
