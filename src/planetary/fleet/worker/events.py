"""The worker machine's own events and instructions; `fleet.protocol.events` has those of several machines."""

from __future__ import annotations

from typing import Protocol

from planetary.core.errors import PlanetaryError
from planetary.fleet.protocol.messages import WorkerJob
from planetary.machine.events import Event, Instruction


class RoleMachine(Protocol):
    """The pure machine of a role, part of the worker's machine."""

    def connected(self, session: int, job: WorkerJob) -> list[Instruction]:
        """The gateway can be spoken to on `session`; `job` is the newest, and of the same loads as the role's own."""
        ...

    def disconnected(self) -> list[Instruction]:
        """The connection is lost; nothing that is sent arrives."""
        ...

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event that is not the connection's or the job's; of `Received`, only those of the session."""
        ...

    def validate(self) -> None: ...


class LoadJob(Instruction, frozen=True):
    """Make the role of a job from the blobs.

    Answer with `JobLoaded`, `BlobMissing`, `DeviceIsWrong` or `JobBroke`, or `StopRequested` for a job without work.
    """

    job: WorkerJob


class RoleConnected(Instruction, frozen=True):
    """Tell an independent role that the gateway is connected."""


class RoleDisconnected(Instruction, frozen=True):
    """Tell an independent role that the gateway is out of reach; current tasks go on."""


class IndependentMachine:
    """The machine of a role that decides by itself. See `RoleMachine`."""

    def connected(self, session: int, job: WorkerJob) -> list[Instruction]:
        return [RoleConnected()]

    def disconnected(self) -> list[Instruction]:
        return [RoleDisconnected()]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        return []

    def validate(self) -> None:
        """The role's machine checks the invariants."""


class JobLoaded(Event, frozen=True):
    """The compiled module is on the device, and the role can begin."""

    job: WorkerJob
    machine: RoleMachine


class DeviceIsWrong(Event, frozen=True):
    """The device cannot run the artifact, or computes something else than the reference."""

    reason: str


class BlobMissing(Event, frozen=True):
    """A blob of the job is not in the worker's cache."""

    digest: str


class JobBroke(Event, frozen=True):
    """The job cannot be run on this machine."""

    reason: str
    error: type[PlanetaryError]
