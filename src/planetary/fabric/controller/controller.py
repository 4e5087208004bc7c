"""The training controller (PCP's Shepherd) as a pure machine.

It decides; `fabric.gateway.gateway` carries out. Three parts share one `Desk`: `Membership` (the workers of the run),
`Training` (rounds and leases) and `Evaluation` (held-out loss). Durable state is
`fabric.protocol.state.ControllerState`, changed only through journal records; everything else lives as long as a
connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planetary.fabric.controller.desk import Desk
from planetary.fabric.controller.evaluation import Evaluation
from planetary.fabric.controller.membership import Membership
from planetary.fabric.controller.training import Training
from planetary.fabric.protocol.events import (
    CheckpointDone,
    CheckpointLost,
    Closed,
    Compiled,
    CompileFailed,
    DropAttachment,
    Event,
    Finish,
    ForgetRounds,
    Instruction,
    OuterStepDone,
    OuterStepFailed,
    PayloadArrives,
    PayloadSent,
    Received,
    SendFailed,
    StopRequested,
    Tick,
    WriteMetrics,
)
from planetary.fabric.protocol.policy import ControllerPolicy
from planetary.fabric.protocol.records import (
    CheckpointFailed,
    CheckpointWritten,
    EndKind,
    Mark,
    RolledBack,
    RunFinished,
    Stalled,
    TaskAborted,
)
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import ControllerState
from planetary.fabric.protocol.status import RoundMetrics
from planetary.wire import messages as m


class Controller:
    """The machine. Feed it events with `handle`; it never blocks and never reads a clock."""

    def __init__(
        self,
        policy: ControllerPolicy,
        state: ControllerState,
        now: float,
        unreported: Iterable[RoundMetrics] = (),
    ) -> None:
        """Go on from `state`, whose last record is `RunStarted` or `RunResumed`, at monotonic time `now`.

        `unreported` are the metrics of finished rounds whose lines were not written before a crash.
        """
        self.policy = policy
        self.state = state
        self.desk = Desk(policy, state)
        self.membership = Membership(self.desk, now)
        self.training = Training(self.desk, now)
        self.evaluation = Evaluation(self.desk)
        self.stall = ""  # why nothing goes on, "" while something does
        self._stalled_at = now
        self._stall_reported = False
        self._stop_reason = ""  # why the run ends as soon as the checkpoint under way is written
        self._unreported = {metrics.round: metrics for metrics in unreported}
        if state.round not in state.evals:
            self.evaluation.begin(state.round)

    # --- the machine's interface ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """See `core.machine.Machine.handle`."""
        self.desk.out = []
        if self.state.ended is None:
            self._dispatch(event, now)
            self._go_on(now)
        return self.desk.out

    def next_deadline(self) -> float | None:
        """See `core.machine.Machine.next_deadline`."""
        if self.state.ended is not None:
            return None
        times = [
            self.training.ask_again_at,
            self.training.checkpoint_again_at,
            self._desertion_deadline(),
            self._startup_deadline(),
            self._stalled_at + self.policy.round.grace_s if self.stall and not self._stall_reported else None,
            self.training.ring.next_deadline() if self.training.ring is not None else None,
            *(self.training.stuck_at(worker) for worker in self.desk.workers.values()),
        ]
        return min((t for t in times if t is not None), default=None)

    # --- events -----------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Received():
                self._received(event, now)
            case Closed():
                self.desk.supervisors.pop(event.session, None)
                self.desk.under_way.forget(event.session)
                if event.session in self.desk.workers:
                    self._lose(self.desk.workers[event.session], event.reason, now)
            case PayloadSent():
                self._payload_sent(event, now)
            case PayloadArrives() if event.session in self.desk.workers:
                self.desk.workers[event.session].arriving.add(event.message.id)
            case SendFailed():
                self._could_not_send(event, now)
            case Compiled():
                self.membership.compiled(event)
            case CompileFailed():
                self.membership.compile_failed(event)
                for worker in [w for w in self.desk.workers.values() if w.worker in self.membership.banned]:
                    self._lose(worker, event.reason, now)
            case OuterStepDone():
                self._outer_step_done(event.round, now)
            case OuterStepFailed():
                self._end("numerics", event.reason)
            case CheckpointDone():
                self.desk.append(CheckpointWritten(round=event.round, path=event.path, seconds=event.seconds))
                self._round_finished(self.training.checkpoint_done(now))
            case CheckpointLost():
                self.desk.append(CheckpointFailed(round=event.round, reason=event.reason))
                self._round_finished(self.training.checkpoint_lost(event.reason, now))
            case StopRequested():
                self._stop(event.reason)
            case Tick():
                self._restart_stuck_workers(now)

    def _payload_sent(self, event: PayloadSent, now: float) -> None:
        worker = self.desk.workers.get(event.session)
        if not self.desk.under_way.sent(event.session, event.message) or worker is None:
            return
        for task in (worker.train, worker.evaluate):
            if task is not None:
                task.sent(now)

    def _received(self, event: Received, now: float) -> None:
        session, message = event.session, event.message
        if isinstance(message, m.Hello):
            for replaced in self.membership.hello(session, message):
                self._lose(replaced, "replaced by a newer connection of the same worker", now)
        elif session in self.desk.supervisors:
            ended = self.membership.supervisor_says(self.desk.supervisors[session], message)
            if ended is not None and isinstance(message, m.WorkerExited):
                self._lose(ended, message.reason, now)
        elif session in self.desk.workers:
            worker = self.desk.workers[session]
            if message.id in worker.arriving:
                worker.arriving.discard(message.id)
                worker.arrived_at = now
            self._from_worker(worker, event, now)
        elif event.attachment:
            self.desk.out.append(DropAttachment(event.attachment))

    def _from_worker(self, worker: WorkerSession, event: Received, now: float) -> None:
        message = event.message
        match message:
            case m.FetchBlob():
                self.membership.fetch(worker, message)
            case m.Ready():
                self.membership.ready(worker, now, message.device, message.verified)
                if self.training.ring is not None:
                    self.training.ring.ready(worker, message)
            case m.DeviceRefused():
                self.membership.refuse_worker(worker, message.reason)
                self._lose(worker, message.reason, now)
            case m.ReduceDone() if self.training.ring is not None:
                self.training.ring.done(worker, message)
            case m.ReduceFailed() if self.training.ring is not None:
                self.training.ring.failed(worker, message, now)
            case m.OuterState() if self.training.ring is not None:
                if not self.training.ring.uploaded(worker, message, event):
                    self.training.withdraw_lost(now)
            case m.Progress():
                self.training.leases.progress(worker, message, now)
            case m.TrainResult():
                found = self.training.leases.result(worker, message, event, now)
                if found:
                    self._task_failed(worker, f"worker {worker.worker} sent an unusable result: {found}", "peer", now)
                elif found is not None:
                    self.membership.succeeded(worker)
            case m.EvalResult():
                self.evaluation.result(worker, message)
            case m.TaskFailed():
                self._worker_reports_failure(worker, message, now)
            case m.Goodbye():
                self._lose(worker, message.reason, now)

    def _worker_reports_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        train, flight = worker.train, worker.evaluate
        if train is not None and train.task == failure.task:
            worker.train, round_ = None, train.round
            self.training.leases.orphan(train, worker.worker, failure.reason, now)
        elif flight is not None and flight.task == failure.task:
            worker.evaluate, round_ = None, self.state.round
            self.evaluation.give_back(flight)
        else:
            return
        self.desk.append(
            TaskAborted(
                round=round_,
                task=failure.task,
                worker=worker.worker,
                pid=worker.pid,
                node=worker.node,
                kind=failure.kind,
                step=failure.step,
                reason=failure.reason,
            )
        )
        kind: EndKind = "peer" if failure.kind == "internal" else failure.kind
        self._task_failed(worker, f"worker {worker.worker} in round {round_}: {failure.reason}", kind, now)

    # --- what follows from them -------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Do everything that has become possible."""
        if self._stop_reason and not self.training.checkpoint_under_way and self.state.ended is None:
            self._end("stopped", self._stop_reason)
        if self.state.ended is not None:
            return
        while self._advance(now):
            pass
        if self._ring_failed():
            return
        self._evaluate(now)
        self._write_metrics()
        self.stall = self.training.stall
        if not self.stall and self.training.ring is not None:
            self.stall = self.training.ring.stall
        if not self.stall and not self.desk.ready_workers():
            self.stall = self.membership.whom_we_wait_for()
        self._report_stall(now)
        self._check_end(now)

    def _advance(self, now: float) -> bool:
        """Go on with the rounds; true when one came to an end, so that more may have become possible."""
        self._supply_ring(now)
        startup = self._startup_deadline()
        if self.training.may_open and self.desk.able_workers() and (startup is None or now >= startup):
            self.training.open(now)
        reduced = self.training.advance(now)
        if isinstance(reduced, Mark):
            reason = f"every worker that had trained for round {reduced.round + 1} was lost before the end of it"
            self._go_back(reduced, reason, now)
        elif reduced is not None:
            self._outer_step_done(reduced, now)
            self._evaluate(now)  # before the next round's tasks
        return reduced is not None

    def _outer_step_done(self, round_: int, now: float) -> None:
        self.evaluation.begin(round_)
        metrics = self.training.outer_step_done(round_, now, self.evaluation.versions)
        self._round_finished(metrics)

    def _evaluate(self, now: float) -> None:
        ring = self.training.ring
        if ring is not None:
            newest = max((w.version for w in self.desk.workers.values()), default=0)
            self.evaluation.overtaken(max(newest, self.state.version))
            if ring.busy and not self.policy.overlap:  # what a worker has changes under it
                return
        self.evaluation.hand_out(now)

    def _supply_ring(self, now: float) -> None:
        """Ring: give newcomers the parameters, or go back to those that the gateway has."""
        ring = self.training.ring
        back = ring.supply(now) if ring is not None else None
        if back is not None:
            newest = self.state.version
            reason = f"no worker has the parameters of round {newest} any more, the gateway has round {back.round}"
            self._go_back(back, reason, now)
            self._supply_ring(now)

    def _go_back(self, mark: Mark, reason: str, now: float) -> None:
        self.desk.append(RolledBack(mark=mark, reason=reason))
        self.desk.out.append(ForgetRounds(mark.round))
        self._unreported = {r: metrics for r, metrics in self._unreported.items() if r <= mark.round}
        self.training.rolled_back(mark, reason, now)
        self.evaluation.go_back(mark.round)

    def _ring_failed(self) -> bool:
        ring = self.training.ring
        if ring is None or ring.failure is None:
            return False
        self._end(*ring.failure)
        return True

    def _report_stall(self, now: float) -> None:
        """Put a stall into the journal once it has lasted for the grace time: short ones are every day's business."""
        if not self.stall:
            self._stalled_at, self._stall_reported = now, False
        elif not self._stall_reported and now >= self._stalled_at + self.policy.round.grace_s:
            self._stall_reported = True
            self.desk.append(Stalled(round=self.state.round + 1, why=self.stall))

    def _check_end(self, now: float) -> None:
        deserted = self._desertion_deadline()
        if not self.training.may_open and self.state.open is None and not self.evaluation.versions:
            if self.state.durable_round < self.state.round:
                self._end(
                    "resource",
                    f"all {self.policy.rounds} rounds are trained, but what the last one gave could not be kept; round "
                    f"{self.state.durable_round} is the newest that is: {self.training.unkept}",
                )
            else:
                self._end("done", f"all {self.policy.rounds} rounds are done")
        elif deserted is not None and now >= deserted:
            self._end("deserted", self.membership.desertion)
        elif self.membership.hopeless:
            kind, failure = self.membership.last_failure
            self._end(kind, f"no usable worker is left; the last failure: {failure}")

    def _stop(self, reason: str) -> None:
        """End once the checkpoint under way is in the journal (both name the same round); at once if asked again."""
        if self.training.checkpoint_under_way and not self._stop_reason:
            self._stop_reason = reason
        else:
            self._end("stopped", self._stop_reason or reason)

    def _end(self, kind: EndKind, reason: str) -> None:
        ok = kind == "done"
        self.desk.append(RunFinished(round=self.state.round, ok=ok, reason=reason, kind=kind))
        for session in [*self.desk.workers, *self.desk.supervisors]:
            self.desk.send(session, m.Shutdown(reason=reason))
        self._write_metrics(everything=True)
        self.desk.out.append(Finish(ok, reason, kind))

    def _could_not_send(self, event: SendFailed, now: float) -> None:
        """The gateway's own disk or data is at fault, but trying it again with every worker for ever helps nobody."""
        worker = self.desk.workers.get(event.session)
        if worker is None:
            return
        self._task_failed(worker, f"what {worker.worker} needs cannot be sent: {event.reason}", "data", now)
        if event.session in self.desk.workers:
            self._lose(worker, event.reason, now)

    def _lose(self, worker: WorkerSession, reason: str, now: float) -> None:
        self.membership.remove(worker, reason, now)
        if worker.train is not None:
            self.training.leases.orphan(worker.train, worker.worker, reason, now)
        if worker.evaluate is not None:
            self.evaluation.give_back(worker.evaluate)
        self.training.withdraw_lost(now)

    def _task_failed(self, worker: WorkerSession, reason: str, kind: EndKind, now: float) -> None:
        if self.membership.failed(worker, reason, kind):
            self._lose(worker, self.membership.banned[worker.worker], now)

    def _restart_stuck_workers(self, now: float) -> None:
        for worker in list(self.desk.workers.values()):
            stuck_at = self.training.stuck_at(worker)
            if stuck_at is not None and now >= stuck_at:
                reason = "it made no progress on its task in time"
                self.membership.restart(worker, reason)
                self._lose(worker, reason, now)

    def _round_finished(self, metrics: RoundMetrics | None) -> None:
        if metrics is not None:
            self._unreported[metrics.round] = metrics

    def _write_metrics(self, *, everything: bool = False) -> None:
        """Write the lines of finished rounds that are not evaluated any more."""
        for round_ in sorted(self._unreported):
            if everything or round_ not in self.evaluation.versions:
                complete = msgspec.structs.replace(self._unreported.pop(round_), eval_loss=self.state.evals.get(round_))
                self.desk.out.append(WriteMetrics(complete))

    def _desertion_deadline(self) -> float | None:
        since = self.membership.deserted_at
        if since is None or self.policy.abandon_after_s <= 0:
            return None
        return since + self.policy.abandon_after_s

    def _startup_deadline(self) -> float | None:
        """Until when the first round waits for more workers; None when it need not."""
        since = self.membership.first_ready_at
        if since is None or self.training.first_round_open or not self.training.may_open:
            return None
        expected = self.policy.workers - len(self.membership.banned)  # those do not come back
        if not 0 < len(self.desk.ready_workers()) < expected:
            return None
        return since + self.policy.startup_grace_s
