"""The part of a training controller every kind of run shares: connections, membership, stalls, and the end.

A kind of run derives from `RunController` and adds tasks. The base owns the order: an event is dispatched, then
everything that has become possible is done, and nothing happens after the end of the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from planetary.fleet.controller.desk import AnyDesk, SessionT, Standing, task_of
from planetary.fleet.controller.membership import Membership
from planetary.fleet.controller.reported_values import impossible_value
from planetary.fleet.controller.stalls import Stalls, Wait
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import EndKind, RunFinished, TaskAborted
from planetary.fleet.protocol.status import Departure
from planetary.machine.machine import check_invariants
from planetary.machine.state_table import Table, advance

DeskT = TypeVar("DeskT", bound=AnyDesk)


class RunPhase(StrEnum):
    """Whether a run goes on. The progress within it is durable, in the journal's state."""

    RUNNING = "running"
    STOPPING = "stopping"  # a person asked for the end; work under way is finished first
    ENDED = "ended"


RUN: Table = {
    (RunPhase.RUNNING, "stop"): RunPhase.STOPPING,
    (RunPhase.RUNNING, "end"): RunPhase.ENDED,
    (RunPhase.STOPPING, "end"): RunPhase.ENDED,
}


class RunController(ABC, Generic[DeskT, SessionT]):
    """A machine (`machine.machine.Machine`): feed it events with `handle`; it never blocks and never reads a clock.

    Attributes:
        desk: state, connections and the instructions of the current event.
        membership: admits, equips, loses and bans workers.
        stalls: why the run cannot go on, and the report of it.
        phase: see `RUN`.
    """

    def __init__(self, desk: DeskT, grace_s: float, now: float) -> None:
        """Start at monotonic time `now` with no worker connected; a stall is reported after `grace_s` seconds."""
        self.desk = desk
        self.membership = Membership(desk, now)
        self.stalls = Stalls(desk, grace_s, now)
        self._stops_for_good = False
        self.phase = RunPhase.RUNNING if desk.state.ended is None else RunPhase.ENDED

    # --- the machine's interface ------------------------------------------------------------------------------

    def handle(self, event: e.Event, now: float) -> Sequence[e.Instruction]:
        self.desk.out = []
        if not self._has_ended:
            self._dispatch(event, now)
        if not self._has_ended:
            self._follow_up(event, now)
        return self.desk.out

    def next_deadline(self) -> float | None:
        if self._has_ended:
            return None
        times = [self.stalls.next_deadline(), self.membership.desertion_deadline, *self._deadlines()]
        times += [wait.until for wait in self._waits()]
        return min((t for t in times if t is not None), default=None)

    def validate(self) -> None:
        check_invariants("the controller", self._invariants())

    # --- hooks of a kind of run -------------------------------------------------------------------------------

    @abstractmethod
    def _take_message(self, worker: SessionT, event: e.Received, now: float) -> None:
        """Take a worker's message that membership does not know."""

    @abstractmethod
    def _take_failure(self, worker: SessionT, failure: m.TaskFailed, now: float) -> None:
        """Take a task a worker could not finish."""

    @abstractmethod
    def _go_on(self, now: float) -> None:
        """Do everything that has become possible."""

    @abstractmethod
    def _why_nothing_goes_on(self) -> str:
        """Return the worker or resource without which the run cannot go on; "" while it can."""

    @abstractmethod
    def _is_done(self) -> tuple[EndKind, str] | None:
        """Return how a run ends that has nothing left to do; None while it has."""

    @abstractmethod
    def _deadlines(self) -> Iterable[float | None]:
        """Return the monotonic times at which the kind's own waits end."""

    def _beyond_task(self, worker: SessionT, message: m.Message) -> str:
        """Return which value of a worker's message cannot be true of its task, for people; "" where all can."""
        return ""

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation. A kind of run adds invariants."""
        state, workers = self.desk.state, list(self.desk.workers.values())
        end = "no end" if state.ended is None else state.ended.kind
        yield (state.ended is not None) == self._has_ended, f"{self.phase}, and its journal says {end}"
        if self._has_ended:
            return
        names = [worker.worker for worker in workers]
        yield len(set(names)) == len(names), f"a worker has two connections: {sorted(names)}"
        deserted = self.desk.policy.abandon_after_s > 0 and self.membership.desertion_deadline is None
        yield bool(workers) or not deserted, "no worker is connected, and nothing ends the wait for one"

    def _waits(self) -> Iterable[Wait]:
        """Return the waits for workers that have to show progress."""
        return ()

    def _take_event(self, event: e.Event, now: float) -> None:
        """Take an event that connections and membership do not know."""

    def _greeted(self, worker: SessionT, now: float) -> None:
        """Take note of a worker that was admitted."""

    def _lost(self, worker: SessionT, reason: str, now: float) -> None:
        """Give the tasks of a worker that is gone to others."""

    def _payload_sent(self, session: int, now: float) -> None:
        """Take note of a payload sent in turn that has left the gateway."""

    def _payload_arrives(self, session: int, message: m.Message, now: float) -> None:
        """Take note of a message whose tensors have begun to arrive."""

    def _arrived(self, session: int, message: int, now: float) -> None:
        """Take note of a complete message, by id."""

    def _gave_sign(self, worker: SessionT) -> None:
        """Take note of a report on a task that does not count any more."""

    def _could_not_send(self, worker: SessionT, reason: str, now: float) -> None:
        """The tensors of a message could not be read."""
        self._lose(worker, reason, "disconnected", now)

    def _is_idle(self, worker: SessionT) -> bool:
        """Whether a worker can go without anything being computed again, or as far as it ever can."""
        return True

    def _stop(self, reason: str) -> None:
        """End because a person or the operating system asks for it."""
        self._end("stopped", reason)

    def _is_hopeless(self) -> str:
        """Return why the workers that are left are of no use; "" while they may be."""
        return "no usable worker is left" if self.membership.hopeless else ""

    def _report_the_rest(self) -> None:
        """Write the metrics that nothing will complete any more, before the run ends."""

    # --- events -----------------------------------------------------------------------------------------------

    @property
    def _has_ended(self) -> bool:
        return self.phase is RunPhase.ENDED

    def _advance_phase(self, event: str) -> None:
        self.phase = RunPhase(advance(RUN, self.phase, event))

    def _dispatch(self, event: e.Event, now: float) -> None:
        match event:
            case e.Received():
                self._received(event, now)
            case e.Closed():
                self.desk.forget(event.session)
                if event.session in self.desk.workers:
                    silent = event.silent_s is not None and event.silent_s >= self.desk.policy.silent_after_s
                    kind = "silent" if silent else "disconnected"
                    self._lose(self.desk.workers[event.session], event.reason, kind, now, event.silent_s)
            case e.PayloadSent():
                if self.desk.payload_sent(event.session, event.message):
                    self._payload_sent(event.session, now)
            case e.PayloadArrives():
                if self._is_sound(event):
                    self._payload_arrives(event.session, event.message, now)
            case e.SendFailed() if event.session in self.desk.workers:
                self._could_not_send(self.desk.workers[event.session], event.reason, now)
            case e.Compiled():
                self.membership.compiled(event, now)
            case e.CompileFailed():
                self.membership.compile_failed(event)
                for worker in [w for w in self.desk.workers.values() if w.worker in self.membership.banned]:
                    self._lose(worker, event.reason, "refused", now)
            case e.StopRequested():
                self._stops_for_good = self._stops_for_good or event.for_good
                self._stop(event.reason)
            case e.LetGo():
                for worker in self._named(event.worker):
                    worker.leaving, worker.leaves_as = event.reason, event.kind
            case e.RestartRequested():
                for worker in self._named(event.worker):
                    self._restart(worker, event.reason, "restarted", now)
            case _:
                self._take_event(event, now)

    def _received(self, event: e.Received, now: float) -> None:
        session, message = event.session, event.message
        self._arrived(session, message.id, now)
        if session in self.desk.workers:
            self.desk.workers[session].heard_at = now
            self._from_worker(self.desk.workers[session], event, now)
            return
        if isinstance(message, m.Hello):
            for replaced in self.membership.hello(session, message, now):
                self._lose(
                    self.desk.workers[replaced], "replaced by a newer connection of the same worker", "replaced", now
                )
            if session in self.desk.workers:
                self.desk.workers[session].address, self.desk.workers[session].heard_at = event.host, now
                self._greeted(self.desk.workers[session], now)
        elif session in self.desk.supervisors:
            ended = self.membership.supervisor_says(self.desk.supervisors[session], message, now)
            if ended is not None and isinstance(message, m.WorkerExited):
                self._lose(self.desk.workers[ended], message.reason, "crashed", now)
        self._drop_attachment(event)

    def _from_worker(self, worker: SessionT, event: e.Received, now: float) -> None:
        """Take a worker's message.

        A report on a task not given to it, or with a value that cannot be true, reaches no code of a kind of run.
        """
        standing = self.desk.tasks.standing(worker.session, event.message)
        if standing is not Standing.OWN:
            self._drop_attachment(event)
            if standing is Standing.STALE:
                self._gave_sign(worker)
            else:
                what = f"{type(event.message).__name__} on task {task_of(event.message)}, which it was not given"
                self._violated(worker, what, now)
            return
        if false := impossible_value(event.message) or self._beyond_task(worker, event.message):
            self._drop_attachment(event)
            self._expel(worker, false, now)
            return
        match message := event.message:
            case m.FetchBlob():
                self.membership.fetch(worker, message)
            case m.DeviceRefused():
                self.membership.refuse_worker(worker, message.reason)
                self._lose(worker, message.reason, "refused", now)
            case m.TaskFailed():
                self._take_failure(worker, message, now)
            case m.Goodbye():
                self._lose(worker, message.reason, "ended", now)
            case _:
                self._take_message(worker, event, now)

    def _is_sound(self, event: e.PayloadArrives) -> bool:
        """Whether a message whose tensors begin to arrive may count, by its sender and values."""
        is_own = self.desk.tasks.standing(event.session, event.message) is Standing.OWN
        worker = self.desk.workers.get(event.session)
        return (
            is_own
            and not impossible_value(event.message)
            and not (worker is not None and self._beyond_task(worker, event.message))
        )

    def _drop_attachment(self, event: e.Received) -> None:
        """Let the gateway forget tensors without a use."""
        if event.attachment:
            self.desk.out.append(e.DropAttachment(event.attachment))

    # --- consequences -----------------------------------------------------------------------------------------

    def _follow_up(self, event: e.Event, now: float) -> None:
        self._go_on(now)
        if isinstance(event, e.Tick) and not self._has_ended and self._restart_stuck(now):
            self._go_on(now)  # others take over the tasks of the restarted workers
        if not self._has_ended and self._let_idle_go(now):
            self._go_on(now)
        if not self._has_ended:
            self.stalls.observe(self._why_nothing_goes_on(), now, self.membership.preparing_until)
            self._check_end(now)

    def _restart_stuck(self, now: float) -> bool:
        """Restart workers that have shown no progress in time; return whether there were any."""
        stuck = {wait.session: wait.why(now) for wait in self._waits() if now >= wait.until}
        for session, why in stuck.items():
            if session in self.desk.workers:  # restarting one may end the run, or cost others their tasks
                self._restart(self.desk.workers[session], why, "stuck", now)
        return bool(stuck)

    # --- workers ----------------------------------------------------------------------------------------------

    def _named(self, name: str) -> list[SessionT]:
        return [worker for worker in self.desk.workers.values() if worker.worker == name]

    def _let_idle_go(self, now: float) -> bool:
        """End the connections of workers that are to leave and have no task; return whether there were any."""
        idle = [worker for worker in self.desk.workers.values() if worker.leaving and self._is_idle(worker)]
        for worker in idle:
            self.membership.let_supervisor_go(worker)
            self._lose(worker, worker.leaving, worker.leaves_as, now)
        return bool(idle)

    def _lose(self, worker: SessionT, reason: str, kind: Departure, now: float, silent_s: float | None = None) -> None:
        self.membership.remove(worker, reason, kind, now, silent_s)
        self._lost(worker, reason, now)

    def _restart(self, worker: SessionT, reason: str, kind: Departure, now: float) -> None:
        """Replace a worker's process."""
        self.membership.restart(worker, reason, kind)
        self._lose(worker, reason, kind, now)

    def _strike(self, worker: SessionT, reason: str, kind: EndKind, now: float, *, lasting: bool = False) -> bool:
        """Count a failed task; return whether it was one too many, after which the worker is gone.

        `lasting`: whether the worker's machine is banned then, because no honest worker fails so.
        """
        why = self.membership.failed(worker, reason, kind, lasting=lasting)
        if why:
            self._lose(worker, why, "banned", now)
        return bool(why)

    def _violated(self, worker: SessionT, what: str, now: float) -> None:
        """Count a message no worker of ours sends; after the last one allowed the worker is gone."""
        if why := self.membership.violated(worker, what):
            self._lose(worker, why, "banned", now)

    def _expel(self, worker: SessionT, what: str, now: float) -> None:
        """Count a message with a false value, and lose the worker: nothing else that it reports counts."""
        why = self.membership.violated(worker, what)
        self._lose(worker, why or f"it sent {what}", "banned" if why else "disconnected", now)

    def _record_failure(self, worker: SessionT, failure: m.TaskFailed) -> EndKind:
        """Put a failed task into the journal; return how a run ends that fails for it."""
        self.desk.append(
            TaskAborted(task=failure.task, kind=failure.kind, step=failure.step, reason=failure.reason, **worker.named)
        )
        return "peer" if failure.kind in ("internal", "parameters") else failure.kind

    # --- the end ----------------------------------------------------------------------------------------------

    def _check_end(self, now: float) -> None:
        done, deserted = self._is_done(), self.membership.desertion_deadline
        if done is not None:
            self._end(*done)
        elif deserted is not None and now >= deserted:
            self._end("deserted", self.membership.desertion)
        elif hopeless := self._is_hopeless():
            kind, failure = self.membership.last_failure
            self._end(kind, f"{hopeless}; the last failure: {failure}")

    def _end(self, kind: EndKind, reason: str) -> None:
        """End the run, once: the first reason counts."""
        if self._has_ended:
            return
        self._advance_phase("end")
        ok = kind == "done"
        self.desk.append(RunFinished(ok=ok, reason=reason, kind=kind))
        goes_on = kind == "stopped" and not (self._stops_for_good or self.desk.policy.local)
        for session in [*self.desk.workers, *self.desk.supervisors]:
            if goes_on:  # the gateway's machine may only be starting again
                self.desk.out.append(e.Close(session, f"the gateway stops, and may be resumed: {reason}"))
            else:
                self.desk.send(session, m.Shutdown(reason=reason, kind=kind))
        self._report_the_rest()
        self.desk.out.append(e.Finish(ok, reason, kind))
