"""What a controller's parts share: the state, the live connections, and the instructions of the current event."""

from __future__ import annotations

from typing import Protocol

from planetary.core.errors import LocalProtocolError
from planetary.fabric.protocol.events import Append, Instruction, ParametersOf, Payload, Send
from planetary.fabric.protocol.policy import ControllerPolicy, FabricPolicy
from planetary.fabric.protocol.records import AnyRecord
from planetary.fabric.protocol.sessions import SupervisorSession, WorkerSession
from planetary.fabric.protocol.state import ControllerState, OpenRound, apply
from planetary.fabric.shell.under_way import UnderWay
from planetary.wire import messages as m


class Lobby(Protocol):
    """What `Membership` needs to know of a desk, whatever is trained."""

    workers: dict[int, WorkerSession]
    supervisors: dict[int, SupervisorSession]
    out: list[Instruction]

    @property
    def policy(self) -> FabricPolicy:
        """The constants."""
        ...

    def append(self, record: AnyRecord) -> None:
        """Apply a record to the state and put it in the journal."""
        ...

    def send(self, session: int, message: m.Message, payload: Payload | None = None) -> None:
        """Send a message on a connection."""
        ...


class Desk:
    """One per controller of rounds. Holds no decisions."""

    def __init__(self, policy: ControllerPolicy, state: ControllerState) -> None:
        """`state` is changed only through `append`."""
        self.policy = policy
        self.state = state
        self.workers: dict[int, WorkerSession] = {}  # by session
        self.supervisors: dict[int, SupervisorSession] = {}  # by session
        self.out: list[Instruction] = []
        self.under_way = UnderWay()

    def append(self, record: AnyRecord) -> None:
        """Apply a record to the state and put it in the journal."""
        apply(self.state, record)
        self.out.append(Append(record))

    def send(self, session: int, message: m.Message, payload: Payload | None = None) -> None:
        """Send a message on a connection."""
        self.under_way.add(session, message, payload)
        self.out.append(Send(session, message, payload))

    def send_parameters(self, worker: WorkerSession, version: int) -> None:
        """Make `version` the parameters of the worker's next task, unless they already are.

        In the ring a worker that is given a task has them (`able_workers`).
        """
        if worker.version != version and self.policy.ring is None:
            worker.version = version
            self.send(worker.session, m.Parameters(version=version), ParametersOf(version))

    def ready_workers(self) -> list[WorkerSession]:
        """In order of their names, so that the same events give the same assignment."""
        return sorted((w for w in self.workers.values() if w.ready), key=lambda w: w.worker)

    def able_workers(self) -> list[WorkerSession]:
        """The ready workers that can be given a lease now: in the ring, those that have the newest parameters."""
        ready = self.ready_workers()
        return ready if self.policy.ring is None else [w for w in ready if w.version == self.state.version]

    def open_round(self) -> OpenRound:
        """Return the round under way; it is a bug to ask when there is none."""
        if self.state.open is None:
            raise LocalProtocolError(f"no round is open after round {self.state.round}")
        return self.state.open
