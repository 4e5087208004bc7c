"""The supervisor as a pure machine: it keeps one worker process alive and the gateway informed.

The connection to the gateway and the worker's life are independent: the connection stays up while the worker restarts,
and the worker runs on while the connection is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from planetary.core.errors import PlanetaryError, TrustError
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.events import KillProcess, ProcessExited, ProcessStarted, StartProcess
from planetary.fleet.protocol.records import error_class
from planetary.fleet.supervisor.node_news import SupervisorReport
from planetary.fleet.supervisor.restarts import Restarts
from planetary.machine.events import Closed, Dial, Event, Exit, Instruction, Opened, Received, Send, StopRequested, Tick
from planetary.machine.machine import check_invariants
from planetary.machine.redial import Redial
from planetary.machine.state_table import Table, advance


class SupervisorPhase(StrEnum):
    """The life of the worker process. The connection has separate states: `machine.redial.LinkState`."""

    WAITING = "waiting"  # pause before the next start
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"  # the process has been asked to end
    ENDED = "ended"


SUPERVISOR: Table = {
    (SupervisorPhase.WAITING, "start"): SupervisorPhase.STARTING,
    (SupervisorPhase.WAITING, "end"): SupervisorPhase.ENDED,
    (SupervisorPhase.STARTING, "started"): SupervisorPhase.RUNNING,
    (SupervisorPhase.STARTING, "exited"): SupervisorPhase.WAITING,
    (SupervisorPhase.STARTING, "end"): SupervisorPhase.ENDED,
    (SupervisorPhase.RUNNING, "exited"): SupervisorPhase.WAITING,
    (SupervisorPhase.RUNNING, "stop"): SupervisorPhase.STOPPING,
    (SupervisorPhase.RUNNING, "end"): SupervisorPhase.ENDED,  # it exited, and a restart cannot help
    (SupervisorPhase.STOPPING, "end"): SupervisorPhase.ENDED,
}


class SupervisorMachine:
    """The supervisor, as a pure machine. The first event is a `Tick`.

    Attributes:
        name: of the worker.
        phase: see `SUPERVISOR`.
    """

    def __init__(
        self,
        name: str,
        *,
        restarts: Restarts,
        redial_first_s: float,
        redial_limit_s: float,
    ) -> None:
        """`restarts` decides whether and when the worker's process is started again."""
        self.name = name
        self._restarts = restarts
        self._link = Redial(name, first_s=redial_first_s, limit_s=redial_limit_s)
        self._run, self._away = "", ""  # the gateway's; why there is no connection
        self._pid = 0
        self._starts = 0
        self._started_at = 0.0
        self._start_at: float | None = 0.0
        self._stop_reason = ""  # why the process was asked to end
        self._is_ordered = False  # the operator ordered a restart of the worker
        self._error: type[PlanetaryError] | None = None  # reason of the refusal
        self.phase = SupervisorPhase.WAITING
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        self._out = []
        if self.phase is not SupervisorPhase.ENDED:
            self._dispatch(event, now)
        return self._out

    def next_deadline(self) -> float | None:
        if self.phase in {SupervisorPhase.STOPPING, SupervisorPhase.ENDED}:
            return None
        return min((t for t in (self._link.next_deadline(), self._start_at) if t is not None), default=None)

    def validate(self) -> None:
        self._link.validate()
        check_invariants(f"supervisor {self.name}", self._invariants())

    def report(self, now: float) -> SupervisorReport:
        """Return the report for users."""
        retry_at = self._link.next_deadline()
        return SupervisorReport(
            link=self._link.state,
            run=self._run,
            error=self._away,
            retry_in_s=None if retry_at is None else max(0.0, retry_at - now),
            pid=self._pid,
            restarts=max(0, self._starts - 1),
            ended=self._stop_reason,
        )

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        phase = self.phase
        has_process = phase in {SupervisorPhase.RUNNING, SupervisorPhase.STOPPING}
        yield has_process == (self._pid != 0) or phase is SupervisorPhase.ENDED, f"{phase} with process {self._pid}"
        waits = phase is SupervisorPhase.WAITING
        yield waits == (self._start_at is not None), f"{phase}, the next start at {self._start_at}"

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                self._on_time(now)
            case Opened():
                if self._link.opened(event.session):
                    self._run, self._away = event.run, ""
                if self._link.connected and self._pid:
                    self._send(m.WorkerStarted(pid=self._pid, attempt=self._starts))
            case Closed():
                newest = self._link.closed(event.session, now)
                self._away = event.reason if newest else self._away
                if newest and event.refused:
                    self._error = error_class(event.kind) if event.kind else TrustError
                    self._stop(event.reason)
            case Received() if event.session == self._link.session:
                if isinstance(event.message, m.RestartWorker) and self._pid:
                    self._is_ordered = event.message.kind == "restarted"
                    self._out.append(KillProcess(event.message.reason, gracefully=False))
                elif isinstance(event.message, m.Shutdown):
                    self._error = None if event.message.ok else error_class(event.message.kind)
                    self._stop(event.message.reason)
            case ProcessStarted():
                self._advance("started")
                self._pid, self._started_at = event.pid, now
                self._send(m.WorkerStarted(pid=event.pid, attempt=self._starts))
            case ProcessExited():
                self._process_exited(event, now)
            case StopRequested():
                self._stop(event.reason)

    def _on_time(self, now: float) -> None:
        if self._start_at is not None and now >= self._start_at:
            self._advance("start")
            self._start_at = None
            self._starts += 1
            self._out.append(StartProcess(self._starts))
        session = self._link.dial(now) if self.phase is not SupervisorPhase.STOPPING else None
        if session is not None:
            self._out.append(Dial(session))

    def _process_exited(self, event: ProcessExited, now: float) -> None:
        self._pid = 0
        if self.phase is SupervisorPhase.STOPPING:
            self._exit(self._stop_reason)
            return
        pause = self._restarts.pause_after(event.code, now - self._started_at, is_ordered=self._is_ordered)
        self._is_ordered = False
        if pause is not None:
            self._advance("exited")
            self._start_at = now + pause
        self._send(m.WorkerExited(pid=event.pid, code=event.code, restart_in_s=pause, reason=event.reason))
        if pause is None:
            self._exit(event.reason, event.code)

    def _stop(self, reason: str) -> None:
        if self.phase is SupervisorPhase.STOPPING:
            return
        self._stop_reason = reason
        if self._pid:
            self._advance("stop")
            self._out.append(KillProcess(reason, gracefully=True))
        else:
            self._exit(reason)

    def _exit(self, reason: str, status: int = 0) -> None:
        self._advance("end")
        self._start_at = None
        self._send(m.Goodbye(reason=reason))
        self._out.append(Exit(self._error is None and status == 0, reason, self._error, status))

    def _advance(self, event: str) -> None:
        self.phase = SupervisorPhase(advance(SUPERVISOR, self.phase, event))

    def _send(self, message: m.Message) -> None:
        if self._link.connected:
            self._out.append(Send(self._link.session, message))
