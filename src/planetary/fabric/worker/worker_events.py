"""What the worker machine is told and what it asks for, beside what every machine knows (`fabric.protocol.events`)."""

from __future__ import annotations

from typing import Literal

from planetary.core.errors import PlanetaryError
from planetary.fabric.protocol.events import Event, Instruction
from planetary.fabric.protocol.messages import EvalTask, Job, Reduce, RoleJob, TrainTask


class LoadJob(Instruction, frozen=True):
    """Load the job's artifact and buffers from the cache; answer with `JobLoaded`, `BlobMissing` or `JobBroke`."""

    job: Job | RoleJob


class RoleConnected(Instruction, frozen=True):
    """Tell the worker's role that the gateway can be spoken to."""


class RoleDisconnected(Instruction, frozen=True):
    """Tell the worker's role that the gateway is out of reach; it goes on with what it has."""


class JobLoaded(Event, frozen=True):
    """The compiled module is on the device."""

    artifact: str
    opt_state_round: int
    device: str = ""  # as its driver names it
    verified: str = ""  # what the comparison with the job's reference found on it, in words
    plan: str = ""  # of a role


class DeviceIsWrong(Event, frozen=True):
    """The device cannot run the artifact, or computes something else than the reference."""

    reason: str


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
