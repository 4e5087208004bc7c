"""The controller's state of a connection while it lasts. None of it is worth a journal."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from planetary.fleet.protocol.status import Leave
from planetary.machine.board import InFlight
from planetary.machine.events import Received
from planetary.machine.state_table import Table, advance
from planetary.sync.fragments import FragmentSteps

MOST_UNANSWERED = 3
"""Leases in a row that may come back without a sign of the worker. Each may leave a version in the worker's queue."""


class Phase(StrEnum):
    """How far a worker's session has come."""

    COMPILING = "compiling"  # the target's artifact is being built
    LOADING = "loading"  # it fetches and loads the artifact
    READY = "ready"  # it takes tasks


WORKER_SESSION: Table = {
    (Phase.COMPILING, "artifact offered"): Phase.LOADING,
    (Phase.LOADING, "ready"): Phase.READY,
    (Phase.COMPILING, "job replaced"): Phase.COMPILING,
    (Phase.LOADING, "job replaced"): Phase.COMPILING,
    (Phase.READY, "job replaced"): Phase.COMPILING,
}
"""At the gateway. A session ends with the connection, in any phase."""


class TrainInFlight(InFlight):
    """A train task."""

    task: int
    round: int
    leases: tuple[int, ...]  # leases in the order of training
    steps: int  # inner steps of all of them
    assigned_at: float
    progress_at: float
    version: int  # version of the first parameters
    mixes: int = -1  # the version it waits for on the way; -1: none
    after: int = 0  # the own task it goes on from; 0: from the version
    missed: tuple[int, ...] = ()  # versions mixed in at the start
    early: bool = False  # it is of the round after `round`, which is open
    ended: Received | None = None  # the result of an early one that is trained
    due_from: float = 0.0  # opening of the round of an early lease
    ends_early: bool = False  # the worker was asked for the steps trained so far
    step: int = 0
    started: bool = False
    loss: float | None = None

    @property
    def known_round(self) -> int:
        """The round named to the worker and in the result."""
        return self.round + self.early

    @property
    def mixed(self) -> int:
        """The newest version in its worker's own values at the end."""
        return max(self.version, self.mixes)

    @property
    def since(self) -> float:
        """Start of the worker's counted time: an early lease may pause for the previous round."""
        return max(self.assigned_at, self.due_from)


class EvalInFlight(InFlight):
    """An eval task."""

    task: int
    version: int
    chunk: int
    assigned_at: float


class WorkerSession(msgspec.Struct):
    """A worker's connection."""

    session: int
    worker: str
    node: str
    pid: int
    backend: str
    target: str
    features: str
    phase: Phase
    phase_at: float = 0.0  # when it began, monotonic
    artifact: str = ""
    offers: int = 0  # jobs that were sent on it
    reference: str = ""  # digest of the reference for the device's results
    device: str = ""  # device name from the driver
    trial: bool = False  # it never becomes ready
    chosen: str = ""  # reason of the machine's choice of the backend, in words
    roles: tuple[str, ...] = ()  # roles allowed by the operator; empty: all
    leaving: str = ""  # why it gets no more tasks, and goes when it has none; "": it stays
    leaves_as: Leave = "moved"  # if it does
    verified: str = ""  # result of that comparison, in words
    version: int = -1  # the newest parameters sent on it, or that the worker made in the ring
    address: str = ""  # address of the worker
    identity: str = ""  # public key of the machine; "" in a local run, and without TLS
    invite: str = ""  # id of the invite it came with
    heard_at: float = 0.0  # arrival of the newest message other than a heartbeat
    arriving: dict[int, float] = msgspec.field(default_factory=dict)  # message with tensors -> since when it comes in
    arrived_at: float = 0.0  # when the last of them was here
    arrival_s: float = 0.0  # seconds it took
    mixed: int = -1  # newest version in the worker's own values, after the last counted lease
    failed_after: int = 0  # own task with whose end parameters a lease failed; 0: none did
    own: FragmentSteps | None = None  # steps of these values, where the run's workers keep them
    unanswered: int = 0  # leases in a row that came back from it without a sign
    train: TrainInFlight | None = None
    next: TrainInFlight | None = None  # early lease behind `train`, starting from the end parameters of `train`
    evaluate: EvalInFlight | None = None

    @property
    def ready(self) -> bool:
        """Whether it takes tasks."""
        return self.phase is Phase.READY

    @property
    def is_unresponsive(self) -> bool:
        """Whether it gets no more tasks and versions until it gives a sign or connects again."""
        return self.unanswered >= MOST_UNANSWERED

    def advance(self, event: str, now: float) -> None:
        """Take a step of `WORKER_SESSION` at monotonic time `now`."""
        self.phase, self.phase_at = Phase(advance(WORKER_SESSION, self.phase, event)), now

    def may(self, role: str) -> bool:
        """Whether the operator allows a role."""
        return not self.roles or role in self.roles


class SupervisorSession(msgspec.Struct):
    """A supervisor's connection."""

    session: int
    worker: str
    node: str
    child_pid: int = 0  # 0: the worker process is not running
    restart_expected: bool = True
    identity: str = ""  # public key of the machine
