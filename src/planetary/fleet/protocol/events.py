"""Events and instructions of the fabric's machines: the kernel's, and those of controller and supervisor.

`worker_events` has those of the worker alone.
"""

from __future__ import annotations

from planetary.core.step import StepSpec
from planetary.core.token_slice import Slice
from planetary.fleet.protocol.records import EndKind, Mark
from planetary.fleet.protocol.status import Leave, RoundMetrics
from planetary.machine.events import (  # noqa: F401  # this module is all that the fabric's machines speak
    Append,
    Close,
    Closed,
    Dial,
    Event,
    Exit,
    Instruction,
    Opened,
    Payload,
    Received,
    Send,
    StopRequested,
    Tick,
)
from planetary.runs.rounds.changes import (  # noqa: F401  # the same: controllers and gateways speak it
    WHOLE,
    Change,
    ChangeOf,
    ParametersOf,
)
from planetary.sync.deltas import Table
from planetary.wire.message import Message

# --- events for the controller ----------------------------------------------------------------------------------


class Compiled(Event, frozen=True):
    """The training step is compiled for a target and verified; its blob can be served."""

    backend: str
    target: str
    features: str
    digest: str
    nbytes: int
    seconds: float
    verified: str
    reference: str = ""  # digest of the reference results for workers' devices; "": none
    edition: int = 0  # edition as of `Compile`


class CompileFailed(Event, frozen=True):
    """The training step could not be compiled or verified for a target."""

    backend: str
    target: str
    features: str
    reason: str
    edition: int = 0  # edition as of `Compile`


class StepOffered(Event, frozen=True, kw_only=True):
    """A training step of equal signature is compiled for the targets in use and verified: it replaces the run's."""

    spec: StepSpec
    buffers: str  # digest, as of `TrainingJob`
    compiled: tuple[Compiled, ...]
    by: str  # name of the token
    why: str
    back: bool = False  # return to an earlier step of the run


class SendFailed(Event, frozen=True):
    """The tensors of a message could not be read, so the message was not sent and its connection is dropped."""

    session: int
    reason: str


class PayloadSent(Event, frozen=True):
    """A message with tensors has left this machine."""

    session: int
    message: Message


class PayloadArrives(Event, frozen=True):
    """A message with tensors has begun to arrive; `Received` follows, or the end of its connection."""

    session: int
    message: Message


class ContributionsMeasured(Event, frozen=True):
    """The inner products of the deltas of a round's contributions are known."""

    round: int
    table: Table


class OuterStepDone(Event, frozen=True):
    """The parameters of version `round` exist."""

    round: int
    delta_norm: float  # Euclidean norm of the merged delta
    autocorrelation: float | None = None  # autocorrelation of the merged delta with the previous round's
    change: Change = WHOLE  # the form in which workers that have the version before get it


class OuterStepFailed(Event, frozen=True):
    """The outer step gave numbers that are not finite."""

    round: int
    reason: str


class ParametersRestored(Event, frozen=True):
    """The gateway's parameters are those of a checkpoint again, or the initial ones."""

    mark: Mark
    digest: str  # digest of the outer state


class RestoreFailed(Event, frozen=True):
    """The gateway could not go back."""

    reason: str


class CheckpointDone(Event, frozen=True):
    """A checkpoint was committed."""

    round: int
    path: str
    seconds: float


class CheckpointLost(Event, frozen=True):
    """A checkpoint could not be written."""

    round: int
    reason: str


# --- tensors that messages carry ---------------------------------------------------------------------------------


class BlobOf(Payload, frozen=True):
    """The bytes of a content-addressed blob, as one tensor "blob"."""

    digest: str


class TokensOf(Payload, frozen=True):
    """Runs of tokens of the training or held-out file, one after the other as one tensor "tokens"."""

    held_out: bool
    slices: tuple[Slice, ...]


class EndParametersOf(Payload, frozen=True):
    """The worker's parameters after the last inner step of a task."""

    task: int


class OuterStateOf(Payload, frozen=True):
    """The outer state of one version: the one that the sender holds."""

    version: int


# --- requests of the operator, or of a site that several runs share ---------------------------------------------


class LetGo(Event, frozen=True):
    """Give a worker no more tasks, and end its connection when it has finished the one that it has."""

    worker: str
    reason: str
    kind: Leave = "moved"


class RestartRequested(Event, frozen=True):
    """Replace a worker's process now."""

    worker: str
    reason: str


# --- instructions of the controller -----------------------------------------------------------------------------


class Compile(Instruction, frozen=True):
    """Compile and verify the training step for a target; answer with `Compiled` or `CompileFailed`."""

    backend: str
    target: str
    features: str
    edition: int = 0  # how often the step was replaced since this gateway began


class UseStep(Instruction, frozen=True):
    """The offered step of this digest is the run's from now on."""

    model: str


class UseStar(Instruction, frozen=True):
    """The run goes on in a star from `version`, whose outer state the gateway has."""

    version: int
    why: str


class MeasureContributions(Instruction, frozen=True):
    """Compare these end parameters with the start of the round; answer with `ContributionsMeasured`."""

    round: int
    contributions: tuple[tuple[int, int], ...]  # (task, attachment), in task order


class TakeOuterStep(Instruction, frozen=True):
    """Merge these end parameters, take the outer step; answer with `OuterStepDone` or `OuterStepFailed`."""

    round: int
    rule: str  # name in `diloco.merge.MERGE_RULES`
    contributions: tuple[tuple[int, int, int], ...]  # (task, tokens, attachment), in task order


class RestoreParameters(Instruction, frozen=True):
    """Go back to the newest checkpoint of a round up to `newest`, or to the start; answer with `ParametersRestored`.

    `RestoreFailed` where reading or writing fails.
    """

    newest: int


class KeepParameters(Instruction, frozen=True):
    """Parameters of other versions than these are not needed any more."""

    versions: tuple[int, ...]


class DropAttachment(Instruction, frozen=True):
    """Forget the tensors that came with a message: they do not count."""

    attachment: int


class KeepOuterState(Instruction, frozen=True):
    """Ring: the outer state that came with a message is the gateway's from now on."""

    version: int
    attachment: int


class ForgetRounds(Instruction, frozen=True):
    """Ring: rounds after this one will be trained again; their metrics are void."""

    after: int


class WriteCheckpoint(Instruction, frozen=True):
    """Write a checkpoint of version `mark.round`; answer with `CheckpointDone` or `CheckpointLost`."""

    mark: Mark
    protected: tuple[int, ...] = ()  # earlier rounds whose checkpoints stay


class WriteMetrics(Instruction, frozen=True):
    """Append one line to `metrics.jsonl`."""

    metrics: RoundMetrics


class Finish(Instruction, frozen=True):
    """The run is over; flush, close everything, and end with this result."""

    ok: bool
    reason: str
    kind: EndKind


# --- instructions of the supervisor -----------------------------------------------------------------------------


class StartProcess(Instruction, frozen=True):
    """Start the worker process; answer with `ProcessStarted` or `ProcessExited`."""

    attempt: int


class KillProcess(Instruction, frozen=True):
    """End the worker process: politely first when `gracefully`, by SIGKILL after the shell's time limit."""

    reason: str
    gracefully: bool


# --- events for the supervisor ----------------------------------------------------------------------------------


class ProcessStarted(Event, frozen=True):
    """The worker process runs."""

    pid: int


class ProcessExited(Event, frozen=True):
    """The worker process ended; `code` is its exit status, negative for a signal."""

    pid: int
    code: int
    reason: str
