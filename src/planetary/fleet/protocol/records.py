"""The controller's journal: one typed record per fact, in the order they became true.

The controller changes state only by applying a record, and every record is appended to `events.jsonl`. Replaying the
file therefore gives the same state (`machine.journal.replay`). A line is `{"event": "round_started", "t": ..., ...}`.
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
from planetary.data.slices import LeaseLedger
from planetary.fleet.protocol.status import ContributionMetrics, Leave, Loss, MergedMetrics
from planetary.machine.journal import Record
from planetary.sync.measure import Measure


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """A new run begins."""

    run: str
    rounds: int
    config_hash: str
    model: str  # sha256 of the training step's portable artifact
    params: int
    notes: tuple[str, ...] = ()  # notes on the model and its training step


class Mark(msgspec.Struct, frozen=True):
    """Where a run stands after a round: the controller's part of a checkpoint, where a resume begins."""

    round: int
    tokens_total: int
    next_task: int
    ledger: LeaseLedger
    counted: dict[str, int] = {}  # hub only: tokens as in `ControllerState.counted`


class RunResumed(Record, frozen=True, kw_only=True, tag="run_resumed"):
    """The controller was restarted and goes on from `mark`; whatever was under way is void."""

    run: str
    rounds: int
    mark: Mark
    config_hash: str


class ArtifactPublished(Record, frozen=True, kw_only=True, tag="artifact_published"):
    """A training step was compiled for a target, verified, and can be fetched."""

    backend: str
    target: str
    digest: str
    nbytes: int
    seconds: float
    verified: str  # how: the two sides of the comparison, in words


class StepReplaced(Record, frozen=True, kw_only=True, tag="step_replaced"):
    """Rounds after `round` are trained with another training step, of equal signature."""

    round: int
    model: str  # sha256 of the portable artifact
    before: str  # sha256 of that of the step until then
    by: str = ""  # name of the token; "": the run was resumed with another step
    why: str = ""
    back: bool = False  # return to an earlier step of the run
    keeps_state: bool = True  # workers keep their optimizers' states


class TopologyReplaced(Record, frozen=True, kw_only=True, tag="topology_replaced"):
    """The workers could not close their ring: until the gateway ends, rounds after `round` are reduced in a star."""

    round: int
    why: str


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


class WorkerRefused(Record, frozen=True, kw_only=True, tag="worker_refused"):
    """A worker's device cannot run the training step, or computes something else; it takes no part."""

    worker: str
    pid: int
    node: str
    backend: str
    target: str
    reason: str


class WorkerBanned(Record, frozen=True, kw_only=True, tag="worker_banned"):
    """A worker is not used any more."""

    worker: str
    node: str
    kind: EndKind
    reason: str
    identity: str = ""  # public key of the machine; "": local run
    invite: str = ""  # id of the invite it came with
    lasting: bool = False  # ban for contributions: holds for the machine, and after a resume, too


class WorkerForgiven(Record, frozen=True, kw_only=True, tag="worker_forgiven"):
    """A person forgives a worker when the run is resumed: bans and keys under the name no longer count."""

    worker: str


class WorkerLost(Record, frozen=True, kw_only=True, tag="worker_lost"):
    """A worker that had joined is gone."""

    worker: str
    pid: int
    node: str
    reason: str
    silent_s: float | None = None  # seconds since the last sign of life of any kind; None: an older journal
    kind: Loss = ""


class WorkerLeft(Record, frozen=True, kw_only=True, tag="worker_left"):
    """A joined worker left at the gateway's request: no fault, and no loss."""

    worker: str
    pid: int
    node: str
    reason: str
    kind: Leave


class WorkerSlow(Record, frozen=True, kw_only=True, tag="worker_slow"):
    """A worker is slower than the others since some rounds; `reason` names the quantity."""

    round: int
    worker: str
    reason: str


class WorkerRecovered(Record, frozen=True, kw_only=True, tag="worker_recovered"):
    """A worker that was slow is as fast as the others since some rounds."""

    round: int
    worker: str


class RoundStarted(Record, frozen=True, kw_only=True, tag="round_started"):
    """A round begins with `workers` ready workers, from parameters `version`.

    Overlap: while the results of the round before it are reduced; `version` is one less than in lock-step then.
    """

    round: int
    version: int
    workers: int


