"""What the mixture controller's parts share: the state, the live connections, the instructions of the current event."""

from __future__ import annotations

from collections import Counter

from planetary.fabric import events as e
from planetary.fabric.records import Record
from planetary.fabric.sessions import SupervisorSession, WorkerSession
from planetary.moe.mixture_events import MixturePolicy
from planetary.moe.records import MixtureState, apply
from planetary.wire import messages as m


class MixtureDesk:
    """State, connections and instructions; see `fabric.desk.Lobby`."""

    def __init__(self, policy: MixturePolicy, state: MixtureState) -> None:
        self.policy = policy
        self.state = state
        self.workers: dict[int, WorkerSession] = {}
        self.supervisors: dict[int, SupervisorSession] = {}
        self.out: list[e.Instruction] = []
        self._under_way: Counter[int] = Counter()  # by session: payloads that were not sent completely

    def append(self, record: Record) -> None:
        """Apply a record to the state and put it in the journal."""
        apply(self.state, record)
        self.out.append(e.Append(record))

    def send(self, session: int, message: m.Message, payload: e.Payload | None = None) -> None:
        """Send a message on a connection."""
        self._under_way[session] += payload is not None
        self.out.append(e.Send(session, message, payload))

    def payload_sent(self, session: int) -> None:
        """A payload has left the gateway."""
        self._under_way[session] -= 1

    def under_way(self, session: int) -> int:
        """Return how many payloads for a connection have not left the gateway completely."""
        return self._under_way[session]

    def forget(self, session: int) -> None:
        """A connection has ended."""
        del self._under_way[session]
