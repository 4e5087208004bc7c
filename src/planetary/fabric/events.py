"""What the fabric's machines are told and what they ask for.

Events go into a machine, instructions come out. A session is one connection; its number is never used again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from planetary.core.errors import PlanetaryError
from planetary.fabric.records import AnyRecord, EndKind, Mark
from planetary.fabric.status import RoundMetrics
from planetary.wire.messages import EvalTask, Job, Message, Reduce, TrainTask


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class Instruction(msgspec.Struct, frozen=True):
    """Base of all instructions."""


# --- events that every machine knows ----------------------------------------------------------------------------


class Tick(Event, frozen=True):
    """The time asked for with `next_deadline` has come (or passed)."""


class Opened(Event, frozen=True):
    """A connection was made; the handshake has been passed by the transport."""

    session: int


class Received(Event, frozen=True):
    """A message arrived.

    The tensors that came with it stay with the shell, under the number `attachment` (never used twice; 0: none).
    `defect` says why they are unusable; "" when they are fine.
    """

    session: int
    message: Message
    defect: str = ""
    attachment: int = 0


class Closed(Event, frozen=True):
    """A connection ended, or could not be made; `refused` when the other side said that trying again cannot help."""

    session: int
    reason: str
    refused: bool = False


class StopRequested(Event, frozen=True):
    """A person or the operating system asks for an orderly end."""

    reason: str


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


class CompileFailed(Event, frozen=True):
    """The training step could not be compiled or verified for a target."""

    backend: str
    target: str
    features: str
    reason: str


class SendFailed(Event, frozen=True):
    """The tensors of a message could not be read, so the message was not sent and its connection is dropped."""

    session: int
    reason: str


class OuterStepDone(Event, frozen=True):
    """The parameters of version `round` exist."""

    round: int


class OuterStepFailed(Event, frozen=True):
    """The outer step gave numbers that are not finite."""

    round: int
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


# --- instructions that every machine uses -----------------------------------------------------------------------


class Send(Instruction, frozen=True):
    """Send a message on a connection, with the tensors that `payload` names."""

    session: int
    message: Message
    payload: Payload | None = None


class Close(Instruction, frozen=True):
    """Close a connection."""

    session: int
    reason: str


class Payload(msgspec.Struct, frozen=True):
    """Names tensors that only the shell holds."""


class ParametersOf(Payload, frozen=True):
    """The global parameters of one version."""

    version: int


class BlobOf(Payload, frozen=True):
    """The bytes of a content-addressed blob, as one tensor "blob"."""

    digest: str


class TokensOf(Payload, frozen=True):
    """A run of tokens of the training or held-out file, as one tensor "tokens"."""

    held_out: bool
    offset: int
    count: int


class EndParametersOf(Payload, frozen=True):
    """The worker's parameters after the last inner step of a task."""

    task: int


class OuterStateOf(Payload, frozen=True):
    """The outer state of one version: the one that the sender holds."""

    version: int


# --- instructions of the controller -----------------------------------------------------------------------------


class Append(Instruction, frozen=True):
    """Append a record to the journal, before any later instruction is carried out."""

    record: AnyRecord


class Compile(Instruction, frozen=True):
    """Compile and verify the training step for a target; answer with `Compiled` or `CompileFailed`."""

    backend: str
    target: str
    features: str


class TakeOuterStep(Instruction, frozen=True):
    """Average these end parameters by tokens, take the outer step; answer with `OuterStepDone` or `OuterStepFailed`."""

    round: int
    contributions: tuple[tuple[int, int, int], ...]  # (task, tokens, attachment), in task order


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


class Dial(Instruction, frozen=True):
    """Open a connection to the gateway; answer with `Opened` or `Closed`, both for this session number."""

    session: int


class Exit(Instruction, frozen=True):
    """End this process."""

    ok: bool
    reason: str
    error: type[PlanetaryError] | None = None  # what it ends with, when that is not ok
    status: int = 0  # of a supervisor's last worker process


# --- events for the supervisor ----------------------------------------------------------------------------------


class ProcessStarted(Event, frozen=True):
    """The worker process runs."""

    pid: int


class ProcessExited(Event, frozen=True):
    """The worker process ended; `code` is its exit status, negative for a signal."""

    pid: int
    code: int
    reason: str


# --- instructions of and events for the worker ------------------------------------------------------------------


class LoadJob(Instruction, frozen=True):
    """Load the job's artifact and buffers from the cache; answer with `JobLoaded`, `BlobMissing` or `JobBroke`."""

    job: Job


class JobLoaded(Event, frozen=True):
    """The compiled module is on the device."""

    artifact: str
    opt_state_round: int


class BlobMissing(Event, frozen=True):
    """A blob of the job is not in the worker's cache."""

    digest: str


class JobBroke(Event, frozen=True):
    """The job cannot be run on this machine."""

    reason: str
    error: type[PlanetaryError]


class UseParameters(Instruction, frozen=True):
    """The parameters of `version` are those of the next tasks.

    Star: the tensors that came with `Parameters(version)`; older ones may be forgotten. Ring: those of an outer state
    that the worker has.
    """

    version: int


class UseOuterState(Instruction, frozen=True):
    """Ring: the outer state `version`, which arrived or was just made, is the worker's newest.

    Of the others the parameters of `versions` are still needed. Results of rounds up to `version` are forgotten.
    """

    version: int
    versions: tuple[int, ...]  # `version`, and older ones


class HoldEndParameters(Instruction, frozen=True):
    """Ring: keep the parameters after a task until they are reduced."""

    task: int
    round: int
    tokens: int


class StartReduce(Instruction, frozen=True):
    """Ring: reduce with the others and take the outer step; answer with `ReduceSucceeded` or `ReduceBroke`."""

    message: Reduce


class LeaveRing(Instruction, frozen=True):
    """Ring: break off what is under way with the other workers, and forget what is held."""


class ReduceSucceeded(Event, frozen=True):
    """Ring: the outer state after the round exists."""

    round: int
    attempt: int
    digest: str
    sent_bytes: int
    received_bytes: int


class ReduceBroke(Event, frozen=True):
    """Ring: the reduction failed; everything is as before it."""

    round: int
    attempt: int
    kind: Literal["peer", "numerics"]
    reason: str


class StartTraining(Instruction, frozen=True):
    """Train; answer with `StepDone` per inner step, then `TrainingDone`, `TaskBroke` or `TaskStopped`."""

    task: TrainTask


class StartEvaluating(Instruction, frozen=True):
    """Evaluate; answer with `EvaluationDone`, `TaskBroke` or `TaskStopped`."""

    task: EvalTask


class StopTask(Instruction, frozen=True):
    """Stop the task under way after the current inner step. The shell answers as for any task, or `TaskStopped`."""

    task: int


class StepDone(Event, frozen=True):
    """An inner step finished; step 0 means that the first one is about to start."""

    task: int
    step: int
    loss: float | None


class TrainingDone(Event, frozen=True):
    """All inner steps of a task are done."""

    task: int
    round: int
    steps: int
    tokens: int
    loss: float
    grad_norm: float
    seconds: float


class EvaluationDone(Event, frozen=True):
    """All batches of an eval task are done."""

    task: int
    version: int
    loss: float
    batches: int


class TaskBroke(Event, frozen=True):
    """A task could not be finished."""

    task: int
    kind: Literal["numerics", "data", "resource", "internal"]
    reason: str
    step: int = 0


class TaskStopped(Event, frozen=True):
    """A task ended because of `StopTask`."""

    task: int
