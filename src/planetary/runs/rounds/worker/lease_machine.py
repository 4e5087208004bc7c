"""The pure machine of a worker that trains leases: tasks in order, results, progress.

Tasks and parameters are handled strictly in the order in which they arrive, so "the parameters of a task" are always
the last ones before it. Losing the connection stops the task under way: the controller has given the lease away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum

from msgspec.structs import replace

from planetary.fleet.protocol import messages as m
from planetary.machine.events import Event, Instruction, Payload, Received, Send
from planetary.machine.machine import check_invariants
from planetary.machine.state_table import Table, advance
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.events import EndParametersOf
from planetary.runs.rounds.worker.events import (
    CountTaskIn,
    EndPaused,
    EvaluationDone,
    FinishTraining,
    GiveAgain,
    MixIn,
    StartEvaluating,
    StartTraining,
    StepDone,
    StopTask,
    TakeAhead,
    TaskBroke,
    TaskStopped,
    TrainingDone,
    TrainingPaused,
    UseParameters,
)

Task = rm.TrainTask | rm.EvalTask
MOST_QUEUED = 8  # messages a gateway sends ahead; with more it has lost count of them


class TaskPhase(StrEnum):
    """Use of the device by a worker that trains leases."""

    IDLE = "idle"
    WORKING = "working"  # trains or evaluates
    PAUSED = "paused"  # the parameters to mix in are not here
    STOPPING = "stopping"  # the task's answer is not wanted any more


LEASE_TASKS: Table = {
    (TaskPhase.IDLE, "started"): TaskPhase.WORKING,
    (TaskPhase.WORKING, "ended"): TaskPhase.IDLE,
    (TaskPhase.WORKING, "paused"): TaskPhase.PAUSED,
    (TaskPhase.PAUSED, "mixed"): TaskPhase.WORKING,
    (TaskPhase.PAUSED, "stop"): TaskPhase.STOPPING,
    (TaskPhase.WORKING, "stop"): TaskPhase.STOPPING,
    (TaskPhase.STOPPING, "ended"): TaskPhase.IDLE,
}


class LeaseMachine:
    """In the star: parameters come with the tasks, and results go to the gateway. See `RoleMachine`.

    Attributes:
        phase: see `LEASE_TASKS`.
    """

    def __init__(self, ready: rm.Ready, *, progress_every_s: float) -> None:
        """`ready`: the worker's announcement of itself, sent when it begins."""
        self._ready = ready
        self._progress_every_s = progress_every_s
        self._session: int | None = None  # None: nothing can be sent
        self._job: rm.TrainingJob | None = None
        self._queue: deque[rm.Parameters | Task] = deque()
        self._running: Task | None = None
        self._trained_last = 0  # the task whose result was sent last on this connection; 0: none
        self._asked = 0  # the round it was asked for last
        self._in_use = -1  # the version the next task begins from by default
        self.phase = TaskPhase.IDLE
        self._progress_at = 0.0
        self._out: list[Instruction] = []

    def connected(self, session: int, job: m.WorkerJob) -> list[Instruction]:
        assert isinstance(job, rm.TrainingJob)
        self._out = []
        self._session, self._job = session, job
        self._send(self._greeting())
        return self._out

    def disconnected(self) -> list[Instruction]:
        self._out = []
        self._session, self._trained_last = None, 0
        self._queue.clear()
        if self._running is not None:
            self._stop_running(self._running)
        return self._out

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self._out = []
        match event:
            case Received():
                self._received(event.message)
            case StepDone():
                self._step_done(event, now)
            case TrainingPaused():
                self._paused(event)
            case TrainingDone():
                self._training_done(event)
            case EvaluationDone():
                done = rm.EvalResult(
                    task=event.task, version=event.version, loss=event.loss, batches=event.batches, sets=event.sets
                )
                self._answer(event.task, done)
            case TaskBroke():
                self._answer(
                    event.task,
                    m.TaskFailed(task=event.task, kind=event.kind, reason=event.reason, step=event.step),
                )
            case TaskStopped():
                self._answer(event.task, None)
            case _:
                self._other(event)
        return self._out

    def validate(self) -> None:
        check_invariants("the worker's role", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        phase, queued = self.phase, len(self._queue)
        running = None if self._running is None else self._running.task
        yield (running is None) == (phase is TaskPhase.IDLE), f"{phase} with task {running}"
        yield queued <= MOST_QUEUED, f"it keeps {queued} tasks, of at most {MOST_QUEUED}"
        twice = running is not None and any(getattr(item, "task", 0) == running for item in self._queue)
        yield not twice, f"task {running} runs, and is queued"
        if self._session is None:
            yield queued == 0, f"it keeps {queued} tasks of a connection that is over"
            over = phase in (TaskPhase.IDLE, TaskPhase.STOPPING)
            yield over, f"it runs task {running} for a connection that is over"
        if phase is TaskPhase.PAUSED and queued:
            yield False, f"task {running} waits for parameters behind {type(self._queue[0]).__name__}"

    # --- hooks of a topology ----------------------------------------------------------------------------------

    def _greeting(self) -> rm.Ready:
        return self._ready

    def _other(self, event: Event) -> None:
        """Take an event that is not about a task."""

    def _other_message(self, message: m.Message) -> None:
        """Take a message other than a task or a task's parameters."""

    def _may_begin(self, task: Task) -> bool:
        """Whether the parameters of a task are here. They came before it."""
        return True

    def _before(self, task: Task) -> None:
        """Ask for the parameters a task begins from, unless they are in use."""
        if isinstance(task, rm.TrainTask) and (task.ahead or task.after):
            self._in_use = -1
            self._out.append(UseParameters(task.version, task.ahead, task.ahead_tokens, task.after, task.missed))
        elif task.version != self._in_use:
            self._in_use = task.version
            self._out.append(UseParameters(task.version))

    def _trained(self, event: TrainingDone, result: rm.TrainResult) -> None:
        """Answer with the result of a task."""
        self._answer(event.task, result, EndParametersOf(event.task))

    # --- tasks ------------------------------------------------------------------------------------------------

    def _received(self, message: m.Message) -> None:
        match message:
            case rm.Parameters() | rm.TrainTask() | rm.EvalTask():
                if self._may_take_ahead(message):
                    self._out.append(TakeAhead(message.version))
                self._queue.append(message)
                self._next()
            case rm.CountIn():
                self._queue = deque(_counted_in(item, message) for item in self._queue)
                self._count_in(message)
            case rm.CancelTask():
                self._queue = deque(q for q in self._queue if getattr(q, "task", None) != message.task)
                if self._running is not None and self._running.task == message.task:
                    self._stop_running(self._running)
            case rm.FinishTask():
                if self._is_wanted(message.task):
                    self._out.append(FinishTraining(message.task))
            case _:
                self._other_message(message)

    def _may_take_ahead(self, message: rm.Parameters | Task) -> bool:
        """Whether a version can be read beside the lease that is trained: nothing begins from an older one after it.

        A fragment is the base of the delta under way, until that is trained.
        """
        job = self._job
        codes = job is not None and job.compression.down != "none" and job.fragments is None
        trains = isinstance(self._running, rm.TrainTask) and self.phase is TaskPhase.WORKING
        alone = all(isinstance(item, rm.Parameters) for item in self._queue)
        return isinstance(message, rm.Parameters) and codes and trains and alone

    def _next(self) -> None:
        if self.phase is TaskPhase.PAUSED:
            self._mix_in(self._running)
        while self._queue and self._running is None:
            item = self._queue[0]
            if isinstance(item, rm.Parameters):
                self._in_use = item.version
                self._out.append(UseParameters(item.version))
            elif self._may_begin(item):
                assert self._job is not None
                self._before(item)
                self._advance("started")
                self._running = item
                train = isinstance(item, rm.TrainTask)
                self._out.append(StartTraining(item, self._job.schedule) if train else StartEvaluating(item))
            else:
                return
            self._queue.popleft()

    def _paused(self, event: TrainingPaused) -> None:
        task = self._running
        if task is None or task.task != event.task:
            return
        assert isinstance(task, rm.TrainTask)
        if self.phase is TaskPhase.STOPPING:
            self._out.append(EndPaused(task))
            return
        self._advance("paused")
        self._next()

    def _mix_in(self, task: Task | None) -> None:
        """Go on with the paused task once the next message has the parameters it mixes in.

        With any other message the gateway goes on to something else: to it the task is over.
        """
        if not self._queue or task is None:
            return
        item = self._queue[0]
        if not isinstance(task, rm.TrainTask) or not isinstance(item, rm.Parameters) or item.version != task.mixes:
            self._stop_running(task)
        else:
            self._queue.popleft()
            self._in_use = -1
            self._advance("mixed")
            self._out.append(MixIn(task))

    def _stop_running(self, task: Task) -> None:
        if self.phase in (TaskPhase.WORKING, TaskPhase.PAUSED):
            paused = self.phase is TaskPhase.PAUSED
            self._advance("stop")
            self._out.append(StopTask(task.task))
            if paused and isinstance(task, rm.TrainTask):
                self._out.append(EndPaused(task))

    def _step_done(self, event: StepDone, now: float) -> None:
        task = self._running
        if not isinstance(task, rm.TrainTask) or task.task != event.task or self.phase is TaskPhase.STOPPING:
            return
        # Steps can be much shorter than anybody's interest in them.
        if event.step == 0 or now - self._progress_at >= self._progress_every_s:
            self._progress_at = now
            self._send(rm.Progress(task=task.task, round=task.round, step=event.step, loss=event.loss))

    def _count_in(self, message: rm.CountIn) -> None:
        task = self._running
        if isinstance(task, rm.TrainTask) and task.task == message.task:
            self._running = replace(task, round=message.round)
            self._out.append(CountTaskIn(message.task, message.round))
        elif message.task == self._trained_last:
            self._asked = message.round
            self._out.append(GiveAgain(message.task, message.round))

    def _training_done(self, event: TrainingDone) -> None:
        task = self._running
        if isinstance(task, rm.TrainTask) and task.task == event.task and task.round > event.round:
            self._out.append(GiveAgain(event.task, task.round))  # it ended before it was known where it counts
            return
        if task is None or task.task != event.task:
            if event.task == self._trained_last and event.round == self._asked:
                self._send(self._result_of(event), EndParametersOf(event.task))
            return
        self._trained_last = event.task
        self._trained(event, self._result_of(event))

    @staticmethod
    def _result_of(event: TrainingDone) -> rm.TrainResult:
        return rm.TrainResult(
            task=event.task,
            round=event.round,
            steps=event.steps,
            tokens=event.tokens,
            loss=event.loss,
            grad_norm=event.grad_norm,
            seconds=event.seconds,
            through=event.through,
            payload="delta" if event.digest else "end_parameters",
            digest=event.digest,
        )

    def _is_wanted(self, task: int) -> bool:
        return self._running is not None and self._running.task == task and self.phase is TaskPhase.WORKING

    def _answer(self, task: int, answer: m.Message | None, payload: EndParametersOf | None = None) -> None:
        if self._running is None or self._running.task != task:
            return
        if answer is not None and self.phase is TaskPhase.WORKING:
            self._send(answer, payload)
        self._advance("ended")
        self._running = None
        self._next()

    def _advance(self, event: str) -> None:
        self.phase = TaskPhase(advance(LEASE_TASKS, self.phase, event))

    def _send(self, message: m.Message, payload: Payload | None = None) -> None:
        if self._session is not None:
            self._out.append(Send(self._session, message, payload))


def _counted_in(item: rm.Parameters | Task, message: rm.CountIn) -> rm.Parameters | Task:
    if isinstance(item, rm.TrainTask) and item.task == message.task:
        return replace(item, round=message.round)
    return item
