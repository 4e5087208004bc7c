"""Rounds and leases: who trains what, and what becomes of it. When a round closes is `diloco.rounds`' decision."""

from __future__ import annotations

import math

from planetary.diloco.rounds import Action, RoundView, admits_latecomer, decide_round
from planetary.fabric.desk import Desk
from planetary.fabric.events import (
    DropAttachment,
    KeepParameters,
    Received,
    TakeOuterStep,
    TokensOf,
    WriteCheckpoint,
)
from planetary.fabric.records import (
    DeltaAccepted,
    DeltaRejected,
    DeltaWithdrawn,
    LeaseAssigned,
    LeaseReturned,
    LeaseStarted,
    RoundClosed,
    RoundStarted,
)
from planetary.fabric.ring import Outcome, Ring
from planetary.fabric.round_end import finished_record, metrics_of
from planetary.fabric.sessions import TrainInFlight, WorkerSession
from planetary.fabric.state import OpenRound
from planetary.fabric.status import RoundMetrics
from planetary.wire import messages as m


class Training:
    """The round under way."""

    def __init__(self, desk: Desk, now: float) -> None:
        """Start at monotonic time `now`, with no round open."""
        self._desk = desk
        self._began = self._orphaned_at = self._contributed_at = now
        self._lease_seconds: dict[str, float] = {}  # worker -> seconds of its last lease
        self._attachments: dict[int, int] = {}  # accepted task of the open round -> where its tensors are
        self._held_by: dict[int, int] = {}  # ring: accepted task of the open round -> session that has its tensors
        self.ring = None if desk.policy.ring is None else Ring(desk, desk.policy.ring)
        self._why = ""  # ring: why the round under way was closed
        self._outer_pending = False
        self._checkpoint_pending = False  # the round is not finished before
        self._checkpoint_failures = 0  # of the round under way
        self.checkpoint_again_at: float | None = None
        self.unkept = ""  # why the last round's parameters are not on the disk, "" when they are
        self.first_round_open = False  # whether this incarnation has opened a round
        self.ask_again_at: float | None = None
        self.stall = ""  # why the round cannot go on, "" while it can

    # --- a round's life ---------------------------------------------------------------------------------------

    @property
    def may_open(self) -> bool:
        """Whether the next round could begin, as far as the rounds before it are concerned."""
        state = self._desk.state
        return state.open is None and state.round < self._desk.policy.rounds

    @property
    def checkpoint_under_way(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._checkpoint_pending and self.checkpoint_again_at is None

    def open(self, now: float) -> None:
        """Begin the next round with every ready worker."""
        state = self._desk.state
        self.first_round_open = True
        ready = self._desk.able_workers()
        self._desk.append(RoundStarted(round=state.round + 1, version=state.version, workers=len(ready)))
        self._began = self._orphaned_at = self._contributed_at = now
        for worker in ready:
            self._assign(worker, state.ledger.peek(), now)

    def advance(self, now: float) -> int | None:
        """Hand out what can be handed out, and close the round when it is time.

        Ring: returns the round when its parameters have come to exist; `outer_step_done` is to follow.
        """
        self.ask_again_at, self.stall = None, ""
        opened = self._desk.state.open
        if self.checkpoint_again_at is not None:
            self.stall = f"the last checkpoint is tried again: {self.unkept}"
            if now >= self.checkpoint_again_at:
                self.checkpoint_again_at = None
                self._desk.out.append(WriteCheckpoint(self._desk.state.mark()))
        if opened is None or self._outer_pending or self._checkpoint_pending:
            return None
        if self.ring is not None and self.ring.busy and not self._reduced_or_given_up(self.ring, opened, now):
            return opened.round if self._outer_pending else None
        contributed = {c.worker for c in opened.contributions}
        for worker in self._desk.able_workers():
            if worker.train is not None or worker.worker in contributed:
                continue
            if opened.orphans:
                self._assign(worker, opened.orphans[0], now)
            elif admits_latecomer(self._view(opened), now):
                self._assign(worker, self._desk.state.ledger.peek(), now)
        verdict = decide_round(self._view(opened), self._desk.policy.round, now)
        if verdict.action is Action.REASSIGN:
            for worker in self._desk.able_workers():
                if worker.train is None and opened.orphans:
                    self._assign(worker, opened.orphans[0], now)
            verdict = decide_round(self._view(opened), self._desk.policy.round, now)
        if verdict.action is Action.CLOSE:
            self._close(opened, verdict.why, now)
            return None
        self.ask_again_at = verdict.ask_again_at
        if verdict.stalled:
            self.stall = f"round {opened.round}: {verdict.why}"
        return None

    def outer_step_done(self, round_: int, now: float, needed: tuple[int, ...]) -> RoundMetrics | None:
        """New parameters exist; `needed` are the older versions that are still evaluated.

        Returns the round's metrics when no checkpoint is due; otherwise `checkpoint_done` will.
        """
        self._outer_pending = False
        if self.ring is None:
            self._desk.out.append(KeepParameters((*needed, round_)))
        for worker in self._desk.ready_workers():  # they travel while the checkpoint is being written
            self._desk.send_parameters(worker, round_)
        if self._desk.policy.checkpoint_due(round_):
            self._checkpoint_pending = True
            self._desk.out.append(WriteCheckpoint(self._desk.state.mark()))
            return None
        return self._finish(durable=False, now=now)

    def checkpoint_done(self, now: float) -> RoundMetrics:
        """The checkpoint is written."""
        self._checkpoint_pending, self._checkpoint_failures, self.unkept = False, 0, ""
        return self._finish(durable=True, now=now)

    def checkpoint_lost(self, reason: str, now: float) -> RoundMetrics | None:
        """The checkpoint could not be written.

        The next round's will do as well; but the last one is what the run was for, so it is tried again for a while:
        then this returns None.
        """
        policy = self._desk.policy
        self.unkept = reason
        self._checkpoint_failures += 1
        if self._desk.open_round().round == policy.rounds and self._checkpoint_failures < policy.last_checkpoint_tries:
            self.checkpoint_again_at = now + policy.round.grace_s
            return None
        self._checkpoint_pending, self._checkpoint_failures = False, 0
        return self._finish(durable=False, now=now)

    # --- what workers say -------------------------------------------------------------------------------------

    def progress(self, worker: WorkerSession, message: m.Progress, now: float) -> None:
        """Take note of an inner step."""
        train = worker.train
        if train is None or train.task != message.task:
            return
        train.step, train.progress_at = message.step, now
        train.loss = message.loss
        if not train.started:
            train.started = True
            self._desk.append(
                LeaseStarted(
                    round=train.round,
                    lease=train.lease,
                    task=train.task,
                    worker=worker.worker,
                    pid=worker.pid,
                    node=worker.node,
                )
            )

    def result(self, worker: WorkerSession, result: m.TrainResult, event: Received, now: float) -> str | None:
        """Accept or reject a result. Returns None when it is stale, "" when it counts, else its defect."""
        train = worker.train
        if train is None or train.task != result.task:
            self._drop(event.attachment)  # cancelled, or answered before
            return None
        worker.train = None
        defect = event.defect or self._defect_of(result)
        if defect:
            self._drop(event.attachment)
            self._desk.append(
                DeltaRejected(
                    round=train.round,
                    lease=train.lease,
                    task=train.task,
                    worker=worker.worker,
                    pid=worker.pid,
                    node=worker.node,
                    reason=defect,
                )
            )
            self.orphan(train, worker.worker, defect, now)
            return defect
        if self.ring is None:
            self._attachments[train.task] = event.attachment
        else:
            self._held_by[train.task] = worker.session
        self._contributed_at = now
        self._lease_seconds[worker.worker] = now - train.assigned_at
        self._desk.append(
            DeltaAccepted(
                round=train.round,
                lease=train.lease,
                task=train.task,
                worker=worker.worker,
                pid=worker.pid,
                node=worker.node,
                tokens=result.tokens,
                loss=result.loss,
                seconds=result.seconds,
            )
        )
        return ""

    def orphan(self, train: TrainInFlight, worker: str, reason: str, now: float) -> None:
        """A lease lost its holder: offer it again in this round."""
        self._orphaned_at = now
        self._desk.append(
            LeaseReturned(
                round=train.round,
                lease=train.lease,
                task=train.task,
                worker=worker,
                to="round",
                reason=reason,
            )
        )

    def lost(self, now: float) -> None:
        """Ring: a worker is gone, and with it what it held; a reduction under way says itself what that means."""
        if self.ring is not None and not self.ring.busy:
            self._withdraw_lost(now)

    def rolled_back(self, now: float) -> None:
        """Ring: the run went back to an earlier round; nothing is under way."""
        assert self.ring is not None
        self._began = self._orphaned_at = self._contributed_at = now
        self._held_by.clear()
        self.ring.went_back()

    # --- time -------------------------------------------------------------------------------------------------

    def expected_lease_s(self) -> float | None:
        """The slowest live worker's seconds per lease; extrapolated from steps before one is finished."""
        workers = self._desk.workers.values()
        known = [self._lease_seconds[w.worker] for w in workers if w.worker in self._lease_seconds]
        if known:
            return max(known)
        estimates = [
            (w.train.progress_at - w.train.assigned_at) / w.train.step * self._desk.policy.inner_steps
            for w in workers
            if w.train is not None and w.train.step > 0
        ]
        return max(estimates, default=None)

    def stuck_at(self, worker: WorkerSession) -> float | None:
        """When a worker counts as stuck if it makes no progress until then; None while it has no task."""
        times = [worker.train.progress_at] if worker.train else []
        if worker.evaluate:
            times.append(worker.evaluate.assigned_at)
        if self.ring is not None:
            reducing = self.ring.stuck_at(worker.session)
            if reducing is not None:
                return reducing
        if not times:
            return None
        policy, expected = self._desk.policy, self.expected_lease_s()
        if expected is None:
            return max(times) + policy.first_step_s
        return max(times) + max(policy.stall_floor_s, policy.stall_steps * expected / policy.inner_steps)

    # --- inside -----------------------------------------------------------------------------------------------

    def _assign(self, worker: WorkerSession, lease: int, now: float) -> None:
        desk, opened = self._desk, self._desk.open_round()
        task = desk.state.next_task
        desk.append(
            LeaseAssigned(
                round=opened.round,
                lease=lease,
                task=task,
                worker=worker.worker,
                pid=worker.pid,
                node=worker.node,
            )
        )
        worker.train = TrainInFlight(task, opened.round, lease, assigned_at=now, progress_at=now)
        desk.send_parameters(worker, opened.version)
        piece = desk.policy.locate(lease)
        desk.send(
            worker.session,
            m.TrainTask(
                task=task,
                round=opened.round,
                version=opened.version,
                lease=lease,
                slice=piece,
                steps=desk.policy.inner_steps,
                first_step=(opened.round - 1) * desk.policy.inner_steps,
            ),
            TokensOf(False, piece.offset, piece.count) if desk.policy.gateway_delivers else None,
        )

    def _close(self, opened: OpenRound, why: str, now: float) -> None:
        for worker in self._desk.ready_workers():
            if worker.train is None:
                continue
            train, worker.train = worker.train, None
            self._desk.send(worker.session, m.CancelTask(task=train.task, reason=why))
            self._desk.append(
                LeaseReturned(
                    round=train.round,
                    lease=train.lease,
                    task=train.task,
                    worker=worker.worker,
                    to="pool",
                    reason=why,
                )
            )
        self._orphans_to_pool(opened, why)
        if self.ring is not None:
            self._why = why
            self.ring.begin(opened, now)
            return
        self._desk.append(RoundClosed(round=opened.round, contributions=len(opened.contributions), why=why))
        self._outer_pending = True
        parts = sorted((c.task, c.tokens) for c in opened.contributions)
        self._desk.out.append(
            TakeOuterStep(opened.round, tuple((task, tokens, self._attachments[task]) for task, tokens in parts))
        )
        self._attachments.clear()

    def _reduced_or_given_up(self, ring: Ring, opened: OpenRound, now: float) -> bool:
        """Ring: go on with the reduction; true when there is nothing to reduce any more and training goes on."""
        match ring.settle(now):
            case Outcome.WAIT:
                self.stall = ring.stall
            case Outcome.DONE:
                contributions = len(opened.contributions)
                self._desk.append(RoundClosed(round=opened.round, contributions=contributions, why=self._why))
                self._held_by.clear()
                self._outer_pending = True
            case Outcome.RETRY:
                self._withdraw_lost(now)
                if not opened.contributions:
                    ring.give_up()
                    return True
                self._orphans_to_pool(opened, "its worker was lost in the reduction")
                ring.begin(opened, now)
        return False

    def _withdraw_lost(self, now: float) -> None:
        """Ring: take back what was held by workers that are gone."""
        opened = self._desk.state.open
        if opened is None or opened.closed:
            return
        for contribution in list(opened.contributions):
            holder = self._desk.workers.get(self._held_by[contribution.task])
            if holder is None or holder.version != opened.version:
                self._orphaned_at = now
                del self._held_by[contribution.task]
                self._desk.append(
                    DeltaWithdrawn(
                        round=opened.round,
                        lease=contribution.lease,
                        task=contribution.task,
                        worker=contribution.worker,
                        reason="the worker that held it was lost",
                    )
                )

    def _orphans_to_pool(self, opened: OpenRound, why: str) -> None:
        for lease in list(opened.orphans):
            self._desk.append(LeaseReturned(round=opened.round, lease=lease, task=0, worker="", to="pool", reason=why))

    def _drop(self, attachment: int) -> None:
        if attachment:
            self._desk.out.append(DropAttachment(attachment))

    def _finish(self, *, durable: bool, now: float) -> RoundMetrics:
        finished = finished_record(
            self._desk.open_round(), self._desk.state.tokens_total, now - self._began, durable=durable
        )
        self._desk.append(finished)
        return metrics_of(finished, self._desk.policy.inner_steps)

    def _defect_of(self, result: m.TrainResult) -> str:
        policy = self._desk.policy
        if result.steps != policy.inner_steps:
            return f"it trained {result.steps} inner steps instead of {policy.inner_steps}"
        if result.tokens != policy.tokens_per_lease:
            return f"it counts {result.tokens} tokens instead of {policy.tokens_per_lease}"
        if (result.payload == "held") != (self.ring is not None):
            return "it gave its result to the other side of the topology: its planetary has another version"
        if not math.isfinite(result.loss):
            return f"its loss is {result.loss}"
        return ""

    def _view(self, opened: OpenRound) -> RoundView:
        return RoundView(
            started_at=self._began,
            contributions=len(opened.contributions),
            training=len(opened.holders),
            orphans=len(opened.orphans),
            orphaned_at=self._orphaned_at if opened.orphans else None,
            last_contribution_at=self._contributed_at if opened.contributions else None,
            ready_workers=len(self._desk.able_workers()),
            expected_lease_s=self.expected_lease_s(),
        )