class ParametersSent(Record, frozen=True, kw_only=True, tag="parameters_sent"):
    """A worker is sent a version in one of several possible forms."""

    version: int
    worker: str
    pid: int
    node: str
    form: str  # "relay", "whole", or the codec of the initial parameters
    nbytes: int  # size of the tensors
    why: str


class LeaseAssigned(Record, frozen=True, kw_only=True, tag="lease_assigned"):
    """A worker gets a lease to train, from parameters `version`."""

    round: int
    lease: int
    more: tuple[int, ...] = ()  # leases the task trains after it, in this order
    task: int
    worker: str
    pid: int
    node: str
    version: int = -1  # -1: the journal of an older planetary does not say; it is that of the round then
    ahead: tuple[int, ...] = ()  # eager: own tasks of the round that is reduced, whose part it begins with
    ahead_tokens: int = 0  # tokens of all contributions to that round
    after: int = 0  # streaming: own task it goes on from; 0: from the version
    mixes: int = -1  # streaming: the version whose fragment is mixed in on the way; -1: none
    missed: tuple[int, ...] = ()  # decoupled: versions whose fragments are mixed in at the start
    early: bool = False  # fragments: it is of the round after the open one, and goes on from the worker's lease of that


class LeaseCarried(Record, frozen=True, kw_only=True, tag="lease_carried"):
    """Decoupled: a round closed before a lease was trained; it goes on, and counts in the round that is opened."""

    round: int
    to: int
    lease: int
    task: int
    worker: str
    steps: int = 0  # inner steps reported by the holder


class LeaseStarted(Record, frozen=True, kw_only=True, tag="lease_started"):
    """The worker has parameters and tokens and begins the first inner step."""

    round: int
    lease: int
    task: int
    worker: str
    pid: int
    node: str


class LeaseReturned(Record, frozen=True, kw_only=True, tag="lease_returned"):
    """A lease lost its holder untrained."""

    round: int
    lease: int
    more: tuple[int, ...] = ()  # others of the task
    task: int  # 0 when no worker held it any more
    steps: int = 0  # inner steps reported by the holder, for nothing
    worker: str
    to: str  # "round": it is offered again in this round; "pool": it goes to a later round
    reason: str


class DeltaAccepted(Record, frozen=True, kw_only=True, tag="delta_accepted"):
    """A worker's contribution was checked and counts in this round."""

    round: int
    lease: int
    more: tuple[int, ...] = ()  # leases trained after it
    untrained: tuple[int, ...] = ()  # leases of the task cut off by the deadline; they go to a later round
    task: int
    worker: str
    pid: int
    node: str
    tokens: int
    loss: float
    seconds: float
    grad_norm: float = 0.0  # norm at the last inner step
    transfer_s: float = 0.0  # time for the parameters to leave the gateway, and for the result to arrive
    waited_s: float = 0.0  # time in which the round waited for it alone
    version_lag: int = 0  # staleness of the parameters, in versions
    through: int = 0  # site only: tokens as of `TrainResult`
    stale: int = 0  # decoupled: missed versions of the fragment; the weight is 1 / (1 + stale)
    share: float = -1.0  # fragments: fraction of the usual inner steps behind the delta; -1: as the leases tell


class DeltaRejected(Record, frozen=True, kw_only=True, tag="delta_rejected"):
    """A worker's contribution does not count; the reason names the defect."""

    round: int
    lease: int
    task: int
    worker: str
    pid: int
    node: str
    reason: str


class ContributionsJudged(Record, frozen=True, kw_only=True, tag="contributions_judged"):
    """The contributions of a round that closes were compared with each other; those refused are withdrawn next."""

    round: int
    measures: tuple[Measure, ...]
    length: float  # see `sync.judgement.Judgement`
    rule: str  # how those that count are merged


class DeltaWithdrawn(Record, frozen=True, kw_only=True, tag="delta_withdrawn"):
    """A contribution of a round under way was refused, or died with the worker holding it; the lease is an orphan."""

    round: int
    lease: int
    more: tuple[int, ...] = ()  # leases trained after it
    task: int
    worker: str
    reason: str


class ReduceRetried(Record, frozen=True, kw_only=True, tag="reduce_retried"):
    """Ring: the workers could not reduce their deltas; those that are left try again."""

    round: int
    attempt: int
    reason: str


class DigestsDiffered(Record, frozen=True, kw_only=True, tag="digests_differed"):
    """Ring: parameters of workers differed from the majority's after the outer step; they are resynchronised."""

    round: int
    workers: tuple[str, ...]


