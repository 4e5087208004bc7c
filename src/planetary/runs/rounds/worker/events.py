"""Events and instructions between a trainer's machine and its shell, beside those of every role."""

from __future__ import annotations

from typing import Literal

from planetary.core.schedules import Schedule
from planetary.machine.events import Event, Instruction
from planetary.runs.rounds.messages import EvalTask, Reduce, RingJob, TrainTask


class UseParameters(Instruction, frozen=True):
    """The parameters of `version` are those of the next tasks.

    Star: the tensors that came with `Parameters(version)`, now or before; older ones may be forgotten. Ring: those of
    an outer state the worker has. In both less the part of the tasks `ahead` in the round under reduction.
    """

    version: int
    ahead: tuple[int, ...] = ()
    ahead_tokens: int = 0  # tokens of all contributions to that round
    after: int = 0  # streaming: own task whose end parameters the next task begins with instead; 0: none
    missed: tuple[int, ...] = ()  # decoupled: versions whose fragments are mixed into these


class TakeAhead(Instruction, frozen=True):
    """The parameters of `version`, which came while a lease is trained, are read beside it; `UseParameters` follows."""

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


class FollowRing(Instruction, frozen=True):
    """Reduce under the master the newest job names, on the job's terms: a restarted gateway may have another port."""

    ring: RingJob


class LeaveRing(Instruction, frozen=True):
    """Ring: abort the reduction under way, and drop held contributions."""


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
    kind: Literal["peer", "numerics", "refused"]
    reason: str


class StartTraining(Instruction, frozen=True):
    """Train; answer with `StepDone` per inner step, then `TrainingDone`, `TaskBroke` or `TaskStopped`."""

    task: TrainTask
    schedule: Schedule  # schedule of the learning rate


class MixIn(Instruction, frozen=True):
    """Resume a paused task, once the task's version is mixed in; answer as to `StartTraining`."""

    task: TrainTask


class CountTaskIn(Instruction, frozen=True):
    """The result of the task under way counts in this round; a task that has ended is left as it is."""

    task: int
    round: int


class GiveAgain(Instruction, frozen=True):
    """Give the result of the last finished train task for another round; answer with `TrainingDone`."""

    task: int
    round: int


class EndPaused(Instruction, frozen=True):
    """End a task that has paused and is not wanted any more; answer with `TaskStopped`. `StopTask` came before."""

    task: TrainTask


class TrainingPaused(Event, frozen=True):
    """A task has taken the inner steps before the version it mixes in; it waits for `MixIn`."""

    task: int


class StartEvaluating(Instruction, frozen=True):
    """Evaluate; answer with `EvaluationDone`, `TaskBroke` or `TaskStopped`."""

    task: EvalTask


class StopTask(Instruction, frozen=True):
    """Stop the task under way after the current inner step. The shell answers as for any task, or `TaskStopped`."""

    task: int


class FinishTraining(Instruction, frozen=True):
    """End the train task under way after the current inner step; the result has the trained steps."""

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
    through: int = 0  # site only: tokens as of `TrainResult`
    digest: str = ""  # digest of the bytes in place of end parameters


class EvaluationDone(Event, frozen=True):
    """All batches of an eval task are done."""

    task: int
    version: int
    loss: float
    batches: int
    sets: tuple[float, ...]


class TaskBroke(Event, frozen=True):
    """A task could not be finished."""

    task: int
    kind: Literal["numerics", "data", "resource", "internal", "parameters"]
    reason: str
    step: int = 0


class TaskStopped(Event, frozen=True):
    """A task ended because of `StopTask`."""

    task: int
