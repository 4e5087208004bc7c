"""The worker's side of the protocol as a pure machine: connect, load the job, do tasks in order, report.

Tasks and parameters are handled strictly in the order in which they arrive, so "the parameters of a task" are always
the last ones before it. Losing the connection stops the task under way: the controller has given its lease away.

In the ring topology the worker holds its results until the controller says that they are reduced. What belongs to the
ring (outer states, reductions) has an order of its own beside the tasks: a task waits until the worker has the version
that it names, and for nothing else. With overlap the worker keeps one version more than the newest, so that a reduction
may begin and end while it trains from the older one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from planetary.core.errors import CompileError, PeerError, PlanetaryError, TrustError
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.backoff import pause_before
from planetary.fabric.protocol.events import (
    Closed,
    Dial,
    EndParametersOf,
    Event,
    Exit,
    Instruction,
    Opened,
    OuterStateOf,
    Payload,
    Received,
    Send,
    StopRequested,
    Tick,
)
from planetary.fabric.protocol.records import error_class
from planetary.fabric.worker.worker_events import (
    BlobMissing,
    DeviceIsWrong,
    EvaluationDone,
    HoldEndParameters,
    JobBroke,
    JobLoaded,
    LeaveRing,
    LoadJob,
    ReduceBroke,
    ReduceSucceeded,
    RoleConnected,
    RoleDisconnected,
    StartEvaluating,
    StartReduce,
    StartTraining,
    StepDone,
    StopTask,
    TaskBroke,
    TaskStopped,
    TrainingDone,
    UseOuterState,
    UseParameters,
)

_Task = m.TrainTask | m.EvalTask
_OfRing = m.OuterState | m.SendOuterState | m.Reduce


class WorkerMachine:
    """See the module. `start` first, then `handle`."""

    def __init__(
        self,
        name: str,
        *,
        redial_first_s: float,
        redial_limit_s: float,
        give_up_s: float,
        progress_every_s: float,
    ) -> None:
        """`give_up_s`: end when the gateway could not be reached for this long; 0: never."""
        self.name = name
        self._redial = (redial_first_s, redial_limit_s)
        self._give_up_s = give_up_s
        self._progress_every_s = progress_every_s
        self._session = 0
        self._connected = False
        self._disconnected_at: float | None = None
        self._attempt = 0
        self._dial_at: float | None = None
        self._job: m.Job | m.RoleJob | None = None
        self._loaded = ("", "")  # digest of the artifact on the device, and the plan of a role
        self._opt_state_round = 0
        self._device = self._verified = ""  # what was found on the device
        self._queue: deque[m.Parameters | _Task] = deque()
        self._of_ring: deque[_OfRing] = deque()
        self._reducing: m.Reduce | None = None
        self._outer_version, self._outer_digest = -1, ""  # ring: the outer state that this worker has
        self._versions: tuple[int, ...] = ()  # ring: whose parameters it has
        self._in_use = -1  # ring: the version that the last task started from
        self._running: m.TrainTask | m.EvalTask | None = None
        self._stopping = False  # the running task's answer is not wanted any more
        self._progress_at = 0.0
        self._ended = False
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """See `core.machine.Machine.handle`. The first event is a `Tick`."""
        self._out = []
        if not self._ended:
            self._dispatch(event, now)
        return self._out

    def next_deadline(self) -> float | None:
        """See `core.machine.Machine.next_deadline`."""
        return None if self._ended else self._dial_at

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                self._dial(now)
            case Opened() if event.session == self._session:
                self._connected, self._attempt, self._disconnected_at = True, 0, None
            case Closed() if event.session == self._session:
                self._closed(event, now)
            case Received() if event.session == self._session:
                self._received(event, now)
            case JobLoaded():
                self._loaded, self._opt_state_round = (event.artifact, event.plan), event.opt_state_round
                self._device, self._verified = event.device, event.verified
                self._report_ready()
            case BlobMissing():
                self._send(m.FetchBlob(digest=event.digest))
            case DeviceIsWrong():
                artifact = self._job.artifact if self._job is not None else ""
                self._send(m.DeviceRefused(artifact=artifact, reason=event.reason))
                self._exit(CompileError, event.reason)
            case JobBroke():
                self._send(m.Goodbye(reason=event.reason))
                self._exit(event.error, event.reason)
            case StepDone():
                self._step_done(event, now)
            case TrainingDone():
                self._training_done(event)
            case ReduceSucceeded() if self._is_reduced(event.attempt):
                self._use_outer_state(event.round, event.digest)
                self._reduced(
                    m.ReduceDone(
                        round=event.round,
                        attempt=event.attempt,
                        digest=event.digest,
                        sent_bytes=event.sent_bytes,
                        received_bytes=event.received_bytes,
                    )
                )
            case ReduceBroke() if self._is_reduced(event.attempt):
                self._reduced(
                    m.ReduceFailed(round=event.round, attempt=event.attempt, kind=event.kind, reason=event.reason)
                )
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
            case StopRequested():
                self._send(m.Goodbye(reason=event.reason))
                self._exit(None, event.reason)

    # --- the connection ---------------------------------------------------------------------------------------

    def _dial(self, now: float) -> None:
        if self._connected or (self._dial_at is not None and now < self._dial_at):
            return
        if self._dial_at is None and self._session > 0:
            return  # an attempt is under way
        if self._disconnected_at is None:
            self._disconnected_at = now
        self._dial_at = None
        self._attempt += 1
        self._session += 1
        self._out.append(Dial(self._session))

    def _closed(self, event: Closed, now: float) -> None:
        self._connected = False
        self._queue.clear()
        self._of_ring.clear()
        if self.in_ring:
            self._reducing = None
            self._out.append(LeaveRing())
        if isinstance(self._job, m.RoleJob):
            self._out.append(RoleDisconnected())
        if self._running is not None and not self._stopping:
            self._stopping = True
            self._out.append(StopTask(self._running.task))
        if event.refused:
            self._exit(error_class(event.kind) if event.kind else TrustError, event.reason)
            return
        if self._disconnected_at is None:
            self._disconnected_at = now
        elif self._give_up_s > 0 and now - self._disconnected_at >= self._give_up_s:
            self._exit(
                PeerError,
                f"the gateway could not be reached for {now - self._disconnected_at:.0f} s; "
                f"last attempt: {event.reason}",
            )
            return
        self._dial_at = now + pause_before(self._attempt + 1, *self._redial, self.name)

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        match message:
            case m.Job() | m.RoleJob():
                self._job = message
                if self._loaded == _to_load(message):
                    self._report_ready()
                else:
                    self._out.append(LoadJob(message))
            case m.BlobData():
                if event.defect:
                    self._send(m.Goodbye(reason=event.defect))
                    self._exit(TrustError, event.defect)
                elif self._job is not None:
                    self._out.append(LoadJob(self._job))
            case m.OuterState() if event.defect:
                self._send(m.Goodbye(reason=event.defect))
                self._exit(TrustError, event.defect)
            case m.Parameters() | m.TrainTask() | m.EvalTask():
                self._queue.append(message)
                self._next()
            case m.OuterState() | m.SendOuterState() | m.Reduce():
                self._of_ring.append(message)
                self._next()
            case m.CancelTask():
                self._queue = deque(q for q in self._queue if getattr(q, "task", None) != message.task)
                if self._running is not None and self._running.task == message.task and not self._stopping:
                    self._stopping = True
                    self._out.append(StopTask(message.task))
            case m.Shutdown():
                self._exit(None if message.ok else error_class(message.kind), message.reason)

    def _report_ready(self) -> None:
        if self._job is None or self._loaded != _to_load(self._job):
            return
        if isinstance(self._job, m.RoleJob):
            self._out.append(RoleConnected())
        else:
            self._send(
                m.Ready(
                    artifact=self._job.artifact,
                    opt_state_round=self._opt_state_round,
                    device=self._device,
                    verified=self._verified,
                    outer_version=self._outer_version,
                    outer_digest=self._outer_digest,
                )
            )

    # --- tasks ------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._of_ring and self._reducing is None:
            self._begin_of_ring(self._of_ring.popleft())
        while self._queue and self._running is None and self._may_begin(self._queue[0]):
            item = self._queue.popleft()
            if isinstance(item, m.Parameters):
                self._out.append(UseParameters(item.version))
                continue
            if self.in_ring and item.version != self._in_use:
                self._in_use = item.version
                self._out.append(UseParameters(item.version))
            self._running = item
            self._out.append(StartTraining(item) if isinstance(item, m.TrainTask) else StartEvaluating(item))

    def _begin_of_ring(self, item: _OfRing) -> None:
        match item:
            case m.OuterState():
                self._use_outer_state(item.version, item.digest)
            case m.SendOuterState():
                if item.version == self._outer_version:
                    message = m.OuterState(version=item.version, digest=self._outer_digest)
                    self._send(message, OuterStateOf(item.version))
            case m.Reduce():
                self._reducing = item
                self._out.append(StartReduce(item))

    def _may_begin(self, item: m.Parameters | _Task) -> bool:
        """Whether its parameters are here. In the star they came before it."""
        return not self.in_ring or isinstance(item, m.Parameters) or item.version in self._versions

    def _use_outer_state(self, version: int, digest: str) -> None:
        """The outer state `version` arrived or was made: it is the newest now."""
        wanted = {item.version for item in self._queue}
        if isinstance(self._job, m.Job) and self._job.ring is not None and self._job.ring.overlap:
            wanted.add(version - 1)  # a task may be on its way that was given before
        self._versions = (version, *sorted(v for v in self._versions if v < version and v in wanted))
        self._outer_version, self._outer_digest = version, digest
        self._in_use = -1
        self._out.append(UseOuterState(version, self._versions))

    def _training_done(self, event: TrainingDone) -> None:
        if self.in_ring and self._wanted(event.task):
            self._out.append(HoldEndParameters(event.task, event.round, event.tokens))
        self._answer(
            event.task,
            m.TrainResult(
                task=event.task,
                round=event.round,
                steps=event.steps,
                tokens=event.tokens,
                loss=event.loss,
                grad_norm=event.grad_norm,
                seconds=event.seconds,
                payload="held" if self.in_ring else "end_parameters",
            ),
            None if self.in_ring else EndParametersOf(event.task),
        )

    @property
    def in_ring(self) -> bool:
        """Whether the job's workers reduce among themselves."""
        return isinstance(self._job, m.Job) and self._job.ring is not None

    def _is_reduced(self, attempt: int) -> bool:
        return self._reducing is not None and self._reducing.attempt == attempt

    def _reduced(self, answer: m.Message) -> None:
        self._reducing = None
        self._send(answer)
        self._next()

    def _wanted(self, task: int) -> bool:
        return self._running is not None and self._running.task == task and not self._stopping

    def _step_done(self, event: StepDone, now: float) -> None:
        task = self._running
        if not isinstance(task, m.TrainTask) or task.task != event.task or self._stopping:
            return
        # Steps can be much shorter than anybody's interest in them.
        if event.step == 0 or now - self._progress_at >= self._progress_every_s:
            self._progress_at = now
            self._send(m.Progress(task=task.task, round=task.round, step=event.step, loss=event.loss))

    def _answer(self, task: int, answer: m.Message | None, payload: EndParametersOf | None = None) -> None:
        if self._running is None or self._running.task != task:
            return
        if answer is not None and not self._stopping:
            self._out.append(Send(self._session, answer, payload))
        self._running, self._stopping = None, False
        self._next()

    # --- small things -----------------------------------------------------------------------------------------

    def _send(self, message: m.Message, payload: Payload | None = None) -> None:
        if self._connected:
            self._out.append(Send(self._session, message, payload))

    def _exit(self, error: type[PlanetaryError] | None, reason: str) -> None:
        self._ended = True
        self._out.append(Exit(error is None, reason, error))


def _to_load(job: m.Job | m.RoleJob) -> tuple[str, str]:
    """Return what a job asks to be loaded.

    The schedule of a run of rounds is read from the newest job before every task, so a lengthened run loads nothing. A
    role is made for its plan.
    """
    return job.artifact, job.plan if isinstance(job, m.RoleJob) else ""
