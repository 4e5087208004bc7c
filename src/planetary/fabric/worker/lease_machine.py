"""What a worker that trains leases decides, as a pure machine: tasks in order, results, progress.

Tasks and parameters are handled strictly in the order in which they arrive, so "the parameters of a task" are always
the last ones before it. Losing the connection stops the task under way: the controller has given its lease away.
"""

from __future__ import annotations

from collections import deque

from planetary.core.errors import LocalProtocolError
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.events import EndParametersOf
from planetary.fabric.worker.worker_events import (
    EvaluationDone,
    StartEvaluating,
    StartTraining,
    StepDone,
    StopTask,
    TaskBroke,
    TaskStopped,
    TrainingDone,
    UseParameters,
)
from planetary.machine.events import Event, Instruction, Payload, Received, Send

Task = m.TrainTask | m.EvalTask
MOST_QUEUED = 8  # messages that a gateway has sent ahead; with more it has forgotten what it had sent


class LeaseMachine:
    """In the star: parameters come with the tasks, and results go to the gateway. See `RoleMachine`."""

    def __init__(self, ready: m.Ready, *, progress_every_s: float) -> None:
        """`ready`: what the worker says of itself when it begins."""
        self._ready = ready
        self._progress_every_s = progress_every_s
        self._session: int | None = None  # None: nothing can be sent
        self._job: m.Job | None = None
        self._queue: deque[m.Parameters | Task] = deque()
        self._running: Task | None = None
        self._stopping = False  # the running task's answer is not wanted any more
        self._progress_at = 0.0
        self._out: list[Instruction] = []

    def connected(self, session: int, job: m.WorkerJob) -> list[Instruction]:
        """See `RoleMachine`."""
        assert isinstance(job, m.Job)
        self._out = []
        self._session, self._job = session, job
        self._send(self._greeting())
        return self._out

    def disconnected(self) -> list[Instruction]:
        """See `RoleMachine`."""
        self._out = []
        self._session = None
        self._queue.clear()
        if self._running is not None:
            self._stop_running(self._running)
        return self._out

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """See `RoleMachine`."""
        self._out = []
        match event:
            case Received():
                self._received(event.message)
            case StepDone():
                self._step_done(event, now)
            case TrainingDone():
                self._training_done(event)
            case EvaluationDone():
                self._answer(
                    event.task,
                    m.EvalResult(task=event.task, version=event.version, loss=event.loss, batches=event.batches),
                )
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
        """See `machine.machine.Validates`."""
        if wrong := self._contradiction():
            raise LocalProtocolError(f"a worker's tasks contradict each other: {wrong}")

    def _contradiction(self) -> str:
        running, queued = self._running, len(self._queue)
        if self._stopping and running is None:
            return "it stops a task and runs none"
        if self._session is None and queued:
            return f"it keeps {queued} tasks of a connection that is over"
        if self._session is None and running is not None and not self._stopping:
            return f"it runs task {running.task} for a connection that is over"
        if running is not None and any(getattr(item, "task", 0) == running.task for item in self._queue):
            return f"task {running.task} runs, and is queued"
        return f"it keeps {queued} tasks, of at most {MOST_QUEUED}" if queued > MOST_QUEUED else ""

    # --- what a topology adds ---------------------------------------------------------------------------------

    def _greeting(self) -> m.Ready:
        return self._ready

    def _other(self, event: Event) -> None:
        """Take an event that is not about a task."""

    def _other_message(self, message: m.Message) -> None:
        """Take a message that is neither a task nor its parameters."""

    def _may_begin(self, task: Task) -> bool:
        """Whether the parameters of a task are here. They came before it."""
        return True

    def _before(self, task: Task) -> None:
        """Ask for what has to happen before a task starts."""

    def _trained(self, event: TrainingDone, result: m.TrainResult) -> None:
        """Answer with the result of a task."""
        self._answer(event.task, result, EndParametersOf(event.task))

    # --- tasks ------------------------------------------------------------------------------------------------

    def _received(self, message: m.Message) -> None:
        match message:
            case m.Parameters() | m.TrainTask() | m.EvalTask():
                self._queue.append(message)
                self._next()
            case m.CancelTask():
                self._queue = deque(q for q in self._queue if getattr(q, "task", None) != message.task)
                if self._running is not None and self._running.task == message.task:
                    self._stop_running(self._running)
            case _:
                self._other_message(message)

    def _next(self) -> None:
        while self._queue and self._running is None:
            item = self._queue[0]
            if isinstance(item, m.Parameters):
                self._out.append(UseParameters(item.version))
            elif self._may_begin(item):
                assert self._job is not None
                self._before(item)
                self._running = item
                train = isinstance(item, m.TrainTask)
                self._out.append(StartTraining(item, self._job.schedule) if train else StartEvaluating(item))
            else:
                return
            self._queue.popleft()

    def _stop_running(self, task: Task) -> None:
        if not self._stopping:
            self._stopping = True
            self._out.append(StopTask(task.task))

    def _step_done(self, event: StepDone, now: float) -> None:
        task = self._running
        if not isinstance(task, m.TrainTask) or task.task != event.task or self._stopping:
            return
        # Steps can be much shorter than anybody's interest in them.
        if event.step == 0 or now - self._progress_at >= self._progress_every_s:
            self._progress_at = now
            self._send(m.Progress(task=task.task, round=task.round, step=event.step, loss=event.loss))

    def _training_done(self, event: TrainingDone) -> None:
        self._trained(
            event,
            m.TrainResult(
                task=event.task,
                round=event.round,
                steps=event.steps,
                tokens=event.tokens,
                loss=event.loss,
                grad_norm=event.grad_norm,
                seconds=event.seconds,
            ),
        )

    def _is_wanted(self, task: int) -> bool:
        return self._running is not None and self._running.task == task and not self._stopping

    def _answer(self, task: int, answer: m.Message | None, payload: EndParametersOf | None = None) -> None:
        if self._running is None or self._running.task != task:
            return
        if answer is not None and not self._stopping:
            self._send(answer, payload)
        self._running, self._stopping = None, False
        self._next()

    def _send(self, message: m.Message, payload: Payload | None = None) -> None:
        if self._session is not None:
            self._out.append(Send(self._session, message, payload))
