"""The controller of a mixture, as a pure machine: membership of the fabric, and the syncer.

It decides; `runs.mixture.gateway.gateway` carries out. Durable state is `runs.mixture.records.MixtureState`,
changed through journal records alone. Composers never wait for the controller: they take steps, and report them.

A round is a number of steps of the run, the mean over all shards. It is finished when every shard's state after them is
in the payload store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import EndKind
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.board import TaskPhase
from planetary.machine.task_times import STUCK_FACTOR, TaskTimes
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.composer.data import HELD_OUT
from planetary.runs.mixture.controller.desk import MixtureDesk
from planetary.runs.mixture.controller.events import (
    CollectPayloads,
    ExpertsJudged,
    FragmentMade,
    MixturePolicy,
    ModelAssembled,
    SliceTokens,
)
from planetary.runs.mixture.controller.offload import Offload
from planetary.runs.mixture.controller.rounds import Composing, MixtureRounds
from planetary.runs.mixture.controller.syncer_machine import Joined, Lost, Returning
from planetary.runs.mixture.controller.syncing import Syncing
from planetary.runs.mixture.controller.tasks import LACKS, LastState, MixtureBoard
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import MixtureState, ShardKept
from planetary.runs.mixture.training.expert_optimizer import COMPOSER, EXPERT
from planetary.runs.rounds.metrics import RoundMetrics

COLLECT_EVERY_S = 30.0

FromComposer = (
    mm.PublishFragment
    | mm.PublishSurrogates
    | mm.SaveShard
    | mm.StepTaken
    | mm.OfferSketches
    | mm.ViewModel
    | mm.RequestTokens
)


class MixtureController(RunController[MixtureDesk, WorkerSession]):
    """The controller of a mixture, as a pure machine. Times are monotonic seconds."""

    def __init__(
        self,
        policy: MixturePolicy,
        state: MixtureState,
        now: float,
        late: Sequence[RoundMetrics] = (),
    ) -> None:
        """Go on from `state`; `late`: see `MixtureRounds`."""
        super().__init__(MixtureDesk(policy, state), policy.grace_s, now)
        self.policy, self.state = policy, state
        self.composing: dict[int, Composing] = {}  # composers by session
        times = TaskTimes(policy.task_s, STUCK_FACTOR * policy.task_s, apart=False)
        self.board = MixtureBoard(times, policy.first_task)
        self.rounds = MixtureRounds(self.desk, self.board, self.composing, late)
        self.offload = Offload(self.desk, self.board, self.owner_of, self.rounds.updates, self.rounds.refused_sketches)
        self.syncing = Syncing(self.desk, self.rounds, self.offload, self.composing, now)
        self._standby: list[int] = []  # sessions
        self._composer_s: dict[int, float] = {}  # measured seconds of a composer's largest function, by session
        self._choose_at: float | None = None  # when the first composers are chosen at the latest; None: none is ready
        began = any(shard.epoch for shard in state.shards)
        self._chosen = began or policy.workers <= policy.composers  # composers are chosen, or all workers compose
        self._collect_at = now + COLLECT_EVERY_S

    def _deadlines(self) -> Iterable[float | None]:
        return (
            self.syncing.machine.next_deadline(),
            self.rounds.assemble_at,
            self._collect_at,
            None if self._chosen else self._choose_at,
        )

    def _waits(self) -> Iterator[Wait]:
        for one in self.composing.values():
            # When all steps are taken, composers still view, save and evaluate.
            steps_are_due = not (self._all_steps_are_taken or self.rounds.evaluates(one.session))
            # A connection on which no byte moves ends by itself.
            if steps_are_due and one.awaits <= 0 and self.policy.plan.pace.detects_stuck_composers:
                since = max(one.progress_at, one.complete_at)
                until = since + max(self.policy.stuck_after_s, STUCK_FACTOR * one.step_s)
                yield Wait(one.session, since, until, "took no step")
        for loan, until in self.board.limits():
            yield Wait(loan.session, loan.since, until, LACKS[loan.kind])

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        """Only live workers compose, each a separate shard."""
        yield from super()._invariants()
        self.syncing.machine.validate()
        yield from self.board.invariants(self.desk.workers)
        lost = sorted(self.composing.keys() - self.desk.workers.keys())
        yield not lost, f"connections {lost} compose, and are over"
        shards = sorted(one.shard for one in self.composing.values())
        yield len(set(shards)) == len(shards), f"a shard has two live composers: {shards}"
        steps, most = [shard.round_step for shard in self.state.shards], self.policy.plan.most_steps
        all_rounds = self.state.round >= self.policy.rounds
        yield not all_rounds or sum(steps) >= most, f"the last round's states have {steps} steps of {most}"

    def owner_of(self, shard: int) -> Composing | None:
        """Return the live composer of a shard."""
        return next((one for one in self.composing.values() if one.shard == shard), None)

    # --- events -----------------------------------------------------------------------------------------------

    def _take_event(self, event: e.Event, now: float) -> None:
        match event:
            case FragmentMade():
                self.syncing.made(event, now)
            case ModelAssembled():
                failed = self.rounds.assembled(event, now)
                if failed:
                    self._end("resource", failed)
            case ExpertsJudged():
                self._judged(event, now)
            case _:
                pass

    def _payload_sent(self, session: int, now: float) -> None:
        self.syncing.payload_sent(session, now)
        self.board.sent(session, now)

    def _payload_arrives(self, session: int, message: m.Message, now: float) -> None:
        self.board.arrives(session, message.id)

    def _arrived(self, session: int, message: int, now: float) -> None:
        self.board.arrived(session, message, now)

    def _greeted(self, worker: WorkerSession, now: float) -> None:
        self.syncing.handle(Returning(worker.worker), now)

    def _take_message(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        match message := event.message:
            case mm.MixtureReady():
                self._ready(worker, message, now)
            case _ if isinstance(message, FromComposer):
                self._from_composer(worker, event, now)
            case mm.ExpertsImproved():
                self.offload.improved(worker, message, event.attachment, now)
            case mm.MixtureEvaluated():
                self.rounds.evaluated(worker, message, now)
            case _:
                self._drop_attachment(event)

    def _ready(self, worker: WorkerSession, message: mm.MixtureReady, now: float) -> None:
        if worker.ready:
            return
        self.membership.ready(worker, now, message.device, message.verified)
        if any(worker.may(role) and role not in message.roles for role in self.policy.roles if message.roles):
            self.membership.last_failure = ("compile", f"worker {worker.worker}: {message.verified}")
        worker.roles = message.roles or worker.roles
        if message.shard >= 0:
            self.syncing.claims[worker.worker] = (message.shard, message.epoch, message.step)
        else:
            self.syncing.claims.pop(worker.worker, None)
        plan = self.policy.plan
        if plan.delivery == "gateway" and plan.held_out:
            told = mm.TokensReady(shard=HELD_OUT, first=0, count=len(plan.held_out))
            self.desk.send(worker.session, told, SliceTokens(plan.held_out))
        self._standby.append(worker.session)
        if message.composer_s > 0:
            self._composer_s[worker.session] = message.composer_s
        if self._choose_at is None:
            self._choose_at = now + self.policy.startup_grace_s

    def _take_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        kind = self._record_failure(worker, failure)
        if not self._strike(worker, f"worker {worker.worker}: {failure.reason}", kind, now):
            self._restart(worker, failure.reason, "stuck", now)

    def _judged(self, event: ExpertsJudged, now: float) -> None:
        judged = self.offload.judged(event)
        if judged is None:
            return
        worker = next((w for w in self.desk.workers.values() if w.worker == judged.worker), None)
        if worker is None:
            return
        if not judged.false_claim:
            self.membership.succeeded(worker)
        else:
            self._strike(worker, f"worker {worker.worker}: {judged.false_claim}", "peer", now)

    # --- composers ------------------------------------------------------------------------------------------------

    def _from_composer(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        """Take a composer's message, unless the epoch is over (it is fenced off) or the payload is unusable."""
        message = event.message
        composing = self.composing.get(worker.session)
        assert isinstance(message, FromComposer)
        if composing is None or (message.shard, message.epoch) != (composing.shard, composing.epoch):
            self.syncing.refuse(
                "fenced", f"{worker.worker} speaks for shard {message.shard} under epoch {message.epoch}, which is over"
            )
            return
        defect = event.defect or impossible_steps(message, self.policy.plan)
        if defect:
            self.syncing.refuse("unusable", f"{type(message).__name__} of {worker.worker}: {defect}")
            self._ask_again(composing, message)
            return
        match message:
            case mm.StepTaken():
                self._stepped(composing, message, now)
                self.membership.succeeded(worker)
            case mm.ViewModel():
                self.rounds.viewed(message, event.payload)
            case mm.RequestTokens():
                self._send_tokens(worker.session, message)
            case mm.PublishFragment():
                self.syncing.published(worker.worker, message, event.payload, now)
            case mm.OfferSketches():
                self.rounds.sketched(message.shard, event.payload_bytes)
                session = worker.session
                if not self.offload.offered(session, message, event.payload):
                    self.offload.send_experts(session, message.shard, message.layer)
            case mm.PublishSurrogates():
                self.syncing.refreshed(message, event.payload)
            case mm.SaveShard():
                self._kept(composing, message, event.payload)

    def _ask_again(self, composing: Composing, message: FromComposer) -> None:
        """Answer an unusable payload so the composer sends another one, where it would not by itself."""
        session = composing.session
        match message:
            case mm.PublishFragment() if (Tier(message.tier), message.fragment) in self.state.fragments:
                self.syncing.send_fragment(session, Tier(message.tier), message.fragment)
            case mm.PublishSurrogates():
                self.syncing.unusable_surrogates(composing)
            case mm.OfferSketches():
                self.offload.unusable(session, message)
            case mm.SaveShard() if message.progress >= self.policy.plan.steps:
                # No later state will come: it has to save this one again.
                known = {"shard": message.shard, "epoch": message.epoch, "step": message.step}
                speaks, steps = self.syncing.spoken_for(message.shard), self.syncing.steps()
                self.desk.send(session, mm.GrantShard(**known, payload="", speaks=speaks, steps=steps))
            case _:
                pass

    def _stepped(self, composing: Composing, message: mm.StepTaken, now: float) -> None:
        composing.step, composing.progress_at = message.step, now
        composing.loss, composing.step_s = message.loss, message.seconds
        composing.surrogate_age = message.surrogate_age
        self.syncing.stepped(composing, now)
        self.offload.stepped(composing.session, message.shard, message.step)
        self.desk.send(composing.session, mm.RunProgress(steps=self.syncing.steps()))

    def _kept(self, composing: Composing, message: mm.SaveShard, payload: str) -> None:
        if message.step < self.state.shards[message.shard].step:
            self.syncing.refuse("regression", f"shard {message.shard} went back to step {message.step}")
            return
        composing.step = max(message.step, composing.step)  # reports of steps come ahead of states
        self.desk.append(
            ShardKept(
                shard=message.shard,
                epoch=message.epoch,
                step=message.step,
                progress=message.progress,
                payload=payload,
                loss=message.loss,
                compute_s=message.compute_s,
            )
        )

    def _send_tokens(self, session: int, wanted: mm.RequestTokens) -> None:
        plan = self.policy.plan
        last = wanted.first + wanted.count
        if not (0 <= wanted.first < last <= plan.most_steps and wanted.count <= plan.steps_ahead):
            self.syncing.refuse("unusable", f"shard {wanted.shard} requests tokens of steps {wanted.first} to {last}")
            return
        slices = tuple(plan.tokens_of(wanted.shard, step) for step in range(wanted.first, last))
        message = mm.TokensReady(shard=wanted.shard, first=wanted.first, count=wanted.count)
        self.desk.send(session, message, SliceTokens(slices))

    # --- workers that come and go ------------------------------------------------------------------------------------

    def _lost(self, worker: WorkerSession, reason: str, now: float) -> None:
        self.board.lost(worker.session)
        self.offload.lost(worker.session)
        self._standby = [session for session in self._standby if session != worker.session]
        self._composer_s.pop(worker.session, None)
        composed = self.composing.pop(worker.session, None) is not None
        self.syncing.handle(Lost(worker.worker), now)
        if composed and (why := self.policy.plan.pace.end_without_composer(worker.worker, reason)):
            self._end("peer", why)

    def _is_idle(self, worker: WorkerSession) -> bool:
        """A run that would end without a composer keeps it."""
        pace = self.policy.plan.pace
        return worker.session not in self.composing or not pace.end_without_composer(worker.worker, worker.leaving)

    # --- after each event -------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        self.syncing.handle(e.Tick(), now)
        self._staff(now)
        self.rounds.finish(now)
        self.rounds.hand_out(self._standby, now)
        self._await_last_states(now)
        if now >= self._collect_at:
            self._collect_at = now + COLLECT_EVERY_S
            keep = self.state.needed() | self.rounds.payloads() | self.desk.payloads_under_way()
            self.desk.out.append(CollectPayloads(frozenset(keep)))
        standby = [self.desk.workers[session] for session in self._standby]
        for work in self.offload.hand_out([worker for worker in standby if worker.may(EXPERT)], now):
            what = f"the experts of shard {work.shard} layer {work.layer} after step {work.step + 1}"
            if why := self.policy.plan.pace.end_without_work(what):
                self._end("peer", why)

    def _await_last_states(self, now: float) -> None:
        """Give due last states a limit: without one a hanging composer would end no run."""
        composers = self.composing.values() if self._all_steps_are_taken else ()
        due = {LastState(one.shard): one.session for one in composers if not self.rounds.has_ended(one.shard)}
        for loan in self.board.loans():
            if loan.kind == "state" and loan.tasks[0] not in due:
                self.board.done(loan, now)
        for task, session in due.items():
            phase = self.board.phase(task)
            if phase is TaskPhase.LENT:
                continue
            if phase is not TaskPhase.WAITING:
                self.board.offer(task)
            loan = self.board.lend(session, (task,), "state", now)
            loan.flight.awaits = self.desk.under_way.count(session)

    def _staff(self, now: float) -> None:
        """Let those who wait compose: those that come back, and the fastest others while there are shards for them."""
        complete = len(self._standby) >= self.policy.workers
        if not (self._chosen or complete) and (self._choose_at is None or now < self._choose_at):
            return  # others may be faster
        self._chosen = True
        for session in sorted(self._standby, key=lambda session: self._composer_s.get(session, float("inf"))):
            worker = self.desk.workers[session]
            owners = self.syncing.machine.owners()
            if not worker.may(COMPOSER):
                continue
            comes_back = worker.worker in owners
            reserved = sum(owner is not None for owner in owners)
            if comes_back or reserved < len(owners):
                self._standby.remove(session)
                claim = self.syncing.claims.get(worker.worker)
                joined = Joined(worker.worker, None if claim is None else claim[0])
                self.syncing.handle(joined, now)
            elif self.syncing.claims.pop(worker.worker, None) is not None:
                self.desk.send(session, mm.StandBy(reason="its shard belongs to another composer by now"))

    def _why_nothing_goes_on(self) -> str:
        if self.rounds.assemble_at is not None:
            return f"the model of the last round is put together again in a while: {self.rounds.unassembled}"
        by_shard = {one.shard: one for one in self.composing.values()}
        missing = [n for n in range(self.policy.composers) if n not in by_shard]
        if missing:
            others = sorted(w.worker for w in self.desk.workers.values() if not w.may(COMPOSER))
            idle = f"; {', '.join(others)} may not or cannot compose" if others else ""
            whom = self.membership.whom_we_wait_for()
            if not by_shard and not others and not any(self.syncing.steps()):
                return whom  # at the start no shard has a composer yet
            return f"no composer for shard {', '.join(map(str, missing))}: {whom}{idle}"
        unsaved = [n for n, shard in enumerate(self.state.shards) if shard.progress < self.policy.plan.steps]
        if unsaved and self._all_steps_are_taken:
            whose = ", ".join(f"{n} ({by_shard[n].worker})" for n in unsaved)
            return f"all steps are taken; waiting for the last state of shard {whose}"
        return ""

    @property
    def _all_steps_are_taken(self) -> bool:
        return sum(self.syncing.steps()) >= self.policy.plan.most_steps

    # --- the end ----------------------------------------------------------------------------------------------

    def _is_done(self) -> tuple[EndKind, str] | None:
        if self.state.round < self.policy.rounds or self.rounds.under_way:
            return None
        return "done", f"all {self.policy.rounds} rounds are done"

    def _is_hopeless(self) -> str:
        hopeless = self.membership.hopeless or self._too_few()
        return "too few usable workers are left for the composers" if hopeless else ""

    def _too_few(self) -> bool:
        """Whether banned and incapable workers leave too few for the shards."""
        names = {s.worker for s in self.desk.supervisors.values() if s.restart_expected}
        names |= {w.worker for w in self.desk.workers.values()}
        others = {w.worker for w in self.desk.workers.values() if not w.may(COMPOSER)}
        all_are_here = self.policy.local and len(names) >= self.policy.composers
        if not (self.membership.banned or (others and all_are_here)) or self.membership.others_may_do_better:
            return False
        return len(names - others - set(self.membership.banned)) < self.policy.composers

    def _report_the_rest(self) -> None:
        self.rounds.report_all()


def impossible_steps(message: m.Message, plan: MixturePlan) -> str:
    """Return which steps of a composer's message are impossible, or ""."""
    progress = getattr(message, "progress", 0)
    if not 0 <= progress <= plan.steps:
        return f"it reports {progress} of the run's {plan.steps} steps"
    if isinstance(message, mm.StepTaken | mm.SaveShard) and not 0 <= message.step <= plan.most_steps:
        return f"it reports {message.step} of at most {plan.most_steps} steps"
    return ""
