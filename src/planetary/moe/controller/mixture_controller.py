"""The controller of a mixture over composers, as a pure machine: membership of the fabric, and the syncer.

It decides; `moe.gateway.mixture_gateway` carries out. Durable state is `moe.controller.records.MixtureState`, changed
only through journal records. Composers never wait for it: they take steps, and it learns of them.

A round is a number of steps of the run, the mean over its shards. It is finished when every shard's state after them is
in the payload store.
"""

from __future__ import annotations

from collections.abc import Sequence

from planetary.fabric.controller.membership import Membership
from planetary.fabric.protocol import events as e
from planetary.fabric.protocol.records import (
    EndKind,
    RunFinished,
    TaskAborted,
)
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.status import RoundMetrics
from planetary.moe.composer.composer_data import HELD_OUT
from planetary.moe.controller.composer_messages import ComposerMessages, FromComposer
from planetary.moe.controller.mixture_desk import MixtureDesk
from planetary.moe.controller.mixture_events import (
    CollectPayloads,
    ExpertsJudged,
    FragmentMade,
    MixturePolicy,
    ModelAssembled,
    TokensOf,
    WorkLeased,
    WorkOver,
)
from planetary.moe.controller.mixture_rounds import Composing, Rounds
from planetary.moe.controller.mixture_syncing import Syncing
from planetary.moe.controller.offload import Offload
from planetary.moe.controller.patience import Patience
from planetary.moe.controller.records import MixtureState
from planetary.moe.controller.stalls import Stalls, what_is_missing
from planetary.moe.controller.syncer_messages import (
    Joined,
    Lost,
    Returning,
)
from planetary.moe.controller.syncer_messages import Tick as SyncTick
from planetary.moe.controller.work_queue import Work
from planetary.wire import messages as m

COLLECT_EVERY_S = 30.0


