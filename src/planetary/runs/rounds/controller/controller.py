"""The training controller (PCP's Shepherd) as a pure machine.

It decides; `fleet.gateway.gateway` carries out. Three parts share one `Desk`: `Membership` (the workers of the run),
`RoundTraining` (rounds and leases) and `Evaluation` (held-out loss). Durable state is
`runs.rounds.state.ControllerState`, changed only through journal records; everything else lives as long as a
connection.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

import msgspec

from planetary.core.extension_points import TOPOLOGIES
from planetary.fleet.controller.controller import RunController, RunPhase
from planetary.fleet.controller.reported_values import LARGEST
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import EndKind
from planetary.fleet.protocol.sessions import Phase
from planetary.runs.rounds import events as e
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.checkpointing import Checkpointing
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.early_stopping import why_stopped
from planetary.runs.rounds.controller.evaluation import Evaluation
from planetary.runs.rounds.controller.guard import Guard
from planetary.runs.rounds.controller.leases import Leases
from planetary.runs.rounds.controller.round_end import MetricsLines, finished_record, merged_metrics
from planetary.runs.rounds.controller.topology import ReductionOutcome, Topology
from planetary.runs.rounds.fold import refused_of_late
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.metrics_file import metrics_of
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.records import (
    CheckpointWritten,
    LeaseMark,
    RolledBack,
    RoundStarted,
    StepReplaced,
    TopologyReplaced,
)
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.state import ControllerState, OpenRound, contradiction
from planetary.sync.rounds import RoundAction

MOST_EVALUATED = 2  # versions at once


class Controller(RunController[RoundsDesk, Trainer]):
    """The controller of a run in rounds."""

    def __init__(
        self,
        policy: ControllerPolicy,
        state: ControllerState,
        now: float,
        unreported: Iterable[RoundMetrics] = (),
    ) -> None:
        """Go on from `state`, whose last record is `RunStarted` or `RoundsResumed`, at monotonic time `now`.

        `unreported` are the metrics of finished rounds whose lines were not written before a crash.
        """
        super().__init__(RoundsDesk(policy, state), policy.round.grace_s, now)
        self.state = state
        self.topology: Topology = self._topology_of(policy)
        self.guard = Guard(self.desk)
        self.training = RoundTraining(self.desk, self.topology, self.guard, now)
        self.evaluation = Evaluation(self.desk, self.topology, self.guard, now)
        self._stop_reason = ""  # why it is stopping
        self._offered: e.StepOffered | None = None  # a training step that waits for the end of the round
        self.lines = MetricsLines(self.desk, self.evaluation, unreported)
        if state.round not in state.evals:
            self.evaluation.begin(state.round)

    @property
    def policy(self) -> ControllerPolicy:
        """The constants of the run."""
        return self.desk.policy

    def _topology_of(self, policy: ControllerPolicy) -> Topology:
        """Make the topology, at the start."""
        return TOPOLOGIES.find(policy.topology)(self.desk)

    def _may_open(self, now: float) -> bool:
        """Whether the next round begins now."""
        startup = self._startup_deadline()
        return self.training.may_open and bool(self.topology.able_workers()) and (startup is None or now >= startup)

    def _deadlines(self) -> Iterable[float | None]:
        return (
            self.training.ask_again_at,
            self.training.checkpoint.again_at,
            self._startup_tick(),
            self.topology.next_deadline(),
        )

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        """Connections agree with the state, and no task waits without a deadline."""
        yield from super()._invariants()
        wrong = contradiction(self.state)
        yield not wrong, wrong
        if self._has_ended:
            return
        state, workers = self.state, list(self.desk.workers.values())
        rounds = [opened for opened in (state.open, state.closing) if opened is not None]
        held = {holding.task: holding.worker for opened in rounds for holding in opened.holders.values()}
        flights = ((worker, train) for worker in workers for train in (worker.train, worker.next))
        trains = {train.task: worker.worker for worker, train in flights if train is not None}
        if held != trains:
            yield False, f"tasks and their workers are {held} in the rounds under way, and {trains} on the connections"
        versions = self.evaluation.versions
        yield len(versions) <= MOST_EVALUATED, f"so many versions are evaluated at once: {versions}"
        for worker in workers:
            busy = worker.train is not None or worker.evaluate is not None
            waits = busy and not self.training.leases.awaits(worker) and self.training.wait(worker) is None
            yield not waits, f"worker {worker.worker} has a task and no deadline"

    # --- events -----------------------------------------------------------------------------------------------

    def _take_event(self, event: e.Event, now: float) -> None:
        match event:
            case e.ContributionsMeasured():
                self.topology.measured(event.round, event.table)
            case e.ParametersRestored() if self.guard.retreat is not None:
                self._restored(event, *self.guard.retreat, now)
            case e.RestoreFailed():
                self._end("resource", event.reason)
            case e.OuterStepDone():
                self.topology.stepped(event)
            case e.OuterStepFailed():
                self._end("numerics", event.reason)
            case e.CheckpointDone():
                self.desk.append(CheckpointWritten(round=event.round, path=event.path, seconds=event.seconds))
                self.lines.add(self.training.checkpoint_done(now))
            case e.CheckpointLost():
                self.lines.add(self.training.checkpoint_lost(event.reason, now))
            case e.StepOffered():
                self._offered = event

    def _payload_sent(self, session: int, now: float) -> None:
        worker = self.desk.workers.get(session)
        for task in () if worker is None else (worker.train, worker.next, worker.evaluate):
            if task is not None:
                task.sent(now)

    def _payload_arrives(self, session: int, message: m.Message, now: float) -> None:
        worker = self.desk.workers.get(session)
        if worker is None:
            return
        worker.arriving.setdefault(message.id, now)
        if isinstance(message, rm.TrainResult):
            self.training.leases.begins_to_arrive(worker, message, now)

    def _arrived(self, session: int, message: int, now: float) -> None:
        worker = self.desk.workers.get(session)
        if worker is not None:
            since = worker.arriving.pop(message, None)
            worker.arrival_s = 0.0 if since is None else now - since
            worker.arrived_at = worker.arrived_at if since is None else now

    def _take_message(self, worker: Trainer, event: e.Received, now: float) -> None:
        if isinstance(event.message, rm.Progress | rm.TrainResult | rm.EvalResult):
            self.training.leases.gave_sign(worker)
        match message := event.message:
            case rm.Ready() if message.artifact != worker.artifact or message.in_ring != (self.policy.ring is not None):
                self._ready_for_another(worker, now)
            case rm.Ready():
                self.membership.ready(worker, now, message.device, message.verified)
                self.topology.ready(worker, message)
            case rm.Progress():
                self.training.leases.progress(worker, message, now)
            case rm.TrainResult():
                found = self.training.leases.result(worker, message, event, now)
                if found:
                    reason = f"worker {worker.worker} sent an unusable result: {found}"
                    self._strike(worker, reason, "peer", now, lasting=True)
                elif found is not None:
                    self.membership.succeeded(worker)
            case rm.EvalResult():
                self.membership.answered(worker)
                self.evaluation.result(worker, message)
            case rm.ReduceFailed(kind="refused"):
                self._expel(worker, f"a false report: {message.reason}", now)
            case _ if self.topology.take(worker, event, now):
                self.training.withdraw_lost(now)
            case _:
                self._drop_attachment(event)

    def _ready_for_another(self, worker: Trainer, now: float) -> None:
        """A worker is ready for another job than its own.

        That may be the one before on this connection. If there was none, nothing else may follow: the worker is given
        its job again, on a new connection.
        """
        if worker.phase is Phase.LOADING and worker.offers == 1:
            self._lose(worker, "it is ready for a job that it was not given", "disconnected", now)

    def _beyond_task(self, worker: Trainer, message: m.Message) -> str:
        train, flight = worker.train, worker.evaluate
        match message:
            case rm.Progress() if train is not None and train.task == message.task:
                most = self.policy.most_steps(train.steps)
                if not 0 <= message.step <= most:
                    return f"step {message.step} of a task of {most} steps"
            case rm.EvalResult() if flight is not None and flight.task == message.task:
                chunk = self.policy.held_out[flight.chunk]
                if (message.version, message.batches) != (flight.version, chunk.batches):
                    reported = f"a loss of version {message.version} on {message.batches} batches"
                    return f"{reported}, asked for version {flight.version} on {chunk.batches}"
                if len(message.sets) != len(chunk.more) or not all(abs(loss) <= LARGEST for loss in message.sets):
                    return f"losses {list(message.sets)} of named sets, asked for {len(chunk.more)}"
            case _:
                pass
        return ""

    def _take_failure(self, worker: Trainer, failure: m.TaskFailed, now: float) -> None:
        self.training.leases.gave_sign(worker)
        train, flight = worker.train, worker.evaluate
        if train is not None and train.task == failure.task:
            round_, version = train.round, self.state.under_way(train.round).version
            self.training.leases.orphan(worker, train, failure.reason, now)
        elif flight is not None and flight.task == failure.task:
            worker.evaluate, round_, version = None, self.state.round, flight.version
            self.evaluation.give_back(flight)
        else:
            return
        known = failure.kind == "parameters" and not self.topology.lacks_parameters(worker)
        kind = self._record_failure(worker, failure)
        if known:  # the task was already in flight
            return
        if kind == "numerics" and not self.guard.blames(worker.worker, version):
            return
        self._strike(worker, f"worker {worker.worker} in round {round_}: {failure.reason}", kind, now)

    # --- consequences of events -------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Do everything that has become possible."""
        if self.phase is RunPhase.STOPPING and not self.training.checkpoint.under_way:
            self._end("stopped", self._stop_reason)
        if self.state.ended is not None:
            return
        if self.guard.retreat is not None:  # nothing begins before the gateway has gone back
            return
        while self._advance(now):
            pass
        self._charge(now)
        if self._retreats(now):
            return
        if self.topology.unfit is not None:
            self._use_star(*self.topology.unfit, now)
        self.evaluation.hand_out(now)
        self.lines.write()

    def _waits(self) -> Iterator[Wait]:
        for worker in self.desk.workers.values():
            wait = self.training.wait(worker)
            if wait is not None:
                yield wait

    def _why_nothing_goes_on(self) -> str:
        stall = self.training.stall or self.topology.stall
        if stall or self.desk.ready_workers():
            return stall if self.desk.workers or not stall else f"{stall}{self.membership.absences}"
        return self.membership.whom_we_wait_for()

    def _advance(self, now: float) -> bool:
        """Go on with the rounds; true when one came to an end, so more may have become possible."""
        if self._offered is not None and self.training.may_open:
            self._replace_step(self._offered, now)
        self._supply(now)
        if self._may_open(now):
            self.training.open(now)
        reduced = self.training.advance(now, self.evaluation.versions)
        if isinstance(reduced, LeaseMark):
            reason = f"every worker that had trained for round {reduced.round + 1} was lost before the end of it"
            self._go_back(reduced, reason, now)
        elif reduced is not None:
            self._outer_step_done(reduced, now)
            self.evaluation.hand_out(now)  # before the next round's tasks
        return reduced is not None

    def _replace_step(self, offered: e.StepOffered, now: float) -> None:
        """Go on with another training step. No round is under way, so no task is; evaluations are begun again."""
        self._offered, state, model = None, self.state, offered.spec.stablehlo_digest
        before = state.steps[-1]
        self.desk.append(
            StepReplaced(
                round=state.round, model=model, before=before, by=offered.by, why=offered.why, back=offered.back
            )
        )
        self.desk.use_policy(msgspec.structs.replace(self.policy, spec=offered.spec, buffers=offered.buffers))
        self.desk.out.append(e.UseStep(model))
        self._forget_tasks()
        self.membership.replace_step(offered.compiled, now)

    def _forget_tasks(self) -> None:
        """Workers are about to load another job, with which they have neither parameters nor tasks."""
        for worker in self.desk.workers.values():
            worker.version = -1
            if worker.evaluate is not None:
                self.evaluation.give_back(worker.evaluate)
                worker.evaluate = None

    def _use_star(self, why: str, mark: LeaseMark, now: float) -> None:
        """Go on in a star from `mark`, whose outer state the gateway has. Rounds do not overlap there."""
        self.desk.append(TopologyReplaced(round=mark.round, why=why))
        self._go_back(mark, why, now)
        self.desk.use_policy(msgspec.structs.replace(self.policy, topology="star", ring=None, overlap="none"))
        self.desk.out.append(e.UseStar(mark.round, why))
        self._forget_tasks()
        self.topology = self._topology_of(self.policy)
        self.topology.went_back(mark.round)
        self.training.use_topology(self.topology)
        self.evaluation.use_topology(self.topology)
        self.membership.replace_job(now)

    def _outer_step_done(self, round_: int, now: float) -> None:
        self.evaluation.begin(round_)
        self.lines.add(self.training.outer_step_done(round_, now, self.evaluation.versions))

    def _supply(self, now: float) -> None:
        """Give newcomers the parameters, or go back to those the gateway has."""
        back = self.topology.supply(now)
        if back is not None:
            newest = self.state.version
            reason = f"no worker has the parameters of round {newest} any more, the gateway has round {back.round}"
            self._go_back(back, reason, now)
            self._supply(now)

    def _charge(self, now: float) -> None:
        """Count refused contributions, refused held-out losses and NaN against the workers that alone had them.

        Unresponsive workers lose their connection: one that goes on begins with an empty queue and a whole version.
        """
        by_name = {worker.worker: worker for worker in self.desk.workers.values()}
        for name, reason in (*self.topology.take_refused(), *self.evaluation.take_refused()):
            worker = by_name.get(name)
            if worker is None or worker.session not in self.desk.workers:  # it was refused twice, and lost at the first
                continue
            if why := self.membership.distrusted(worker, *refused_of_late(self.state.refusals[name], reason)):
                self._lose(worker, why, "banned", now)
        for name in self.guard.take_guilty():
            if name in by_name and by_name[name].session in self.desk.workers:
                reason = f"worker {name}: it got NaN from parameters that others could begin from"
                self._strike(by_name[name], reason, "numerics", now)
        for worker in self.training.leases.unresponsive():
            why = f"no sign of it in {worker.unanswered} leases in a row: it has to connect again"
            self._lose(worker, why, "stuck", now)

    def _retreats(self, now: float) -> bool:
        """Go back when parameters are of no use, as soon as nothing is made of them; return whether the run does."""
        damage = None if self.training.ended is not None else self.guard.damage()
        if damage is None:
            return False
        if end := self.guard.begin(*damage):
            self._end_or_ban(end, *damage, now)
        return True

    def _end_or_ban(self, end: str, bad: int, why: str, now: float) -> None:
        """End, unless all that is known comes from one worker while others are away: it may be a liar.

        Then the machine is banned, and the run goes back and waits for the others.
        """
        alone = list(self.desk.workers.values())
        if len(alone) != 1 or self.policy.local or not self.membership.absent:
            self._end("numerics", end)
            return
        reason = self.membership.ban(alone[0], f"it was alone, and {end}", "numerics", lasting=True)
        self._lose(alone[0], reason, "banned", now)
        self.guard.go_back(bad, why)

    def _restored(self, event: e.ParametersRestored, bad: int, why: str, now: float) -> None:
        self._go_back(event.mark, why, now, bad=bad)
        self.topology.restored(event.mark, event.digest)
        self.guard.went_back()

    def _go_back(self, mark: LeaseMark, reason: str, now: float, *, bad: int = 0) -> None:
        self.desk.append(RolledBack(mark=mark, reason=reason, bad=bad))
        self.desk.out.append(e.ForgetRounds(mark.round))
        self.lines.forget_after(mark.round)
        self.training.rolled_back(mark, reason, now)
        self.evaluation.go_back(mark.round)

    @property
    def is_trained(self) -> bool:
        """Whether no round is under way and none is left."""
        return not self.training.may_open and self.state.open is None

    def _is_done(self) -> tuple[EndKind, str] | None:
        if not self.is_trained or self.evaluation.versions or self.guard.retreat is not None:
            return None
        length, done, kept = self.policy.length, self.state.round, self.state.durable_round
        if kept < done:
            what = f"all {done} rounds are trained, but the result of the last one could not be kept"
            return "resource", f"{what}; round {kept} is the newest that is: {self.training.checkpoint.unkept}"
        reason = f"all {length.most_rounds} rounds are done"
        if self.desk.stops_early:
            return "done", why_stopped(self.state.evals, self.policy.patience, self.policy.least_gain)
        if done < length.most_rounds:
            reason = f"data.max_epochs is reached: all {length.leases} leases of data are trained, in {done} rounds"
        return "done", "; ".join(filter(None, (reason, self.guard.rise())))

    def _stop(self, reason: str) -> None:
        """End once the checkpoint under way is in the journal (both name the same round); at once if asked again."""
        if self.training.checkpoint.under_way and self.phase is RunPhase.RUNNING:
            self._advance_phase("stop")
            self._stop_reason = reason
        else:
            self._end("stopped", self._stop_reason or reason)

    def _report_the_rest(self) -> None:
        self.lines.write(everything=True)

    def _gave_sign(self, worker: Trainer) -> None:
        self.training.leases.gave_sign(worker)

    def _could_not_send(self, worker: Trainer, reason: str, now: float) -> None:
        """Count a failed send against the worker: the gateway's disk or data is at fault, but retries must end."""
        if not self._strike(worker, f"the data of {worker.worker} cannot be sent: {reason}", "data", now):
            self._lose(worker, reason, "disconnected", now)

    def _lost(self, worker: Trainer, reason: str, now: float) -> None:
        self.training.leases.pace.forget(worker.worker)
        if worker.train is not None:
            self.training.leases.orphan(worker, worker.train, reason, now)
        if worker.evaluate is not None:
            self.evaluation.give_back(worker.evaluate)
        self.training.withdraw_lost(now)

    def _is_idle(self, worker: Trainer) -> bool:
        return worker.train is None and worker.evaluate is None and not self.topology.keeps(worker)

    def _startup_tick(self) -> float | None:
        """Return when the first round may begin without more workers; None when something else is waited for."""
        return self._startup_deadline()

    def _startup_deadline(self) -> float | None:
        """Until when the first round waits for more workers; None when it need not."""
        since = self.membership.first_ready_at
        if since is None or self.training.first_round_open or not self.training.may_open:
            return None
        expected = self.policy.length.workers - len(self.membership.banned)  # those do not come back
        return since + self.policy.startup_grace_s if 0 < len(self.desk.ready_workers()) < expected else None


