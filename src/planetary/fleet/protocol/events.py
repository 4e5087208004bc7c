"""Events and instructions of the fleet's machines: the kernel's, and those of controller and supervisor.

`fleet.worker.events` has those of the worker alone; a kind of run has further ones.
"""

from __future__ import annotations

from planetary.fleet.protocol.records import EndKind, MetricsLine
from planetary.fleet.protocol.status import Leave
from planetary.machine.events import (  # noqa: F401  # this module is all that the fleet's machines speak
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
from planetary.wire.message import Message

# --- events for the controller ----------------------------------------------------------------------------------


class Compiled(Event, frozen=True):
    """The training step is compiled for a target and verified; the blob can be served."""

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


class SendFailed(Event, frozen=True):
    """The tensors of a message could not be read, so the message was not sent and the connection is dropped."""

    session: int
    reason: str


class PayloadSent(Event, frozen=True):
    """A message with tensors has left this machine."""

    session: int
    message: Message


class PayloadArrives(Event, frozen=True):
    """A message with tensors has begun to arrive; `Received` follows, or the end of the connection."""

    session: int
    message: Message


# --- tensors that messages carry ---------------------------------------------------------------------------------


class BlobOf(Payload, frozen=True):
    """The bytes of a content-addressed blob, as one tensor "blob"."""

    digest: str


# --- requests of the operator, or of a site that several runs share ---------------------------------------------


class LetGo(Event, frozen=True):
    """Give a worker no more tasks, and end the connection after the current task."""

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


class DropAttachment(Instruction, frozen=True):
    """Forget the tensors that came with a message: they do not count."""

    attachment: int


class WriteMetrics(Instruction, frozen=True):
    """Append one line to `metrics.jsonl`."""

    metrics: MetricsLine


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
    """The worker process ended; `code` is the exit status, negative for a signal."""

    pid: int
    code: int
    reason: str