class MixtureController:
    """See the module. Times are monotonic seconds."""

    def __init__(
        self,
        policy: MixturePolicy,
        state: MixtureState,
        now: float,
        late: Sequence[RoundMetrics] = (),
        waiting: Sequence[Work] = (),
    ) -> None:
        """Go on from `state`; `late`: see `Rounds`; `waiting`: see `Offload`."""
        self.policy, self.state = policy, state
        self.desk = MixtureDesk(policy, state)
        self.membership = Membership(self.desk, now)
        self.composing: dict[int, Composing] = {}  # by session
        self.rounds = Rounds(self.desk, self.composing, late)
        self.offload = Offload(self.desk, self.rounds.updates, self.rounds.refused_sketches, waiting)
        self.syncing = Syncing(self.desk, self.rounds, self.offload, self.composing, now)
        self.composers = ComposerMessages(self.syncing, self.membership)
        self._standby: list[int] = []  # sessions
        self.stalls = Stalls(self.desk, now)
        self.patience = Patience(policy.lease_s)
        self._collect_at = now + COLLECT_EVERY_S

    # --- the machine's interface ------------------------------------------------------------------------------

    def handle(self, event: e.Event, now: float) -> Sequence[e.Instruction]:
        """See `core.machine.Machine.handle`."""
        self.desk.out = []
        if self.state.ended is None:
            self._dispatch(event, now)
        if self.state.ended is None:
            self._go_on(now)
        return self.desk.out

    def next_deadline(self) -> float | None:
        """See `core.machine.Machine.next_deadline`."""
        if self.state.ended is not None:
            return None
        deserted = self._desertion_deadline()
        times = [self.syncing.machine.next_deadline(), self.stalls.next_deadline(), self._collect_at, deserted]
        times += [self.patience.next_deadline(), *(self._stuck_at(one) for one in self.composing.values())]
        return min(t for t in times if t is not None)

    def owner_of(self, shard: int) -> Composing | None:
        """Return the live composer of a shard."""
        return next((one for one in self.composing.values() if one.shard == shard), None)

    # --- events -----------------------------------------------------------------------------------------------

    def _dispatch(self, event: e.Event, now: float) -> None:
        match event:
            case e.Received():
                self._received(event, now)
            case e.Closed():
                self.desk.supervisors.pop(event.session, None)
                self.desk.forget(event.session)
                if event.session in self.desk.workers:
                    self._lose(self.desk.workers[event.session], event.reason, now)
            case e.PayloadSent():
                if self.desk.payload_sent(event.session, event.message):
                    self.syncing.payload_sent(event.session, now)
                    self.patience.sent(event.session, now)
            case e.PayloadArrives():
                self.patience.arrives(event.session, event.message.id)
            case e.SendFailed() if event.session in self.desk.workers:
                self._lose(self.desk.workers[event.session], event.reason, now)
            case e.Compiled():
                self.membership.compiled(event)
            case e.CompileFailed():
                self.membership.compile_failed(event)
                for worker in [w for w in self.desk.workers.values() if w.worker in self.membership.banned]:
                    self._lose(worker, event.reason, now)
            case FragmentMade():
                self.syncing.made(event, now)
            case ModelAssembled():
                failed = self.rounds.assembled(event)
                if failed:
                    self._end("resource", failed)
            case WorkLeased():
                late = self.offload.leased(event)
                if late is not None:
                    self._send_experts(*late)
            case WorkOver():
                self._work_over(event)
            case ExpertsJudged():
                self._judged(event, now)
            case e.StopRequested():
                self._end("stopped", event.reason)
            case _:
                pass

    def _received(self, event: e.Received, now: float) -> None:
        session, message = event.session, event.message
        self.patience.arrived(session, message.id, now)
        if isinstance(message, m.Hello):
            for replaced in self.membership.hello(session, message):
                self._lose(replaced, "replaced by a newer connection of the same worker", now)
            if session in self.desk.workers:
                self.syncing.tell(Returning(message.worker), now)
        elif session in self.desk.supervisors:
            ended = self.membership.supervisor_says(self.desk.supervisors[session], message)
            if ended is not None and isinstance(message, m.WorkerExited):
                self._lose(ended, message.reason, now)
        elif session in self.desk.workers:
            self._from_worker(self.desk.workers[session], event, now)
            return
        self._drop_attachment(event)

    def _drop_attachment(self, event: e.Received) -> None:
        """Let the gateway forget a result that nobody will judge."""
        if event.attachment:
            self.desk.out.append(e.DropAttachment(event.attachment))

    def _from_worker(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        message = event.message
        match message:
            case m.FetchBlob():
                self.membership.fetch(worker, message)
            case m.MixtureReady():
                self._ready(worker, message, now)
            case _ if isinstance(message, FromComposer):
                self.composers.says(worker, event, now)
            case m.ExpertsImproved() if self.policy.plan.offloads:
                self.offload.improved(worker, message, event.attachment)
            case m.EvalResult():
                self.rounds.evaluated(worker, message)
            case m.TaskFailed():
                self._failed(worker, message, now)
            case m.Goodbye():
                self._lose(worker, message.reason, now)
            case _:
                self._drop_attachment(event)

    def _ready(self, worker: WorkerSession, message: m.MixtureReady, now: float) -> None:
        if worker.ready:
            return
        self.membership.ready(worker, now)
        if message.shard >= 0:
            self.syncing.claims[worker.worker] = (message.shard, message.epoch, message.step)
        else:
            self.syncing.claims.pop(worker.worker, None)
        plan = self.policy.plan
        if plan.delivery == "gateway" and plan.held_out:
            told = m.TokensReady(shard=HELD_OUT, first=0, count=len(plan.held_out))
            self.desk.send(worker.session, told, TokensOf(plan.held_out))
        self._standby.append(worker.session)

    def _failed(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        self.desk.append(
            TaskAborted(
                round=self.state.round + 1,
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
        if self.membership.failed(worker, f"worker {worker.worker}: {failure.reason}", kind):
            self._lose(worker, self.membership.banned[worker.worker], now)
        else:
            self.membership.restart(worker, failure.reason)
            self._lose(worker, failure.reason, now)

    def _send_experts(self, shard: int, layer: int) -> None:
        """Answer a sketch."""
        owner = self.owner_of(shard)
        if owner is not None:
            self.offload.send_experts(owner.session, shard, layer)

    def _work_over(self, event: WorkOver) -> None:
        work = event.work
        if event.failed and self.policy.plan.pace == "lockstep":
            what = f"the experts of shard {work.owner} layer {work.layer} after step {work.step + 1}"
            self._end("peer", f"nobody could improve {what}, as often as it was tried; in lock step all wait for them")
        if self.offload.over(event):
            self._send_experts(work.owner, work.layer)

    def _judged(self, event: ExpertsJudged, now: float) -> None:
        judged = self.offload.judged(event)
        if judged is None:
            return
        self._send_experts(judged.shard, judged.layer)
        worker = next((w for w in self.desk.workers.values() if w.worker == judged.worker), None)
        if worker is None:
            return
        if not judged.false_claim:
            self.membership.succeeded(worker)
        elif self.membership.failed(worker, f"worker {worker.worker}: {judged.false_claim}", "peer"):
            self._lose(worker, self.membership.banned[worker.worker], now)

    # --- who comes and goes ------------------------------------------------------------------------------------------

    def _lose(self, worker: WorkerSession, reason: str, now: float) -> None:
        self.membership.remove(worker, reason, now)
        self.offload.lost(worker.session)
        self._standby = [session for session in self._standby if session != worker.session]
        self.rounds.lost(worker.session)
        composed = self.composing.pop(worker.session, None) is not None
        self.syncing.tell(Lost(worker.worker), now)
        if composed and self.policy.plan.pace == "lockstep":
            self._end("peer", f"composer {worker.worker} was lost ({reason}), and in lock step nobody can go on")

    # --- what follows -----------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        self.syncing.tell(SyncTick(), now)
        self._staff(now)
        self.rounds.finish(now)
        self.rounds.hand_out(self._standby)
        self.offload.hand_out([self.desk.workers[session] for session in self._standby])
        for one in list(self.composing.values()):
            if now >= self._stuck_at(one):
                self._restart(one.session, f"it took no step for {now - one.progress_at:.0f} s", now)
        unanswered = self.offload.unanswered() | self.rounds.unanswered()
        self.patience.look(unanswered, self.desk.workers, now, self.desk.under_way.count)
        for session, why in self.patience.stuck(now):
            if session in self.desk.workers:
                self._restart(session, why, now)
        if now >= self._collect_at:
            self._collect_at = now + COLLECT_EVERY_S
            keep = self.state.needed() | self.rounds.payloads() | self.desk.payloads_under_way()
            self.desk.out.append(CollectPayloads(frozenset(keep)))
        waits_for, ended = self.membership.whom_we_wait_for(), self._all_steps_are_taken
        missing = what_is_missing(self.desk, self.composing.values(), waits_for=waits_for, all_steps_taken=ended)
        self.stalls.look(missing, now)
        self._check_end(now)

    def _staff(self, now: float) -> None:
        """Let those who wait compose: the ones that come back first, then others while there are shards for them."""
        for session in list(self._standby):
            worker = self.desk.workers[session]
            owners = self.syncing.machine.owners()
            comes_back = worker.worker in owners
            reserved = sum(owner is not None for owner in owners)
            if comes_back or reserved < len(owners):
                self._standby.remove(session)
                claim = self.syncing.claims.get(worker.worker)
                joined = Joined(worker.worker, None if claim is None else claim[0])
                self.syncing.tell(joined, now)
            elif self.syncing.claims.pop(worker.worker, None) is not None:
                self.desk.send(session, m.StandBy(reason="its shard belongs to another composer by now"))

    def _restart(self, session: int, reason: str, now: float) -> None:
        worker = self.desk.workers[session]
        self.membership.restart(worker, reason)
        self._lose(worker, reason, now)

    def _stuck_at(self, one: Composing) -> float:
        # When all steps are taken, what is left is to view, save and evaluate.
        waits = self._all_steps_are_taken or self.rounds.evaluates(one.session) or self.policy.plan.pace == "lockstep"
        if waits or one.awaits > 0:  # a connection on which no byte moves ends by itself
            return float("inf")
        return max(one.progress_at, one.complete_at) + max(self.policy.stuck_after_s, 20 * one.step_s)

    @property
    def _all_steps_are_taken(self) -> bool:
        return sum(self.syncing.steps()) >= self.policy.plan.most_steps

    # --- the end ----------------------------------------------------------------------------------------------

    def _check_end(self, now: float) -> None:
        deserted = self._desertion_deadline()
        if self.state.round >= self.policy.rounds and not self.rounds.under_way:
            self._end("done", f"all {self.policy.rounds} rounds are done")
        elif deserted is not None and now >= deserted:
            self._end("deserted", self.membership.desertion)
        elif self.membership.hopeless or self._too_few():
            kind, failure = self.membership.last_failure
            self._end(kind, f"too few usable workers are left for the composers; the last failure: {failure}")

    def _too_few(self) -> bool:
        """Whether banned workers leave a shard that nobody will ever compose."""
        if not self.membership.banned or self.membership.others_may_do_better:
            return False
        names = {w.worker for w in self.desk.workers.values()}
        names |= {s.worker for s in self.desk.supervisors.values() if s.restart_expected}
        return len(names - set(self.membership.banned)) < self.policy.composers

    def _desertion_deadline(self) -> float | None:
        since = self.membership.deserted_at
        if since is None or self.policy.abandon_after_s <= 0:
            return None
        return since + self.policy.abandon_after_s

    def _end(self, kind: EndKind, reason: str) -> None:
        ok = kind == "done"
        self.desk.append(RunFinished(round=self.state.round, ok=ok, reason=reason, kind=kind))
        for session in [*self.desk.workers, *self.desk.supervisors]:
            self.desk.send(session, m.Shutdown(reason=reason))
        self.rounds.report_all()
        self.desk.out.append(e.Finish(ok, reason, kind))
