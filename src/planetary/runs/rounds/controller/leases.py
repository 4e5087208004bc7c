"""Leases of workers: handed out, reported on, given back, and the results that count."""

from __future__ import annotations

from typing import Literal

from planetary.core.token_slice import joined
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol.events import DropAttachment
from planetary.machine.events import Received
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.guard import Guard
from planetary.runs.rounds.controller.pace import SHARES, LeaseTimes, WorkerPaces
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.events import TokensOf
from planetary.runs.rounds.records import (
    DeltaAccepted,
    DeltaRejected,
    DeltaWithdrawn,
    LeaseAssigned,
    LeaseCarried,
    LeaseReturned,
    LeaseStarted,
)
from planetary.runs.rounds.sessions import Trainer, TrainInFlight
from planetary.runs.rounds.state import OpenRound
from planetary.sync.fragments import FragmentSteps
from planetary.sync.rounds import RoundView, admits_latecomer, exponential_mean

EARLY_FROM = 0.5
"""Trained fraction of a lease at which the worker gets the next one early: a round trip before the end would do, and an
unbegun lease lost with the worker costs nothing."""
MOST_RESULTS = 2
"""Of a worker in a round, on average, where orphans are shared: the gateway keeps all until the round closes."""


class Leases:
    """The leases of the rounds under way. New ones are those of the open round.

    Attributes:
        pace: how fast the workers are.
    """

    def __init__(self, desk: RoundsDesk, topology: Topology, guard: Guard, now: float) -> None:
        """Start at monotonic time `now`, with no round open."""
        self._desk, self._topology, self._guard = desk, topology, guard
        self._began = self._orphaned_at = self._contributed_at = now  # times in the open round
        self._seconds: dict[str, float] = {}  # worker -> seconds of the last task
        self._shares = SHARES[desk.policy.leases](desk.policy.length.parts)
        self._finish_until: float | None = None  # end of the wait for results of fewer steps
        self._counted_at: list[float] = []  # when the contributions to the open round were accepted
        self._step_s: dict[str, float] = {}  # worker -> exponential mean of seconds per inner step
        self._quorum_s: float | None = None  # exponential means; see `RoundView`
        self._sync_s: float | None = None
        self._unanswered: dict[str, tuple[int, float]] = {}  # worker -> process, seconds of unanswered leases
        self.pace = WorkerPaces()

    def use_topology(self, topology: Topology) -> None:
        self._topology = topology

    # --- handing out ------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """A round was opened: every worker gets a share of leases, while the run has any left."""
        self._began = self._orphaned_at = self._contributed_at = now
        self._finish_until = None
        self._counted_at.clear()
        for worker in self._desk.all_workers():
            if worker.train is not None:
                self._carry(worker, worker.train, now)
        self._count_early(now)
        contributed = {c.worker for c in self._desk.open_round().contributions}
        workers = [w for w in self._able_workers() if w.train is None and w.worker not in contributed]
        shares = self._shares.of([worker.worker for worker in workers])
        for worker in workers:
            if leases := self._desk.free_leases(shares[worker.worker]):
                self._assign(worker, leases, now)

    def hand_out(self, opened: OpenRound, now: float) -> None:
        """Give leases without a holder to free workers, and leases of their own to those that have just come."""
        if self._finish_until is not None:
            return  # the round is about to close
        contributed = {c.worker for c in opened.contributions}
        workers = self._able_workers()
        for worker in workers:
            has_contributed = worker.worker in contributed
            if worker.train is not None:
                continue
            if opened.orphans:
                more = MOST_RESULTS * len(workers) - len(opened.contributions) - opened.tasks
                if not has_contributed or (self._shares.shares_orphans and more > 0):
                    self._assign_orphans(worker, opened, min(len(workers), max(1, more)), now)
            elif not has_contributed and self._desk.has_lease and admits_latecomer(self.view(opened), now):
                shares = self._shares.of([worker.worker for worker in workers])
                self._assign(worker, self._desk.free_leases(shares[worker.worker]), now)

    def give_early(self, opened: OpenRound, now: float) -> None:
        """Give workers their leases of the next round while this one stays open.

        Contributors begin at once; workers about to contribute do not wait for a lease then.
        """
        overlap, delay = self._topology.overlap, self._desk.policy.fragments.delay
        if not overlap.gives_early or delay == 0 or not self._desk.goes_on_after(opened.round):
            return
        contributed = {c.worker for c in opened.contributions}
        workers = self._able_workers()
        shares = self._shares.of([worker.worker for worker in workers])
        for worker in workers:
            has_ended = worker.train is None and worker.worker in contributed
            leases = self._desk.free_leases(shares[worker.worker])
            if leases and (has_ended or self._soon_ends(worker, opened)):
                self._assign(worker, leases, now, early=True)

    def _soon_ends(self, worker: Trainer, opened: OpenRound) -> bool:
        """Whether most of a worker's lease of the open round is trained, and the next lease's inputs exist."""
        train, newest = worker.train, self._desk.state.version
        if train is None or worker.next is not None or train.known_round != opened.round:
            return False
        has_all = worker.version == train.mixed == newest == opened.round - 1
        return has_all and train.step >= EARLY_FROM * train.steps

    def reassign(self, opened: OpenRound, now: float) -> None:
        """Give orphans to anybody who is free, or trains for the next round."""
        for worker in self._desk.ready_workers():
            self._take_early_back(worker, "the round before it needs its worker")
        workers = self._able_workers()
        for worker in workers:
            if worker.train is None and opened.orphans:
                self._assign_orphans(worker, opened, len(workers), now)

    def _assign_orphans(self, worker: Trainer, opened: OpenRound, takers: int, now: float) -> None:
        count = self._shares.of_orphans(worker.worker, len(opened.orphans), takers, self._others_end_in_s(opened))
        self._assign(worker, tuple(opened.orphans[:count]), now)

    def _others_end_in_s(self, opened: OpenRound) -> float:
        """Return the seconds until the round's tasks under way are trained, as far as steps were measured."""
        tasks = [(w.worker, w.train) for w in self._desk.ready_workers() if w.train is not None]
        ends = [self._step_s.get(w, 0.0) * (t.steps - t.step) for w, t in tasks if t.known_round == opened.round]
        return max(ends, default=0.0)

    def finish(self, opened: OpenRound, now: float) -> float | None:
        """The round is to close: ask for the steps that are trained, where fewer than all of a task count.

        Returns until when the answers are waited for; None when there are none to wait for.
        """
        asked = False
        for worker in self._desk.ready_workers():
            train = worker.train
            if train is None or train.known_round != opened.round or not self._shares.may_finish(train.step):
                continue
            asked = True
            if not train.ends_early:
                train.ends_early = True
                self._desk.send(worker.session, rm.FinishTask(task=train.task))
        if not asked:
            return None
        if self._finish_until is None:
            self._finish_until = now + self._desk.policy.round.grace_s
        return self._finish_until if now < self._finish_until else None

    def view(self, opened: OpenRound) -> RoundView:
        """Return the facts that decide whether the round closes."""
        return RoundView(
            started_at=self._began,
            contributions=len(opened.contributions),
            training=opened.tasks,
            orphans=-(-len(opened.orphans) // self._desk.policy.length.parts),
            orphaned_at=self._orphaned_at if opened.orphans else None,
            last_contribution_at=self._contributed_at if opened.contributions else None,
            ready_workers=len(self._able_workers()),
            expected_lease_s=self.expected_s(),
            quorum_at=self._quorum_at,
            step_s=min(
                (self._step_s[w.worker] for w in self._desk.ready_workers() if w.worker in self._step_s), default=None
            ),
            quorum_s=self._quorum_s or 0.0,
            sync_s=self._sync_s or 0.0,
        )

    @property
    def _quorum_at(self) -> float | None:
        quorum = self._desk.policy.round.quorum
        return self._counted_at[quorum - 1] if len(self._counted_at) >= quorum else None

    def synchronised(self, seconds: float) -> None:
        """Take note of the time from the close of a round to the version."""
        self._sync_s = exponential_mean(self._sync_s, seconds)

    def _carry(self, worker: Trainer, train: TrainInFlight, now: float) -> None:
        """Let a lease go on for the round that was opened, of which it may be already."""
        opened = self._desk.open_round()
        for lease in train.leases:
            self._desk.append(
                LeaseCarried(
                    round=train.round,
                    to=opened.round,
                    lease=lease,
                    task=train.task,
                    worker=worker.worker,
                    steps=train.step,
                )
            )
        if train.known_round != opened.round:
            self._desk.send(worker.session, rm.CountIn(task=train.task, round=opened.round))
        if train.early:
            train.due_from = now
        train.round, train.early = opened.round, False

    def _count_early(self, now: float) -> None:
        """Count results of the round that was opened, which were here before it."""
        for worker in self._desk.all_workers():
            train = worker.train
            if train is not None and train.ended is not None:
                assert isinstance(train.ended.message, rm.TrainResult)
                worker.train = None
                self._topology.accept(worker, train.task, train.ended.attachment)
                self._count(worker, train, train.ended.message, now)

    def release_leaving(self) -> None:
        """Take leases of the next round back from workers that leave after their present task."""
        for worker in self._desk.workers.values():
            if worker.leaving:
                self._take_early_back(worker, worker.leaving)

    def _take_early_back(self, worker: Trainer, reason: str) -> None:
        self._take_next_back(worker, reason)
        if worker.train is not None and worker.train.early:
            train, worker.train = worker.train, None
            self._take_back(worker, train, reason)

    def _take_next_back(self, worker: Trainer, reason: str, *, is_here: bool = True) -> None:
        if worker.next is not None:
            train, worker.next = worker.next, None
            self._take_back(worker, train, reason, is_here=is_here)

    @staticmethod
    def _end_task(worker: Trainer, now: float) -> None:
        """A worker's task is trained, and it goes on with the one behind it."""
        worker.train, worker.next = worker.next, None
        if worker.train is not None:
            worker.train.assigned_at = worker.train.progress_at = now

    def _able_workers(self) -> list[Trainer]:
        version = self._desk.state.version
        return [w for w in self._topology.able_workers() if not self._guard.spares(w.worker, version)]

    def _assign(self, worker: Trainer, leases: tuple[int, ...], now: float, *, early: bool = False) -> None:
        desk, opened = self._desk, self._desk.open_round()
        task, version = desk.state.next_task, desk.state.version
        start = self._topology.start(worker, early=early)
        desk.append(
            LeaseAssigned(
                round=opened.round,
                lease=leases[0],
                more=leases[1:],
                task=task,
                version=version,
                ahead=start.ahead,
                ahead_tokens=start.ahead_tokens,
                after=start.after,
                mixes=start.mixes,
                missed=start.missed,
                early=early,
                **worker.named,
            )
        )
        steps = desk.policy.steps_of(worker.worker, len(leases))
        train = TrainInFlight(
            task=task,
            round=opened.round,
            leases=leases,
            steps=steps,
            assigned_at=now,
            progress_at=now,
            version=version,
            mixes=start.mixes,
            after=start.after,
            missed=start.missed,
            early=early,
        )
        if worker.train is None:
            worker.train = train
        else:
            worker.next = train
        self._topology.send_parameters(worker, version)
        pieces = joined(desk.policy.locate(lease) for lease in leases)
        desk.send(
            worker.session,
            rm.TrainTask(
                task=task,
                round=train.known_round,
                version=version,
                lease=leases[0],
                slice=pieces[0],
                more=pieces[1:],
                steps=steps,
                first_step=desk.first_step(early=early),
                ahead=start.ahead,
                ahead_tokens=start.ahead_tokens,
                after=start.after,
                mixes=start.mixes,
                missed=start.missed,
            ),
            TokensOf(False, pieces) if desk.policy.gateway_delivers else None,
        )
        train.awaits = desk.under_way.count(worker.session)

    # --- workers' reports -------------------------------------------------------------------------------------

    def gave_sign(self, worker: Trainer) -> None:
        """Take note that a worker reported on a task, whether it still counts or not."""
        worker.unanswered = 0
        self._unanswered.pop(worker.worker, None)

    def unresponsive(self) -> list[Trainer]:
        """Return the workers that are to connect again, which empties their queues: no task of theirs is under way."""
        workers = self._desk.workers.values()
        silent = (w for w in workers if w.is_unresponsive and w.train is None and w.evaluate is None)
        return [w for w in silent if not self._topology.keeps(w)]

    def progress(self, worker: Trainer, message: rm.Progress, now: float) -> None:
        """Take note of an inner step."""
        train = worker.train
        if train is None or train.task != message.task:
            return
        train.step, train.progress_at = message.step, now
        train.loss = message.loss
        if not train.started:
            train.started = True
            self._desk.append(LeaseStarted(round=train.round, lease=train.leases[0], task=train.task, **worker.named))

    def result(self, worker: Trainer, result: rm.TrainResult, event: Received, now: float) -> str | None:
        """Accept or reject a result. Returns None when the result is stale, "" when it counts, else the defect."""
        known = self._topology.arrived(result.task, event)
        if known is not None:
            if known and any(t is not None and t.after == result.task for t in (worker.train, worker.next)):
                self._take_early_back(worker, f"it goes on from the result of task {result.task}: {known}")
            return known
        train = worker.train
        if train is None or train.task != result.task:
            self._drop(event.attachment)  # cancelled, or answered before
            return None
        if 0 < result.round < train.known_round and self._topology.overlap.carries:
            self._drop(event.attachment)  # the news of a later round was in flight: the result is given again
            return ""
        if train.ended is not None:
            self._drop(event.attachment)  # it was sent twice
            return None
        defect = event.defect or self._defect_of(result, train)
        if train.early and not defect:
            train.ended, train.step = event, train.steps
            return ""
        if defect:
            self._drop(event.attachment)
            self._desk.append(
                DeltaRejected(round=train.round, lease=train.leases[0], task=train.task, reason=defect, **worker.named)
            )
            self.orphan(worker, train, defect, now)
            return defect
        self._end_task(worker, now)
        self._topology.accept(worker, train.task, event.attachment)
        self._count(worker, train, result, now)
        return ""

    def begins_to_arrive(self, worker: Trainer, result: rm.TrainResult, now: float) -> None:
        """Accept a result whose tensors have begun to arrive, where a round does not wait for them.

        One with a defect is rejected when it is here completely.
        """
        train = worker.train
        if train is None or train.early or train.task != result.task or self._defect_of(result, train):
            return
        if self._topology.begins_to_arrive(worker, train, result.id):
            self._end_task(worker, now)
            self._count(worker, train, result, now)

    def _count(self, worker: Trainer, train: TrainInFlight, result: rm.TrainResult, now: float) -> None:
        times = self._times(worker, train, result, now)
        self.pace.contributed(train.round, times, now)
        self._shares.observe(times)
        trained = len(train.leases) * result.steps // train.steps if train.ends_early else len(train.leases)
        self._contributed_at = now
        self._counted_at.append(now)
        if len(self._counted_at) == self._desk.policy.round.quorum:
            self._quorum_s = exponential_mean(self._quorum_s, now - self._counted_at[0])
        step_s = times.seconds / max(1, times.trained)
        self._step_s[worker.worker] = exponential_mean(self._step_s.get(worker.worker), step_s)
        self._seconds[worker.worker] = max(now - train.since, times.seconds)
        worker.mixed, share = train.mixed, -1.0
        if self._topology.overlap.keeps_values:
            fragments = self._desk.policy.fragments
            worker.own = worker.own or FragmentSteps(fragments.count, fragments.delay)
            worker.own.begin(train.missed, goes_on=train.after > 0)
            worker.own.trained(result.steps, train.mixes)
            share = worker.own.share(train.round, self._desk.policy.length.inner_steps)
        self._desk.append(
            DeltaAccepted(
                round=train.round,
                lease=train.leases[0],
                more=train.leases[1:trained],
                untrained=train.leases[trained:],
                task=train.task,
                tokens=result.tokens,
                loss=result.loss,
                seconds=times.seconds,
                grad_norm=result.grad_norm,
                transfer_s=times.transfer_s,
                waited_s=times.waited_s,
                version_lag=times.version_lag,
                through=result.through,
                stale=self._topology.overlap.stale(train, self._desk.policy),
                share=share,
                **worker.named,
            )
        )

    # --- giving back ------------------------------------------------------------------------------------------

    def orphan(self, worker: Trainer, train: TrainInFlight, reason: str, now: float) -> None:
        """A worker's lease is not trained: offer it again in this round, unless it is of the next one.

        The lease behind it, which cannot begin, goes back to the pool.
        """
        worker.train = None
        self._take_next_back(worker, reason, is_here=worker.session in self._desk.workers)
        worker.failed_after = train.after  # the next one begins from shared values
        if not train.early:
            self._orphaned_at = now
        self._return(worker, train, reason, to="pool" if train.early else "round")

    def end(self, opened: OpenRound, why: str, now: float, *, carries: bool = False) -> None:
        """The round closes: untrained leases go back to the pool, or with `carries` those in workers' hands go on.

        Those of the next round go on while there is one.
        """
        self._judge_pace(opened, now)
        goes_on = self._desk.goes_on_after(opened.round)
        for worker in self._desk.workers.values():
            self._take_next_back(worker, why)
        for worker in () if carries else self._desk.all_workers():
            if worker.train is None or (worker.train.early and goes_on):
                continue
            self._note_unanswered(worker, worker.train, now)
            train, worker.train = worker.train, None
            self._take_back(worker, train, why)
        self.orphans_to_pool(opened, why)

    def _take_back(self, worker: Trainer, train: TrainInFlight, why: str, *, is_here: bool = True) -> None:
        """Cancel a worker's task; the leases go back to the pool."""
        if is_here:
            self._desk.send(worker.session, rm.CancelTask(task=train.task, reason=why))
        self._return(worker, train, why, to="pool")

    def _return(self, worker: Trainer, train: TrainInFlight, reason: str, *, to: Literal["round", "pool"]) -> None:
        self._discard(train)
        self._desk.append(
            LeaseReturned(
                round=train.round,
                lease=train.leases[0],
                more=train.leases[1:],
                task=train.task,
                worker=worker.worker,
                to=to,
                reason=reason,
                steps=train.step,
            )
        )

    def orphans_to_pool(self, ended: OpenRound, why: str) -> None:
        """Return the untrained leases of a round to the pool, for a later one."""
        parts = self._desk.policy.length.parts
        while ended.orphans:
            lease, *more = ended.orphans[:parts]
            self._desk.append(
                LeaseReturned(
                    round=ended.round, lease=lease, more=tuple(more), task=0, worker="", to="pool", reason=why
                )
            )

    def withdraw_lost(self, ended: OpenRound, now: float) -> None:
        """Take back the contributions whose results are gone."""
        lost = self._topology.lost(ended)
        for contribution in [c for c in ended.contributions if c.task in lost]:
            self._orphaned_at = now
            self._desk.append(
                DeltaWithdrawn(
                    round=ended.round,
                    lease=contribution.lease,
                    more=contribution.more,
                    task=contribution.task,
                    worker=contribution.worker,
                    reason=lost[contribution.task],
                )
            )

    def void(self, reason: str, now: float) -> None:
        """Cancel all leases under way: the run went back to an earlier round."""
        self._began = self._orphaned_at = self._contributed_at = now
        self._finish_until = None
        self.pace.went_back(self._desk.state.round)
        for worker in self._desk.workers.values():
            for train in (worker.train, worker.next):
                if train is not None:
                    self._discard(train)
                    self._desk.send(worker.session, rm.CancelTask(task=train.task, reason=reason))
            worker.train = worker.next = None

    # --- time -------------------------------------------------------------------------------------------------

    def expected_s(self) -> float | None:
        """The slowest live worker's seconds per task; extrapolated from steps before one is finished."""
        workers = self._desk.workers.values()
        known = [self._seconds[w.worker] for w in workers if w.worker in self._seconds]
        if known:
            return max(known)
        estimates = [
            (w.train.progress_at - w.train.since) / w.train.step * w.train.steps
            for w in workers
            if w.train is not None and w.train.step > 0 and not w.train.early
        ]
        return max(estimates, default=None)

    def wait(self, worker: Trainer) -> Wait | None:
        """Return until when a worker has to make progress with tasks.

        None while it has no task, and while it `awaits` the gateway. The time of earlier leases without a sign of this
        process counts, on whatever connection: where rounds are short none of them lasts long enough by itself.
        """
        tasks = [task for task in (worker.train, worker.evaluate) if task is not None]
        if not tasks or self.awaits(worker):
            return None
        times = [worker.arrived_at, *(task.complete_at for task in tasks)]
        times += [worker.train.progress_at] if worker.train else []
        times += [worker.evaluate.assigned_at] if worker.evaluate else []
        policy, expected = self._desk.policy, self.expected_s()
        if expected is None:
            most_s = policy.first_step_s
        else:
            # An evaluation reports its end alone; a batch of it takes no longer than a step.
            batches = 0 if worker.evaluate is None else policy.held_out[worker.evaluate.chunk].all_batches
            most_s = max(policy.stall_floor_s, (policy.stall_steps + batches) * expected / policy.inner_steps)
        since = max(times) - self._unanswered_s(worker)
        return Wait(worker.session, since, since + most_s, "made no progress on its task")

    def awaits(self, worker: Trainer) -> bool:
        """Whether a worker has to do nothing for tasks now.

        A payload is in flight, a version to mix in does not exist, or the result is here and its round is not open. A
        line may be slow, and a result waits behind earlier messages. A line on which no byte moves ends by itself.
        """
        train, tasks = worker.train, (worker.train, worker.evaluate)
        mixes = -1 if train is None else train.mixes
        return (
            bool(worker.arriving)
            or any(task.awaits for task in tasks if task is not None)
            or mixes > self._desk.state.version
            or (train is not None and train.ended is not None)
        )

    def waited_for(self) -> tuple[list[str], float]:
        """Return whom the open round waits for, at most half of those it needs, and since when."""
        opened = self._desk.state.open
        if opened is None or opened.closed or not 0 < opened.tasks <= len(opened.contributions):
            return [], 0.0
        late = {holding.worker for holding in opened.holders.values() if not holding.early}
        return sorted(late), self._contributed_at

    # --- inside -----------------------------------------------------------------------------------------------

    def _unanswered_s(self, worker: Trainer) -> float:
        pid, seconds = self._unanswered.get(worker.worker, (worker.pid, 0.0))
        return seconds if pid == worker.pid else 0.0

    def _note_unanswered(self, worker: Trainer, train: TrainInFlight, now: float) -> None:
        """A lease is about to be taken back: count it if the worker could train and did not report."""
        if train.started or self.awaits(worker) or not self._topology.reports_steps(worker):
            return
        worker.unanswered += 1
        seconds = self._unanswered_s(worker) + now - max(train.assigned_at, train.complete_at)
        self._unanswered[worker.worker] = worker.pid, seconds

    def _from_the_start(self, train: TrainInFlight) -> bool:
        """Whether a lease was handed out when the round began, not to a late worker or as an orphan."""
        return train.assigned_at <= self._began

    def _times(self, worker: Trainer, train: TrainInFlight, result: rm.TrainResult, now: float) -> LeaseTimes:
        """Return the times of a task that is trained. The worker's own count at most as the time since the start."""
        opened = self._desk.state.under_way(train.round)
        alone = opened.contributions and opened.tasks == 1 and not opened.orphans
        waits = alone and self._from_the_start(train)
        return LeaseTimes(
            worker=worker.worker,
            steps=train.steps,
            seconds=max(0.0, min(result.seconds, now - train.assigned_at)),
            transfer_s=max(0.0, train.complete_at - train.since) + worker.arrival_s,
            waited_s=now - self._contributed_at if waits else 0.0,
            version_lag=self._desk.state.version - train.version,
            trained=result.steps if train.ends_early else train.steps,
        )

    def _judge_pace(self, opened: OpenRound, now: float) -> None:
        policy = self._desk.policy
        times = [
            LeaseTimes(
                worker=c.worker,
                steps=policy.steps_of(c.worker, len(c.leases) + c.untrained),
                seconds=c.seconds,
                transfer_s=c.transfer_s,
                waited_s=c.waited_s,
                version_lag=c.version_lag,
                trained=policy.steps_of(c.worker, len(c.leases)),
            )
            for c in opened.contributions
        ]
        for worker in self._desk.ready_workers():
            train = worker.train
            if train is not None and train.known_round == opened.round and self._from_the_start(train):
                times.append(
                    LeaseTimes(
                        worker=worker.worker,
                        steps=train.steps,
                        seconds=now - train.assigned_at,
                        transfer_s=0.0,
                        trained=min(train.step, train.steps - 1),
                    )
                )
        for record in self.pace.close(opened.round, times, now - self._began, self._desk.state.slow):
            self._desk.append(record)

    def _discard(self, train: TrainInFlight) -> None:
        """Drop the result of a task that is taken back, if it is here."""
        if train.ended is not None:
            self._drop(train.ended.attachment)
            train.ended = None

    def _drop(self, attachment: int) -> None:
        if attachment:
            self._desk.out.append(DropAttachment(attachment))

    def _defect_of(self, result: rm.TrainResult, train: TrainInFlight) -> str:
        if result.round != train.known_round:
            return f"it was trained for round {train.known_round}, and says that it is of round {result.round}"
        if defect := self._desk.policy.defect_of(result, train.steps, ends_early=train.ends_early):
            return defect
        if result.payload != self._topology.result:
            return "it gave its result to the other side of the topology: its planetary has another version"
        return ""
