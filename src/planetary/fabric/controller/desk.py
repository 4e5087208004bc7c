"""The state, the live connections and the instructions of the current event, which a controller's parts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from planetary.core.errors import LocalProtocolError
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.policy import ControllerPolicy, FabricPolicy
from planetary.fabric.protocol.records import Record, RunFinished
from planetary.fabric.protocol.sessions import SupervisorSession, WorkerSession
from planetary.fabric.protocol.state import ControllerState, OpenRound, apply
from planetary.fabric.shell.under_way import UnderWay
from planetary.machine.events import Append, Instruction, Payload, Send


class RunState(Protocol):
    """What the state of every kind of run has. A journal's records fold to it."""

    round: int  # the last finished one
    losses: dict[str, int]  # worker -> how many times it was lost
    ended: RunFinished | None


Policy_co = TypeVar("Policy_co", bound=FabricPolicy, covariant=True)
State_co = TypeVar("State_co", bound=RunState, covariant=True)


class Desk(Generic[Policy_co, State_co]):
    """One per controller. Holds no decisions.

    Attributes:
        workers, supervisors: the live connections, by session.
        out: the instructions of the current event, in order.
        under_way: payloads that have not left this machine yet.
    """

    def __init__(self, policy: Policy_co, state: State_co, fold: Callable[[Any, Record], None]) -> None:
        """`fold(state, record)` is the only code that changes the state."""
        self._policy, self._state, self._fold = policy, state, fold
        self.workers: dict[int, WorkerSession] = {}
        self.supervisors: dict[int, SupervisorSession] = {}
        self.out: list[Instruction] = []
        self.under_way = UnderWay()

    @property
    def policy(self) -> Policy_co:
        """The constants of the run."""
        return self._policy

    @property
    def state(self) -> State_co:
        """The fold of the journal; changed through `append` alone."""
        return self._state

    def append(self, record: Record) -> None:
        """Apply a record to the state and put it in the journal."""
        self._fold(self._state, record)
        self.out.append(Append(record))

    def send(self, session: int, message: m.Message, payload: Payload | None = None) -> None:
        """Send a message on a connection."""
        self.under_way.add(session, message, payload)
        self.out.append(Send(session, message, payload))

    def payload_sent(self, session: int, message: m.Message) -> bool:
        """Take note that a payload has left the gateway; return whether it was one that is sent in turn."""
        return self.under_way.sent(session, message)

    def forget(self, session: int) -> None:
        """Drop what is known of a connection that ended. A worker is removed by `Membership`."""
        self.supervisors.pop(session, None)
        self.under_way.forget(session)

    def ready_workers(self) -> list[WorkerSession]:
        """In order of their names, so that the same events give the same assignment."""
        return sorted((w for w in self.workers.values() if w.ready), key=lambda w: w.worker)


AnyDesk = Desk[FabricPolicy, RunState]
"""A desk of whatever kind of run."""


class RoundsDesk(Desk[ControllerPolicy, ControllerState]):
    """The desk of a run in rounds."""

    def __init__(self, policy: ControllerPolicy, state: ControllerState) -> None:
        """`state` is changed only through `append`."""
        super().__init__(policy, state, apply)

    def open_round(self) -> OpenRound:
        """Return the round under way; it is a bug to ask when there is none."""
        if self.state.open is None:
            raise LocalProtocolError(f"no round is open after round {self.state.round}")
        return self.state.open
