"""A worker's role in a run, and the loaders that make the role of a job.

A kind of run has a job, a message; a worker has a table of loaders, one for each job it can be given. Shell and machine
know connections, blobs and this interface, and no role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from planetary.artifacts.store import BlobStore
from planetary.core.errors import UserError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import System
from planetary.fleet.worker.events import RoleMachine
from planetary.machine.events import Event, Instruction, Payload
from planetary.runtime.backends import DeviceChoice
from planetary.runtime.device_report import DeviceReport, check_once, key_of


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker process is started."""

    address: Address
    name: str  # e.g. "node-a/0"
    node: str
    backend: str
    target: str
    device_id: int
    island: int  # devices that run every step together
    threads: int  # 0: all cores
    cache: Path  # folder of compiled modules; shared by all workers of a machine
    state: Path  # folder of this worker: the optimizer's state
    trial: bool = False  # the process is a candidate of a `BackendTrial`
    chosen: str = ""  # why the machine chose this backend, in words
    roles: tuple[str, ...] = ()  # allowed roles; empty: all that a run has
    give_up_s: float  # end when the gateway was out of reach for this long; 0: never
    allow_code: bool = False  # permission to run Python from the gateway
    run: str = ""  # run to join; "": the gateway chooses

    @property
    def device(self) -> DeviceChoice:
        """The device, as functions of `runtime` take it."""
        return {
            "backend": self.backend,
            "threads": self.threads or None,
            "device_id": self.device_id,
            "island": self.island,
        }


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The resources of a worker for a role.

    Attributes:
        options: of the process.
        store: has the blobs of the job.
        post: hands an event to the worker's machine, which passes it to the role's; from any thread.
        send: sends a message with named arrays or none, which must not change any more; from any thread.
        is_ending: whether the process ends.
        system: the machine.
    """

    options: WorkerOptions
    store: BlobStore
    post: Callable[[Event], None]
    send: Callable[[m.Message, Tensors | None], None]
    is_ending: Callable[[], bool]
    system: System

    def checked(
        self,
        artifact: str,
        reference: str,
        device: str,
        check: Callable[[], DeviceReport],
        functions: Iterable[str] = (),
    ) -> DeviceReport:
        """Return the findings of a check of compiled code on this worker's device; an earlier success is remembered.

        Args:
            artifact: its digest.
            reference: digest of the results to compare it with.
            device: as its driver names it.
            check: runs the comparison.
            functions: of a program, those that are compared; of a training step, all are.

        Raises:
            CompileError: as `check`.
        """
        key = key_of(artifact, reference, self.options.backend, device, functions)
        return check_once(self.store, key, check)


class Role(Protocol):
    """A worker's part in one kind of run. It lives longer than a connection; methods return at once."""

    @property
    def machine(self) -> RoleMachine:
        """The role's pure machine, part of the worker's machine."""
        ...

    def carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction of the role's machine."""
        ...

    @property
    def tensors(self) -> Callable[[Payload], Tensors]:
        """The function that returns the tensors which the role's machine sends with a message."""
        ...

    def expects(self, message: m.Message, tensor: TensorSpec) -> TensorSpec | None:
        """Return the required spec of the tensor of this name in a message; None: it is not expected."""
        ...

    def received(self, session: int, message: m.Message, tensors: Tensors) -> None:
        """Take a message of the role, with all tensors."""
        ...

    def sent(self, message: m.Message) -> None:
        """A message with tensors has left this machine."""
        ...

    def close(self) -> None:
        """End. Called in a thread: it may wait for the step under way."""
        ...


class NothingToDo(Exception):
    """A job has no work for this process, which ends; the text is the reason."""


class RoleLoader(Protocol):
    """Makes the role of one kind of job."""

    def blobs(self, job: m.WorkerJob) -> tuple[str, ...]:
        """Return the digests of the blobs the role is made of. Raises `NothingToDo`."""
        ...

    def load(self, job: m.WorkerJob, place: Workplace) -> Role:
        """Load the job's artifact onto the device, and check it there. The blobs are in the store.

        Raises:
            CompileError: the device cannot run the artifact, or computes something else than the job's reference.
            NothingToDo: there is no work for this process.
            PlanetaryError: something else is wrong with the job, or with this machine.
        """
        ...


Roles = Mapping[type[m.WorkerJob], RoleLoader]
"""Loaders of roles, by class of job; of several classes of a job, the nearest counts."""


def loader_of(roles: Roles, job: m.WorkerJob) -> RoleLoader:
    """Return the loader of a job's role. Raises `UserError` for a job that this process has no role for."""
    for kind in type(job).__mro__:
        if kind in roles:
            return roles[kind]
    known = ", ".join(sorted(kind.__name__ for kind in roles))
    raise UserError(
        f"the gateway's run has jobs of the kind {type(job).__name__}, and this worker knows {known or 'none'}: use "
        "the version of planetary that the gateway has"
    )
