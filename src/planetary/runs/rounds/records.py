"""The journal of a run in rounds: one typed record per fact, in the order they became true, beside the fleet's.

The controller changes state only by applying a record, and every record is appended to `events.jsonl`. Replaying the
file therefore gives the same state (`runs.rounds.state`). A line is `{"event": "round_started", "t": ..., ...}`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from planetary.fleet.protocol.records import CommonRecord, RunResumed, RunStarted
from planetary.machine.journal import Record
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.metrics import ContributionMetrics, MergedMetrics
from planetary.sync.measure import Measure


class TrainingStarted(RunStarted, frozen=True, kw_only=True, tag="run_started"):
    """A new training begins."""

    rounds: int
    counts: str = "tokens"  # unit of all numbers of tokens; examples or targets where a batch is no text


class Mark(msgspec.Struct, frozen=True):
    """Where a run stands after a round: the controller's part of a checkpoint, where a resume begins."""

    round: int
    tokens_total: int
    next_task: int


class TrainingResumed(RunResumed, frozen=True, kw_only=True, tag="run_resumed"):
    """The controller of a training was restarted and goes on from `mark`."""

    rounds: int
    mark: Mark

    @property
    def news(self) -> str:
        return f"resumed after round {self.mark.round}"


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

    outdates_news: ClassVar[bool] = True

    @property
    def news(self) -> str:
        return f"round {self.round} finished: loss {self.loss:.4f} on {self.workers} workers' results"


class CheckpointWritten(Record, frozen=True, kw_only=True, tag="checkpoint_written"):
    """A checkpoint was committed."""

    round: int
    path: str
    seconds: float


class CheckpointFailed(Record, frozen=True, kw_only=True, tag="checkpoint_failed"):
    """A checkpoint could not be written; the one before is still valid and the run goes on."""

    round: int
    reason: str

    @property
    def news(self) -> str:
        return f"checkpoint of round {self.round} failed: {self.reason}"


class RunPaused(Record, frozen=True, kw_only=True, tag="run_paused"):
    """Two checkpoints in a row could not be written; nothing is trained until the newest of them is."""

    round: int
    reason: str

    @property
    def news(self) -> str:
        return f"the run pauses: {self.reason}"


class EvalFinished(Record, frozen=True, kw_only=True, tag="eval_finished"):
    """All held-out batches of a version were evaluated."""

    version: int
    loss: float
    batches: int
    wrong: tuple[str, ...] = ()  # workers whose answers for some of them differ
    # named set -> metric -> value; without the held-out part's loss
    values: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    failed: tuple[str, ...] = ()  # why metrics have no value

    @property
    def news(self) -> str:
        return "; ".join(self.failed)


class LeaseMark(Mark, frozen=True):
    """Where a run in rounds stands after a round.

    Attributes:
        ledger: which leases are trained or free.
        counted: of a hub, as `ControllerState.counted`.
    """

    ledger: LeaseLedger
    counted: dict[str, int] = msgspec.field(default_factory=dict)


class RoundsResumed(TrainingResumed, frozen=True, kw_only=True, tag="run_resumed"):
    """The controller of a run in rounds was restarted."""

    mark: LeaseMark


class RoundMerged(RoundFinished, frozen=True, kw_only=True, tag="round_finished"):
    """The outer step is done, with the numbers of the merged delta and of each contribution."""

    delta_norm: float | None = None  # norm as of `RoundMetrics`
    merged: MergedMetrics | None = None  # metrics as of `RoundMetrics`
    contributions: tuple[ContributionMetrics, ...] = ()


class StepReplaced(Record, frozen=True, kw_only=True, tag="step_replaced"):
    """Rounds after `round` are trained with another training step, of equal signature."""

    round: int
    model: str  # sha256 of the portable artifact
    before: str  # sha256 of that of the step until then
    by: str = ""  # name of the token; "": the run was resumed with another step
    why: str = ""
    back: bool = False  # return to an earlier step of the run
    keeps_state: bool = True  # workers keep their optimizers' states

    @property
    def news(self) -> str:
        what = "an earlier training step" if self.back else "another training step"
        why = "; ".join(filter(None, (self.why, f"by {self.by}" if self.by else "")))
        return f"{what} from round {self.round + 1} on: {self.model[:12]}" + (f" ({why})" if why else "")


class TopologyReplaced(Record, frozen=True, kw_only=True, tag="topology_replaced"):
    """The workers could not close their ring: until the gateway ends, rounds after `round` are reduced in a star."""

    round: int
    why: str

    @property
    def news(self) -> str:
        return f"the run goes on in a star from round {self.round + 1} on: {self.why}"


class WorkerSlow(Record, frozen=True, kw_only=True, tag="worker_slow"):
    """A worker is slower than the others since some rounds; `reason` names the quantity."""

    round: int
    worker: str
    reason: str

    @property
    def news(self) -> str:
        return f"worker {self.worker} is slow: {self.reason}"


class WorkerRecovered(Record, frozen=True, kw_only=True, tag="worker_recovered"):
    """A worker that was slow is as fast as the others since some rounds."""

    round: int
    worker: str

    @property
    def news(self) -> str:
        return f"worker {self.worker} is not slow any more"


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

    @property
    def news(self) -> str:
        if not self.task:
            return ""
        return f"lease {self.lease} returned by {self.worker}: {self.reason}"


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

    @property
    def news(self) -> str:
        return f"result of {self.worker} rejected: {self.reason}"


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

    @property
    def news(self) -> str:
        return f"result of {self.worker} does not count: {self.reason}"


class ReduceRetried(Record, frozen=True, kw_only=True, tag="reduce_retried"):
    """Ring: the workers could not reduce their deltas; those that are left try again."""

    round: int
    attempt: int
    reason: str

    @property
    def news(self) -> str:
        return f"round {self.round}: reduction failed, retrying: {self.reason}"


class DigestsDiffered(Record, frozen=True, kw_only=True, tag="digests_differed"):
    """Ring: parameters of workers differed from the majority's after the outer step; they are resynchronised."""

    round: int
    workers: tuple[str, ...]

    @property
    def news(self) -> str:
        who = ", ".join(self.workers)
        return f"round {self.round}: parameters of {who} differ from the majority's; resynchronising"


class RolledBack(Record, frozen=True, kw_only=True, tag="rolled_back"):
    """Versions after `mark` are useless, or lost with the workers that held them; the run goes on from `mark`."""

    mark: LeaseMark
    reason: str
    bad: int = 0  # the version that was of no use; 0: versions after `mark` are lost

    @property
    def news(self) -> str:
        return f"back to round {self.mark.round}: {self.reason}"

    @property
    def lasting_news(self) -> str:
        return f"the run went back to round {self.mark.round}: {self.reason}" if self.bad else ""


class RoundClosed(Record, frozen=True, kw_only=True, tag="round_closed"):
    """No more contributions: the outer step is being taken. `why` is the verdict's reason."""

    round: int
    contributions: int
    why: str
    peers: int = 0  # ring: workers that reduced, with contributions or without


TrainingRecord = CommonRecord | TrainingStarted | CheckpointWritten | CheckpointFailed | RunPaused | EvalFinished
"""Records of every training, as they are."""

RoundsRecord = (
    TrainingRecord
    | RoundsResumed
    | RoundMerged
    | StepReplaced
    | TopologyReplaced
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
    | RoundClosed
)
"""The records of a run in rounds."""
