"""What the mixture controller's parts share: the state, the live connections, the instructions of the current event."""

from __future__ import annotations

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

    def append(self, record: Record) -> None:
        """Apply a record to the state and put it in the journal."""
        apply(self.state, record)
        self.out.append(e.Append(record))

    def send(self, session: int, message: m.Message, payload: e.Payload | None = None) -> None:
        """Send a message on a connection."""
        self.out.append(e.Send(session, message, payload))