class RolledBack(Record, frozen=True, kw_only=True, tag="rolled_back"):
    """Versions after `mark` are useless, or lost with the workers that held them; the run goes on from `mark`."""

    mark: Mark
    reason: str
    bad: int = 0  # the version that was of no use; 0: versions after `mark` are lost


class TaskAborted(Record, frozen=True, kw_only=True, tag="task_failed"):
    """A worker reported that it could not finish a task."""

    round: int
    task: int
    worker: str
    pid: int
    node: str
    kind: str
    step: int
    reason: str


class RoundClosed(Record, frozen=True, kw_only=True, tag="round_closed"):
    """No more contributions: the outer step is being taken. `why` is the verdict's reason."""

    round: int
    contributions: int
    why: str
    peers: int = 0  # ring: workers that reduced, with contributions or without


class RoundFinished(Record, frozen=True, kw_only=True, tag="round_finished"):
    """The outer step is done and the checkpoint, when due, is on disk."""

    round: int
    workers: int
    tokens: int
    tokens_total: int
    loss: float
    seconds: float
    compute_fraction: float  # worker-seconds spent in inner steps / (workers * seconds)
    durable: bool  # a checkpoint of this round exists
    delta_norm: float | None = None  # norm as of `RoundMetrics`
    merged: MergedMetrics | None = None  # metrics as of `RoundMetrics`
    contributions: tuple[ContributionMetrics, ...] = ()


class CheckpointWritten(Record, frozen=True, kw_only=True, tag="checkpoint_written"):
    """A checkpoint was committed."""

    round: int
    path: str
    seconds: float


class CheckpointFailed(Record, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A checkpoint could not be written; the one before is still valid and the run goes on."""

    round: int
    reason: str


class RunPaused(Record, frozen=True, kw_only=True, tag="run_paused"):
    """Two checkpoints in a row could not be written; nothing is trained until the newest of them is."""

    round: int
    reason: str


class EvalFinished(Record, frozen=True, kw_only=True, tag="eval_finished"):
    """All held-out batches of a version were evaluated."""

    version: int
    loss: float
    batches: int
    wrong: tuple[str, ...] = ()  # workers whose answers for some of them differ


class Stalled(Record, frozen=True, kw_only=True, tag="stalled"):
    """Nothing can go on at the moment; names the participant or event waited for."""

    round: int
    why: str


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


class VersionAdopted(Record, frozen=True, kw_only=True, tag="version_adopted"):
    """A site goes on from a version of the hub, plus `carried` own tokens missing in that version."""

    round: int  # round of the site whose parameters these are from now on
    version: int  # version of the hub
    carried: int
    why: str = ""  # the reason for which the site's own training was given up for it; "": it was not


class ContributionOffered(Record, frozen=True, kw_only=True, tag="contribution_offered"):
    """A site sent the parameters after this round to the hub, with the tokens missing in every version."""

    round: int
    version: int  # version of the hub at the start of this training
    tokens: int


class WentAlone(Record, frozen=True, kw_only=True, tag="went_alone"):
    """A site goes on without the hub until the hub answers again."""

    round: int
    why: str


class RunFinished(Record, frozen=True, kw_only=True, tag="run_finished"):
    """The run ended. `ok` is false when it was stopped or failed; it can then be resumed."""

    round: int
    ok: bool
    reason: str
    kind: EndKind = ""


AnyRecord = (
    RunStarted
    | RunResumed
    | ArtifactPublished
    | StepReplaced
    | TopologyReplaced
    | WorkerJoined
    | WorkerRefused
    | WorkerBanned
    | WorkerForgiven
    | WorkerLost
    | WorkerLeft
    | WorkerSlow
    | WorkerRecovered
    | RoundStarted
    | ParametersSent
    | LeaseAssigned
    | LeaseCarried
    | LeaseStarted
    | LeaseReturned
    | DeltaAccepted
    | DeltaRejected
    | ContributionsJudged
    | DeltaWithdrawn
    | ReduceRetried
    | DigestsDiffered
    | RolledBack
    | TaskAborted
    | RoundClosed
    | RoundFinished
    | CheckpointWritten
    | CheckpointFailed
    | RunPaused
    | EvalFinished
    | Stalled
    | VersionAdopted
    | ContributionOffered
    | WentAlone
    | RunFinished
)
