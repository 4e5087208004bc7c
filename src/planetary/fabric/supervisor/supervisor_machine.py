"""The supervisor as a pure machine: it keeps one worker process alive and the gateway informed.

Its connection to the gateway and its worker's life are independent: the connection stays up while the worker
restarts, and the worker runs on while the connection is made again.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.core.errors import PlanetaryError, TrustError
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.events import KillProcess, ProcessExited, ProcessStarted, StartProcess
from planetary.fabric.protocol.records import error_class
from planetary.fabric.supervisor.restarts import Restarts
from planetary.machine.events import Closed, Dial, Event, Exit, Instruction, Opened, Received, Send, StopRequested, Tick
from planetary.machine.redial import Redial


class SupervisorMachine:
    """See the module. The first event is a `Tick`."""

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
        self._pid = 0
        self._starts = 0
        self._started_at = 0.0
        self._start_at: float | None = 0.0
        self._stop_reason: str | None = None
        self._error: type[PlanetaryError] | None = None  # that it was refused with
        self._ended = False
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """See `machine.machine.Machine.handle`."""
        self._out = []
        if not self._ended:
            self._dispatch(event, now)
        return self._out

    def next_deadline(self) -> float | None:
        """See `machine.machine.Machine.next_deadline`."""
        if self._ended:
            return None
        dial_at = self._link.next_deadline() if self._stop_reason is None else None
        return min((t for t in (dial_at, self._start_at) if t is not None), default=None)

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                self._on_time(now)
            case Opened():
                if self._link.opened(event.session) and self._pid:
                    self._send(m.WorkerStarted(pid=self._pid, attempt=self._starts))
            case Closed():
                if self._link.closed(event.session, now) and event.refused:
                    self._error = error_class(event.kind) if event.kind else TrustError
                    self._stop(event.reason)
            case Received() if event.session == self._link.session:
                if isinstance(event.message, m.RestartWorker) and self._pid:
                    self._out.append(KillProcess(event.message.reason, gracefully=False))
                elif isinstance(event.message, m.Shutdown):
                    self._error = None if event.message.ok else error_class(event.message.kind)
                    self._stop(event.message.reason)
            case ProcessStarted():
                self._pid, self._started_at = event.pid, now
                self._send(m.WorkerStarted(pid=event.pid, attempt=self._starts))
            case ProcessExited():
                self._process_exited(event, now)
            case StopRequested():
                self._stop(event.reason)

    def _on_time(self, now: float) -> None:
        if self._start_at is not None and now >= self._start_at:
            self._start_at = None
            self._starts += 1
            self._out.append(StartProcess(self._starts))
        session = self._link.dial(now) if self._stop_reason is None else None
        if session is not None:
            self._out.append(Dial(session))

    def _process_exited(self, event: ProcessExited, now: float) -> None:
        self._pid = 0
        if self._stop_reason is not None:
            self._exit(self._stop_reason)
            return
        pause = self._restarts.pause_after(event.code, now - self._started_at)
        if pause is not None:
            self._start_at = now + pause
        self._send(m.WorkerExited(pid=event.pid, code=event.code, restart_in_s=pause, reason=event.reason))
        if pause is None:
            self._exit(event.reason, event.code)

    def _stop(self, reason: str) -> None:
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        self._start_at = None
        if self._pid:
            self._out.append(KillProcess(reason, gracefully=True))
        else:
            self._exit(reason)

    def _exit(self, reason: str, status: int = 0) -> None:
        self._ended = True
        self._send(m.Goodbye(reason=reason))
        self._out.append(Exit(self._error is None and status == 0, reason, self._error, status))

    def _send(self, message: m.Message) -> None:
        if self._link.connected:
            self._out.append(Send(self._link.session, message))
