"""The controller's journal: one typed record per fact, in the order they became true.

The controller changes state only by applying a record, and every record is appended to `events.jsonl`. Replaying the
file therefore gives the same state (`machine.journal.replay`). A line is `{"event": "worker_joined", "t": ..., ...}`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.errors import (
    ClosedError,
    CompileError,
    NumericsError,
    PeerError,
    PlanetaryError,
    ResourceError,
    UserError,
)
from planetary.fleet.protocol.status import Leave, Loss
from planetary.machine.journal import Record


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """A new run begins.

    Attributes:
        kind: name of the kind of run.
        format: version of the run's files; 0: before they had one.
    """

    kind: str = ""
    format: int = 0
    run: str
    config_hash: str
    model: str  # sha256 of the portable artifact, or the name of a model
    params: int
    notes: tuple[str, ...] = ()  # notes on the model and its training step


class RunResumed(Record, frozen=True, kw_only=True, tag="run_resumed"):
    """The controller was restarted; whatever was under way is void."""

    run: str
    config_hash: str

    @property
    def news(self) -> str:
        return "resumed"


class ArtifactPublished(Record, frozen=True, kw_only=True, tag="artifact_published"):
    """A training step was compiled for a target, verified, and can be fetched."""

    backend: str
    target: str
    digest: str
    nbytes: int
    seconds: float
    verified: str  # how: the two sides of the comparison, in words

    @property
    def news(self) -> str:
        return f"compiled for {self.backend}:{self.target} ({self.verified})"


class WorkerJoined(Record, frozen=True, kw_only=True, tag="worker_joined"):
    """A worker loaded the artifact, found it right on its device, and can take tasks."""

    worker: str
    pid: int
    node: str
    backend: str
    target: str
    device: str = ""  # device name from the driver
    verified: str = ""  # result of the comparison on it, in words; "": there is no reference
    chosen: str = ""  # reason of the machine's choice of the backend, in words; "": the operator chose
    address: str = ""  # address of the worker
    identity: str = ""  # public key of the machine, owner of the name from now on; "": local run

    @property
    def news(self) -> str:
        how = "".join(f"; {text}" for text in (self.chosen, self.verified) if text)
        return f"worker {self.worker} joined (process {self.pid}){how}"


class WorkerRefused(Record, frozen=True, kw_only=True, tag="worker_refused"):
    """A worker's device cannot run the training step, or computes something else; it takes no part."""

    worker: str
    pid: int
    node: str
    backend: str
    target: str
    reason: str

    @property
    def news(self) -> str:
        return f"worker {self.worker} refused: {self.reason}"


class WorkerBanned(Record, frozen=True, kw_only=True, tag="worker_banned"):
    """A worker is not used any more."""

    worker: str
    node: str
    kind: EndKind
    reason: str
    identity: str = ""  # public key of the machine; "": local run
    invite: str = ""  # id of the invite it came with
    lasting: bool = False  # ban for contributions: holds for the machine, and after a resume, too

    @property
    def news(self) -> str:
        return f"worker {self.worker} is banned: {self.reason}"


class WorkerForgiven(Record, frozen=True, kw_only=True, tag="worker_forgiven"):
    """A person forgives a worker when the run is resumed: bans and keys under the name no longer count."""

    worker: str

    @property
    def news(self) -> str:
        return f"worker {self.worker} is forgiven, and its name may belong to another machine"


class WorkerLost(Record, frozen=True, kw_only=True, tag="worker_lost"):
    """A worker that had joined is gone."""

    worker: str
    pid: int
    node: str
    reason: str
    silent_s: float | None = None  # seconds since the last sign of life of any kind; None: an older journal
    kind: Loss = ""

    @property
    def news(self) -> str:
        return f"worker {self.worker} lost: {self.reason}"


class WorkerLeft(Record, frozen=True, kw_only=True, tag="worker_left"):
    """A joined worker left at the gateway's request: no fault, and no loss."""

    worker: str
    pid: int
    node: str
    reason: str
    kind: Leave

    @property
    def news(self) -> str:
        return f"worker {self.worker} was {self.kind}: {self.reason}"


class TaskAborted(Record, frozen=True, kw_only=True, tag="task_failed"):
    """A worker reported that it could not finish a task."""

    task: int
    worker: str
    pid: int
    node: str
    kind: str
    step: int
    reason: str

    @property
    def news(self) -> str:
        return f"{self.worker} could not finish its task: {self.reason}"


class Stalled(Record, frozen=True, kw_only=True, tag="stalled"):
    """Nothing can go on at the moment; names the participant or event waited for."""

    why: str

    @property
    def news(self) -> str:
        return self.why


EndKind = Literal["", "done", "stopped", "deserted", "compile", "numerics", "data", "resource", "peer"]
"""Why a run ended. stopped: on request; deserted: no worker was left; compile, numerics, data,
resource: every worker failed, the last one in this way; peer: they failed otherwise, or sent unusable results; empty:
the journal of an older version does not say."""


_ERRORS: dict[str, type[PlanetaryError]] = {
    "stopped": ClosedError,
    "compile": CompileError,
    "numerics": NumericsError,
    "data": UserError,
    "resource": ResourceError,
}


def error_class(kind: str) -> type[PlanetaryError]:
    """Return the class of the error that a run, or a worker which is not wanted any more, ends with."""
    return _ERRORS.get(kind, PeerError)


class RunFinished(Record, frozen=True, kw_only=True, tag="run_finished"):
    """The run ended. `ok` is false when it was stopped or failed; it can then be resumed."""

    ok: bool
    reason: str
    kind: EndKind = ""

    @property
    def news(self) -> str:
        return self.reason


CommonRecord = (
    ArtifactPublished
    | WorkerJoined
    | WorkerRefused
    | WorkerBanned
    | WorkerForgiven
    | WorkerLost
    | WorkerLeft
    | TaskAborted
    | Stalled
    | RunFinished
)
"""Records of every kind of run, as they are."""

AnyRecord = CommonRecord | RunStarted | RunResumed
"""The records of every kind of run. A kind may have more fields in the last two."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics.jsonl`, of a kind of run that has any."""

    @property
    def number(self) -> int:
        """Number of the measurement: a later line of the same number replaces this one."""
        raise NotImplementedError
