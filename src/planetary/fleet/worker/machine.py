"""The worker's side of the protocol as a pure machine: connect, load the job, and let the role decide the rest.

Training is the role's part, whose machine comes with the loaded job; this module has the parts that all roles share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from planetary.core.errors import CompileError, PeerError, PlanetaryError, TrustError
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import error_class
from planetary.fleet.worker.events import BlobMissing, DeviceIsWrong, JobBroke, JobLoaded, LoadJob, RoleMachine
from planetary.machine.events import Closed, Dial, Event, Exit, Instruction, Opened, Received, Send, StopRequested, Tick
from planetary.machine.machine import check_invariants
from planetary.machine.redial import Redial
from planetary.machine.state_table import Table, advance


class WorkerPhase(StrEnum):
    """How far a worker has loaded a job. The connection has separate states: `machine.redial.LinkState`."""

    WITHOUT_JOB = "without a job"
    LOADING = "loading"  # blobs are fetched, the role is made
    IN_ROLE = "in its role"
    ENDED = "ended"


WORKER: Table = {
    (WorkerPhase.WITHOUT_JOB, "job"): WorkerPhase.LOADING,
    (WorkerPhase.WITHOUT_JOB, "end"): WorkerPhase.ENDED,
    (WorkerPhase.LOADING, "job"): WorkerPhase.LOADING,
    (WorkerPhase.LOADING, "loaded"): WorkerPhase.IN_ROLE,
    (WorkerPhase.LOADING, "end"): WorkerPhase.ENDED,
    (WorkerPhase.IN_ROLE, "job"): WorkerPhase.LOADING,  # of other blobs; one of the same begins the role again
    (WorkerPhase.IN_ROLE, "loaded"): WorkerPhase.IN_ROLE,  # loaded twice; the newest role counts
    (WorkerPhase.IN_ROLE, "end"): WorkerPhase.ENDED,
}


class WorkerMachine:
    """The worker's side of the protocol, as a pure machine. The first event is a `Tick`.

    Attributes:
        name: of the worker.
        phase: see `WORKER`.
    """

    def __init__(
        self,
        name: str,
        *,
        redial_first_s: float,
        redial_limit_s: float,
        give_up_s: float,
    ) -> None:
        """`give_up_s`: end when the gateway could not be reached for this long; 0: never."""
        self.name = name
        self._link = Redial(name, first_s=redial_first_s, limit_s=redial_limit_s)
        self._give_up_s = give_up_s
        self._job: m.WorkerJob | None = None
        self._role: RoleMachine | None = None
        self._loaded: tuple[str, ...] = ()  # `WorkerJob.loads` of the role
        self.phase = WorkerPhase.WITHOUT_JOB
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """The first event is a `Tick`."""
        self._out = []
        if self.phase is not WorkerPhase.ENDED:
            self._dispatch(event, now)
        return self._out

    def next_deadline(self) -> float | None:
        return None if self.phase is WorkerPhase.ENDED else self._link.next_deadline()

    def validate(self) -> None:
        if self.phase is WorkerPhase.ENDED:
            return
        self._link.validate()
        check_invariants(f"worker {self.name}", self._invariants())
        if self._role is not None:
            self._role.validate()

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        in_role, loads = self.phase is WorkerPhase.IN_ROLE, None if self._job is None else self._job.loads
        yield (self._job is None) == (self.phase is WorkerPhase.WITHOUT_JOB), f"{self.phase} with job {loads}"
        yield (self._role is not None) == in_role, f"{self.phase} with the role {self._role}"
        yield not in_role or self._loaded == loads, f"its role was loaded for {self._loaded}, and its job is {loads}"

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                session = self._link.dial(now)
                if session is not None:
                    self._out.append(Dial(session))
            case Opened():
                self._link.opened(event.session)
            case Closed():
                self._closed(event, now)
            case Received() if event.session == self._link.session:
                self._received(event, now)
            case Received():
                pass  # of an older connection
            case JobLoaded() if self._job is not None and event.job.loads == self._job.loads:
                self._role, self._loaded = event.machine, event.job.loads
                self._advance("loaded")
                self._begin_role()
            case JobLoaded():
                pass  # of the job before
            case BlobMissing():
                self._send(m.FetchBlob(digest=event.digest))
            case DeviceIsWrong():
                artifact = self._job.artifact if self._job is not None else ""
                self._send(m.DeviceRefused(artifact=artifact, reason=event.reason))
                self._exit(CompileError, event.reason)
            case JobBroke():
                self._leave(event.error, event.reason)
            case StopRequested():
                self._leave(None, event.reason)
            case _ if self._role is not None:
                self._out += self._role.handle(event, now)

    # --- the connection ---------------------------------------------------------------------------------------

    def _closed(self, event: Closed, now: float) -> None:
        away_s = self._link.away_s(now)
        if not self._link.closed(event.session, now):
            return  # of an older connection
        if self._role is not None:
            self._out += self._role.disconnected()
        if event.refused:
            self._exit(error_class(event.kind) if event.kind else TrustError, event.reason)
            return
        if 0 < self._give_up_s <= away_s:
            self._exit(PeerError, f"the gateway could not be reached for {away_s:.0f} s; last attempt: {event.reason}")

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        match message:
            case m.WorkerJob():
                self._job = message
                if self._loaded == message.loads:
                    self._begin_role()
                else:
                    self._role, self._loaded = None, ()
                    self._advance("job")
                    self._out.append(LoadJob(message))
            case m.Shutdown():
                self._exit(None if message.ok else error_class(message.kind), message.reason)
            case _ if event.defect:
                self._leave(TrustError, event.defect)
            case m.BlobData():
                if self._job is not None:
                    self._out.append(LoadJob(self._job))
            case _ if self._role is not None:
                self._out += self._role.handle(event, now)

    def _begin_role(self) -> None:
        job, role = self._job, self._role
        if self._link.connected and job is not None and role is not None:
            self._out += role.connected(self._link.session, job)

    def _advance(self, event: str) -> None:
        self.phase = WorkerPhase(advance(WORKER, self.phase, event))

    # --- small things -----------------------------------------------------------------------------------------

    def _send(self, message: m.Message) -> None:
        if self._link.connected:
            self._out.append(Send(self._link.session, message))

    def _leave(self, error: type[PlanetaryError] | None, reason: str) -> None:
        self._send(m.Goodbye(reason=reason))
        self._exit(error, reason)

    def _exit(self, error: type[PlanetaryError] | None, reason: str) -> None:
        self._advance("end")
        self._out.append(Exit(error is None, reason, error))
