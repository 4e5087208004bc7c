"""The messages that gateway, supervisors and workers of every kind of run exchange, as frozen typed structs.

A message is JSON on the wire (`{"type": "Hello", ...}`). Tensors never travel inside one: they follow as raw frames.
`id` is stamped by the sending connection, counts up, and lets the receiver drop duplicates. `task` identifies one unit
of work for one worker. A kind of run has further messages in `messages.py` of its own folder.
"""

from __future__ import annotations

from typing import Literal

from planetary.fleet.protocol.status import Departure
from planetary.net.session import SESSION, Goodbye, Greeting, Heartbeat, Refused, Welcome
from planetary.wire.message import Message, Order
from planetary.wire.protocol import Protocol

# Modules that handle messages name them all by this one.
__all__ = [
    "FABRIC",
    "BlobData",
    "DeviceRefused",
    "FetchBlob",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "LinkProbe",
    "LinkProbeAnswer",
    "Message",
    "Order",
    "Refused",
    "RestartWorker",
    "RoleJob",
    "RoleMessage",
    "Shutdown",
    "TaskFailed",
    "Welcome",
    "WorkerExited",
    "WorkerJob",
    "WorkerStarted",
]


class Hello(Greeting, frozen=True, kw_only=True):
    """First message of every connection, client to gateway."""

    role: Literal["supervisor", "worker", "site"]
    worker: str  # the worker's stable name, e.g. "node-a/0"; survives restarts. Of a site, the name at the hub
    node: str
    pid: int  # process id of the sender
    backend: str = ""  # worker only: "cpu", "cuda", "hip", "vulkan", "metal"
    target: str = ""  # worker only: e.g. "host", "baseline", "sm_80"
    target_features: str = ""  # worker only: identifies binaries that run on it; part of the artifact cache key
    iree_version: str = ""  # worker only: version of the runtime
    trial: bool = False  # worker only: trial of a backend: times the step and takes no part
    chosen: str = ""  # worker only: reason of the machine's choice of this backend, in words; "": the operator chose
    roles: tuple[str, ...] = ()  # worker only: roles allowed by the operator; empty: all of the run
    codecs: tuple[str, ...] = ()  # worker only: codecs of updates that are installed
    runs_code: bool = False  # worker only: its operator allows code the gateway sends
    memory: int = 0  # worker only: free memory of the machine at the start of the process; 0: not known
    probe: bool = False  # worker only: measurement of the link by `LinkProbe`, without taking part
    run: str = ""  # worker only: the run of a gateway with several that it joins; "": the gateway chooses

    def sender(self) -> str:
        """Return the role and the name."""
        return f"{self.role} {self.worker!r}"


# --- supervisor and gateway ------------------------------------------------------------------------------------


class WorkerStarted(Message, frozen=True, kw_only=True):
    """The supervisor started the worker process."""

    pid: int
    attempt: int  # 1 for the first start


class WorkerExited(Message, frozen=True, kw_only=True):
    """The supervisor's worker process ended."""

    pid: int
    code: int  # exit status; negative: the signal that ended it
    restart_in_s: float | None  # None: it will not be restarted
    reason: str


class RestartWorker(Message, frozen=True, kw_only=True):
    """The gateway asks the supervisor to kill and restart the worker, e.g. because it is silent or stuck."""

    reason: str
    kind: Departure = ""  # "restarted": at the operator's request, which is no failed start


class Shutdown(Message, frozen=True, kw_only=True):
    """Finish and exit: the run is over, or, where `ok` is false, this worker is not wanted in it any more."""

    reason: str
    ok: bool = True  # exit with status 0
    kind: str = ""  # how the run ended, as in the journal's last record; where `ok` is false: the kind of failure


# --- worker and gateway ----------------------------------------------------------------------------------------


class WorkerJob(Message, frozen=True, kw_only=True):
    """Base of the message for a worker's role: sent once after `Welcome`. Every kind of run has one."""

    run: str
    artifact: str  # sha256 of the compiled module; fetch it with `FetchBlob` unless cached
    reference: str = ""  # sha256 of the reference results for the worker's device; compared before `Ready`

    @property
    def loads(self) -> tuple[str, ...]:
        """The parts the worker loads for it; a later job with the same parts loads nothing."""
        return (self.artifact,)


class FetchBlob(Message, frozen=True, kw_only=True):
    """The worker asks for a content-addressed blob."""

    digest: str


class BlobData(Message, frozen=True, kw_only=True):
    """The blob, as one u8 tensor named "blob"."""

    digest: str


class DeviceRefused(Message, frozen=True, kw_only=True):
    """The worker's device cannot run the artifact, or computes something else than the job's reference. It ends."""

    artifact: str
    reason: str  # differing tensor and its error; or the compiler's message


class TaskFailed(Message, frozen=True, kw_only=True):
    """The worker could not finish a task. It stays connected unless `Goodbye` follows."""

    task: int
    # parameters: the worker does not have those the task begins from
    kind: Literal["numerics", "data", "resource", "internal", "parameters"]
    reason: str
    step: int = 0  # 1-based inner step at which it happened; 0: before the first

    def sending_order(self) -> Order:
        """Put a role's failure ahead: the role has dropped its state and all waiting messages."""
        return Order.IN_TURN if self.task else Order.AHEAD


# --- measuring a link -------------------------------------------------------------------------------------------


class LinkProbe(Message, frozen=True, kw_only=True):
    """A machine measures the link to the gateway; any bytes may come along as the tensor "payload"."""

    answer_bytes: int = 0  # size of the answer's tensor "payload"
    dial: int = 0  # port of the sender's address the gateway tries to connect to; 0: none


class LinkProbeAnswer(Message, frozen=True, kw_only=True):
    """The gateway's answer to `LinkProbe`."""

    clock: float  # Unix time in seconds
    received_bytes: int  # size of the payload
    address: str  # address of the prober
    software: str  # version of planetary
    iree_version: str = ""  # compiler version; "": none is installed
    dial_error: str = ""  # why the sender's port could not be reached


# --- a worker's role in another kind of run --------------------------------------------------------------------


class RoleMessage(Message, frozen=True, kw_only=True):
    """Base of the messages a worker's role handles, and of those it sends.

    One may carry a tensor of bytes, "payload". The kind of run declares the messages.
    """


class RoleJob(WorkerJob, frozen=True, kw_only=True):
    """Base of the jobs of roles that decide by themselves."""

    plan: str  # how the role is played, in JSON the kind of run reads

    @property
    def loads(self) -> tuple[str, ...]:
        """The plan determines the role."""
        return self.artifact, self.plan


FABRIC = Protocol(
    32,
    *SESSION,
    Hello,
    WorkerStarted,
    WorkerExited,
    RestartWorker,
    Shutdown,
    FetchBlob,
    BlobData,
    DeviceRefused,
    TaskFailed,
    LinkProbe,
    LinkProbeAnswer,
)
"""The messages of every kind of run."""