class RoundTraining:
    """The round in training, and the ended round. Whether a round closes is `sync.rounds`' decision.

    A closed round has *ended* until it is finished: parameters are made, and saved where a checkpoint is due. In
    lock-step nothing is trained meanwhile. With overlap the next round opens as soon as one closes.
    """

    def __init__(self, desk: RoundsDesk, topology: Topology, guard: Guard, now: float) -> None:
        """Start at monotonic time `now`, with no round open."""
        self._desk, self._topology, self._guard = desk, topology, guard
        self.leases = Leases(desk, topology, guard, now)
        self._began: dict[int, float] = {}  # round under way -> when it was opened
        self._finished_at = -math.inf  # when the last round was finished
        self._closed_at = now  # when the last round was closed
        self.checkpoint = Checkpointing(
            desk.append,
            self._write_checkpoint,
            desk.is_last,
            tries=desk.policy.last_checkpoint_tries,
            pause_s=desk.policy.round.grace_s,
        )
        self.first_round_open = False  # a round was opened since this gateway began
        self.ask_again_at: float | None = None
        self.stall = ""  # why the round cannot go on, "" while it can
        self._why_closing = ""  # the verdict on the round that is trained; "": it stays open

    def use_topology(self, topology: Topology) -> None:
        """Reduce in another topology. No task is under way."""
        self._topology = topology
        self.leases.use_topology(topology)

    # --- a round's life ---------------------------------------------------------------------------------------

    @property
    def may_open(self) -> bool:
        """Whether the next round could begin, as far as the rounds before it are concerned."""
        state = self._desk.state
        return state.open is None and self._desk.goes_on_after(state.round)

    @property
    def ended(self) -> OpenRound | None:
        """The round that is closed and not finished."""
        state = self._desk.state
        if state.closing is not None:
            return state.closing
        ends = self.checkpoint.pending or self._topology.busy
        return state.open if ends else None

    @property
    def trained(self) -> OpenRound | None:
        opened = self._desk.state.open
        return None if opened is self.ended else opened

    def open(self, now: float) -> None:
        """Begin the next round with every ready worker."""
        state = self._desk.state
        self.first_round_open = True
        number = (state.round if state.open is None else state.open.round) + 1
        self._began[number] = now
        self._desk.append(
            RoundStarted(round=number, version=state.version, workers=len(self._topology.able_workers())),
        )
        self.leases.begin(now)

    def advance(self, now: float, evaluated: Collection[int] = ()) -> int | LeaseMark | None:
        """Hand out free leases, and close the round when it is due; `evaluated`: versions whose evaluation goes on.

        Returns the round whose parameters now exist (`outer_step_done` is to follow), or where to go back to when
        everything trained since is lost.
        """
        self.ask_again_at, self.stall = None, self.checkpoint.stall
        self.leases.release_leaving()
        self.checkpoint.go_on(now)
        ended = self.ended
        if ended is not None and self._topology.busy:
            outcome = self._reduce(ended, now)
            if outcome is not None:
                return outcome
        trained = self.trained
        if trained is not None:
            self._train(trained, now)
            # A worker with a lease ahead has no version that could be evaluated before the next one.
            if trained is self.trained and self._desk.state.version not in evaluated:
                self.leases.give_early(trained, now)
        return None

    def _train(self, opened: OpenRound, now: float) -> None:
        limits = self._desk.policy.round
        self.leases.hand_out(opened, now)
        if self._desk.state.closing is not None or not self._topology.may_close:
            return
        decide = self._topology.overlap.decide
        verdict = decide(self.leases.view(opened), limits, now)
        if verdict.action is RoundAction.REASSIGN:
            self.leases.reassign(opened, now)
            verdict = decide(self.leases.view(opened), limits, now)
        if verdict.action is RoundAction.CLOSE:
            self._close_when_answered(opened, verdict.why, now)
            return
        self.ask_again_at = verdict.ask_again_at
        if verdict.stalled:
            self.stall = f"round {opened.round}: {verdict.why}"

    def _close_when_answered(self, opened: OpenRound, why: str, now: float) -> None:
        """Close the round, once workers that still train have sent the steps they have, where these count."""
        self._why_closing = self._why_closing or why
        self.ask_again_at = self.leases.finish(opened, now)
        if self.ask_again_at is None:
            why, self._why_closing = self._why_closing, ""
            self._close(opened, why, now)

    def _close(self, opened: OpenRound, why: str, now: float) -> None:
        overlap, goes_on = self._topology.overlap, self._desk.goes_on_after(opened.round)
        self._closed_at = now
        self.leases.end(opened, why, now, carries=overlap.carries and goes_on)
        if overlap.overlaps and self._desk.goes_on_after(opened.round):
            self.open(now)
        self._topology.begin(opened, why, now)

    def _reduce(self, ended: OpenRound, now: float) -> int | LeaseMark | None:
        """Go on with the reduction; see `advance`."""
        match self._topology.settle(ended, now):
            case ReductionOutcome.WAIT:
                self.stall = self._topology.stall
            case ReductionOutcome.DONE:
                return ended.round
            case ReductionOutcome.RETRY:
                self.leases.withdraw_lost(ended, now)
                if ended.contributions:
                    self.leases.orphans_to_pool(ended, "its results do not count")
                    self._topology.begin_again(ended, now)
                else:
                    began = self._topology.give_up()
                    return None if self._desk.state.closing is None else began
        return None

    def outer_step_done(self, round_: int, now: float, needed: tuple[int, ...]) -> RoundMetrics | None:
        """New parameters exist; `needed` are the older versions that are still evaluated.

        Returns the round's metrics when no checkpoint is due; otherwise `checkpoint_done` will.
        """
        self.leases.synchronised(now - self._closed_at)
        self._topology.made(round_, needed)
        self._topology.announce(round_)
        if self._desk.checkpoint_due(round_):
            self.checkpoint.begin()
            return None
        return self._finish(durable=False, now=now)

    def _write_checkpoint(self) -> int:
        """Have the ended round written; it is finished after that, or after giving up."""
        state = self._desk.state
        self._desk.out.append(e.WriteCheckpoint(state.mark(), self._guard.protected()))
        return state.round + 1

    def checkpoint_done(self, now: float) -> RoundMetrics:
        """The checkpoint is written."""
        self.checkpoint.done()
        return self._finish(durable=True, now=now)

    def checkpoint_lost(self, reason: str, now: float) -> RoundMetrics | None:
        """The checkpoint could not be written; while it is tried again this returns None."""
        return None if self.checkpoint.lost(reason, now) else self._finish(durable=False, now=now)

    def _finish(self, *, durable: bool, now: float) -> RoundMetrics:
        state = self._desk.state
        ended = state.under_way(state.round + 1)
        # Where rounds overlap, the time until the end of the one before it is that one's.
        began = max(self._began.pop(ended.round), self._finished_at)
        self._finished_at = now
        finished = finished_record(
            ended,
            state.tokens_total,
            now - began,
            durable=durable,
            merged=merged_metrics(ended, self._desk.policy.outer, self._topology),
        )
        self._desk.append(finished)
        self._topology.finished(ended.round)
        return metrics_of(finished, self._desk.policy.inner_steps)

    # --- losses -----------------------------------------------------------------------------------------------

    def withdraw_lost(self, now: float) -> None:
        """Withdraw the contributions a lost worker held; a reduction under way handles the loss itself."""
        if self.trained is not None:
            self.leases.withdraw_lost(self.trained, now)

    def rolled_back(self, mark: LeaseMark, reason: str, now: float) -> None:
        """The run went back to an earlier round; nothing is under way."""
        self._began.clear()
        self._why_closing = ""
        self.leases.void(reason, now)
        self._topology.went_back(mark.round)

    def wait(self, worker: Trainer) -> Wait | None:
        """Return until when a worker has to show progress; None while it has nothing to do."""
        waits = (self.leases.wait(worker), self._topology.wait(worker.session))
        return min((wait for wait in waits if wait is not None), key=lambda wait: wait.until, default=None)
