"""The controller's state of a connection while it lasts. None of it is worth a journal."""

from __future__ import annotations

from enum import StrEnum
from typing import TypedDict

import msgspec

from planetary.fleet.protocol.status import Leave
from planetary.machine.state_table import Table, advance


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


class Named(TypedDict):
    """The fields of a record that name a worker."""

    worker: str
    pid: int
    node: str


class WorkerSession(msgspec.Struct):
    """A worker's connection. A kind of run may have a class of its own, with the tasks of the connection."""

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
    address: str = ""  # address of the worker
    identity: str = ""  # public key of the machine; "" in a local run, and without TLS
    invite: str = ""  # id of the invite it came with
    heard_at: float = 0.0  # arrival of the newest message other than a heartbeat

    @property
    def named(self) -> Named:
        return {"worker": self.worker, "pid": self.pid, "node": self.node}

    @property
    def ready(self) -> bool:
        """Whether it takes tasks."""
        return self.phase is Phase.READY

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
