"""What the fabric's machines are told and what they ask for; `worker_events` has what is the worker's alone.

Events go into a machine, instructions come out. A session is one connection; its number is never used again.
"""

from __future__ import annotations

import msgspec

from planetary.core.errors import PlanetaryError
from planetary.fabric.protocol.records import EndKind, Mark, Record
from planetary.fabric.protocol.status import RoundMetrics
from planetary.wire.message import Message


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
    payload: str = ""  # its name, of a message whose tensors are in the payload store by now
    payload_bytes: int = 0  # that came with it then


class Closed(Event, frozen=True):
    """A connection ended, or could not be made; `refused` when the other side said that trying again cannot help."""

    session: int
    reason: str
    refused: bool = False
    kind: str = ""  # of the failure for which a worker was refused


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
    reference: str = ""  # digest of what workers compare their own devices' results with; "": of nothing


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


class PayloadSent(Event, frozen=True):
    """A message with tensors has left this machine."""

    session: int
    message: Message


class PayloadArrives(Event, frozen=True):
    """A message with tensors has begun to arrive; `Received` follows, or the end of its connection."""

    session: int
    message: Message


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

    record: Record


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
