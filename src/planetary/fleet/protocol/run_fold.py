"""The common part of the journals of all kinds of run, as a fold over their records."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planetary.core.errors import UserError
from planetary.fleet.protocol.records import (
    EndKind,
    EvalFinished,
    RoundFinished,
    RunFinished,
    RunResumed,
    RunStarted,
    WorkerBanned,
    WorkerForgiven,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from planetary.fleet.protocol.status import Leave
from planetary.machine.journal import Record


class Member(msgspec.Struct):
    """A worker that joined and is there."""

    worker: str
    pid: int
    node: str
    backend: str
    target: str


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
        rounds: that it is to have.
        round: the last finished one.
        tokens_total: target tokens of the finished rounds.
        members: workers that joined and are there, by name.
        losses: how many times each worker was lost.
        left: how each worker went that went in good order and is not back.
        keys: public key of the machine a worker's name belongs to.
        bans: of workers that are not used any more, by name. Those for a worker's contributions outlast a resume.
        evals: held-out loss, by version.
        train_losses: mean training loss, by round.
        ended: how and why it ended; None while it goes on.
    """

    run: str = ""
    rounds: int = 0
    round: int = 0
    tokens_total: int = 0
    members: dict[str, Member] = {}
    losses: dict[str, int] = {}
    left: dict[str, Leave] = {}
    keys: dict[str, str] = {}
    bans: dict[str, Ban] = {}
    evals: dict[int, float] = {}
    train_losses: dict[int, float] = {}
    ended: RunFinished | None = None

    def apply(self, record: Record) -> None:
        """Apply `record` to the state.

        Raises:
            LocalProtocolError: the record cannot follow the ones before it.
        """
        self._apply_own(record)
        match record:
            case RunStarted() | RunResumed():
                self.run, self.rounds = record.run, record.rounds
                self.members, self.left, self.ended = {}, {}, None
                self.bans = {name: ban for name, ban in self.bans.items() if ban.lasting}
            case WorkerJoined():
                if record.identity:
                    self.keys[record.worker] = record.identity
                self.left.pop(record.worker, None)
                self.members[record.worker] = Member(
                    record.worker, record.pid, record.node, record.backend, record.target
                )
            case WorkerLost():
                self.members.pop(record.worker, None)
                self.losses[record.worker] = self.losses.get(record.worker, 0) + 1
            case WorkerLeft():
                self.members.pop(record.worker, None)
                self.left[record.worker] = record.kind
            case WorkerBanned():
                self.bans[record.worker] = Ban(
                    record.worker, record.kind, record.reason, record.identity, record.invite, record.lasting
                )
            case WorkerForgiven():
                self.bans.pop(record.worker, None)
                self.keys.pop(record.worker, None)
            case RoundFinished():
                self.round, self.tokens_total = record.round, record.tokens_total
                self.train_losses[record.round] = record.loss
            case EvalFinished():
                self.evals[record.version] = record.loss
            case RunFinished():
                self.ended = record
            case _:
                pass  # of a kind of run, or a fact for people on which no decision depends

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
