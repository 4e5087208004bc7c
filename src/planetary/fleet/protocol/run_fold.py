"""The common part of the journals of all kinds of run, as a fold over their records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from planetary.core.errors import UserError
from planetary.fleet.protocol.records import (
    EndKind,
    RunFinished,
    RunResumed,
    RunStarted,
    WorkerBanned,
    WorkerForgiven,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRefused,
)
from planetary.fleet.protocol.status import Leave, WorkerState
from planetary.machine.journal import Record


class Member(msgspec.Struct):
    """A worker that joined, or was refused, at any time.

    Attributes:
        went: how it is gone; "": it is connected.
    """

    worker: str
    pid: int
    node: str
    backend: str = ""
    target: str = ""
    device: str = ""
    chosen: str = ""
    verified: str = ""
    address: str = ""
    went: WorkerState | Literal[""] = ""


class Ban(msgspec.Struct, frozen=True):
    """Why a worker is not used any more."""

    worker: str
    kind: EndKind
    reason: str
    identity: str  # public key of the machine; "": local run
    invite: str  # id of the invite it came with
    lasting: bool


class RunFold(msgspec.Struct):
    """Base of the state of a kind of run. `apply` is the only code that changes it.

    Attributes:
        run: run name.
        started: first start of the run, Unix time in seconds; 0 in a live run, whose records have no time yet.
        workers: workers that joined or were refused, by name.
        losses: how many times each worker was lost.
        left: how each worker went that went in good order and is not back.
        keys: public key of the machine a worker's name belongs to.
        bans: of workers that are not used any more, by name. Those for a worker's contributions outlast a resume.
        ended: how and why it ended; None while it goes on.
    """

    run: str = ""
    started: float = 0.0
    workers: dict[str, Member] = {}
    losses: dict[str, int] = {}
    left: dict[str, Leave] = {}
    keys: dict[str, str] = {}
    bans: dict[str, Ban] = {}
    ended: RunFinished | None = None

    @property
    def members(self) -> dict[str, Member]:
        """The workers that are connected, by name."""
        return {name: worker for name, worker in self.workers.items() if not worker.went}

    @property
    def busy(self) -> set[str]:
        """The workers that have a task."""
        return set()

    def apply(self, record: Record) -> None:
        """Apply `record` to the state.

        Raises:
            LocalProtocolError: the record cannot follow the ones before it.
        """
        self._apply_own(record)
        match record:
            case RunStarted() | RunResumed():
                self.run, self.left, self.ended = record.run, {}, None
                self.started = self.started or record.t
                for worker in self.workers.values():
                    worker.went = "stopped"
                self.bans = {name: ban for name, ban in self.bans.items() if ban.lasting}
            case WorkerJoined():
                if record.identity:
                    self.keys[record.worker] = record.identity
                self.left.pop(record.worker, None)
                self._joined(record)
            case WorkerRefused():
                worker = self.workers.setdefault(record.worker, Member(record.worker, record.pid, record.node))
                worker.pid, worker.went = record.pid, "stopped"
            case WorkerLost():
                self._gone(record.worker, "lost")
                self.losses[record.worker] = self.losses.get(record.worker, 0) + 1
            case WorkerLeft():
                self._gone(record.worker, record.kind)
                self.left[record.worker] = record.kind
            case WorkerBanned():
                self.bans[record.worker] = Ban(
                    record.worker, record.kind, record.reason, record.identity, record.invite, record.lasting
                )
            case WorkerForgiven():
                self.bans.pop(record.worker, None)
                self.keys.pop(record.worker, None)
            case RunFinished():
                self.ended = record
            case _:
                pass  # of a kind of run, or a fact for people on which no decision depends

    def _joined(self, record: WorkerJoined) -> None:
        worker = self.workers.setdefault(record.worker, Member(record.worker, record.pid, record.node))
        worker.pid, worker.node, worker.went = record.pid, record.node, ""
        worker.backend, worker.target, worker.device = record.backend, record.target, record.device
        worker.chosen, worker.verified, worker.address = record.chosen, record.verified, record.address

    def _gone(self, worker: str, how: WorkerState) -> None:
        if worker in self.workers:
            self.workers[worker].went = how

    def _apply_own(self, record: Record) -> None:
        """Take a record before it is folded here; a kind of run folds further records. Raises as `apply`."""


def forgiven(state: RunFold, names: Iterable[str]) -> list[WorkerForgiven]:
    """Return the records by which workers are forgiven when a run is resumed.

    Raises:
        UserError: the run knows neither a ban nor a key of one of `names`.
    """
    for name in names:
        if name not in state.bans and name not in state.keys:
            known = sorted({*state.bans, *state.keys})
            among = f"those it knows are {', '.join(known)}" if known else "it knows no bans and no keys"
            raise UserError(f"--forgive {name}: the run knows no such worker; {among}")
    return [WorkerForgiven(worker=name) for name in names]
