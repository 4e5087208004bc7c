"""The controller's part about rounds: the end of a round, the report, and the evaluation of the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.task_times import InFlight
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.desk import MixtureDesk
from planetary.runs.mixture.controller.events import AssembleModel, ModelAssembled, StoredPayload
from planetary.runs.mixture.controller.tasks import Evaluating, MixtureBoard
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import ShardKept
from planetary.runs.mixture.status import MixtureMetrics, ShardMetrics
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.runs.rounds.records import CheckpointFailed, CheckpointWritten, EvalFinished, RoundFinished


class Composing(InFlight):
    """A live composer."""

    session: int
    worker: str
    shard: int
    epoch: int
    step: int
    granted: int  # the step it went on from
    progress_at: float
    loss: float | None = None
    step_s: float = 0.0
    surrogate_age: float | None = None  # None: not reported, or no surrogates
    surrogates: dict[int, str] = msgspec.field(default_factory=dict)  # payload by shard: the newest on this connection


class Viewed(msgspec.Struct, frozen=True):
    """How a composer sees the model at the end of a round, and the payload with the routing."""

    mixed: float
    surrogates: float
    payload: str


class MixtureRounds:
    """A round is a number of steps of the run, the mean over all shards; it is finished when every shard's state after
    them is saved.
    """

    def __init__(
        self,
        desk: MixtureDesk,
        board: MixtureBoard,
        composing: Mapping[int, Composing],
        late: Sequence[RoundMetrics] = (),
    ) -> None:
        """`composing`: the live composers by session, which the controller keeps.

        `late`: of rounds that were finished and not reported when the gateway's last life ended.
        """
        self._desk, self._board, self._composing = desk, board, composing
        self._late = list(late)
        self.refused: dict[str, int] = {}  # refusals by reason, since the last round
        self.updates: dict[str, int] = {}  # expert updates since the last round
        self.refused_sketches: dict[str, int] = {}  # refusals since the last round
        self.merges: dict[Tier, list[float]] = {}  # seconds that merges took, since the last round
        self._sketch_bytes: Counter[int] = Counter()  # bytes by shard since the last round
        self._began: float | None = None  # when the first composer began, then at the end of each round
        self._assembling: AssembleModel | None = None  # model to put together, now or later
        self.assemble_at: float | None = None  # monotonic: when the last model is tried again; None: it is not
        self.unassembled = ""  # why that failed
        self._failures = 0  # failures of the last model
        self._parts: frozenset[str] = frozenset()  # payloads of which put together
        self._unreported: dict[int, RoundMetrics] = {}
        self._complete: set[int] = set()  # rounds among these that wait only for an earlier one
        self._views: dict[int, dict[int, Viewed]] = {}  # views of unfinished rounds, by round and shard

    @property
    def under_way(self) -> bool:
        """Whether a finished round's model is still put together or evaluated."""
        return self._assembling is not None or bool(self._evaluations)

    @property
    def _evaluations(self) -> list[Evaluating]:
        return [one for one in self._board if isinstance(one, Evaluating)]

    def payloads(self) -> set[str]:
        """Names of payloads that are or will be put together and evaluated, however long others take."""
        views = {one.payload for of_round in self._views.values() for one in of_round.values()}
        return {one.payload for one in self._evaluations} | views | self._parts

    def began(self, now: float) -> None:
        """Note the time at which the first composer begins."""
        self._began = now if self._began is None else self._began

    def sketched(self, shard: int, nbytes: int) -> None:
        """Count the bytes of a composer's sketch."""
        self._sketch_bytes[shard] += nbytes

    def viewed(self, message: mm.ViewModel, payload: str) -> None:
        """Take a composer's view of the model."""
        round_ = message.progress // self._desk.policy.plan.steps_per_round
        if round_ > self._desk.state.round:
            seen = Viewed(message.mixed_loss, message.surrogate_loss, payload)
            self._views.setdefault(round_, {})[message.shard] = seen

    def has_ended(self, shard: int) -> bool:
        """Whether a shard's last state is there: no step of it is left to take."""
        state, last = self._desk.state, self._desk.policy.rounds
        return state.round >= last or last in state.shards[shard].marks

    def report_all(self) -> None:
        """Report the finished rounds not evaluated yet: the run ends."""
        for round_ in sorted(self._unreported):
            self._report(round_)

    def evaluates(self, session: int) -> bool:
        """Whether a worker evaluates the model of a round."""
        return any(loan.kind == "evaluation" for loan in self._board.loans(session))

    def finish(self, now: float) -> None:
        """Finish the rounds whose states are all there."""
        state, policy = self._desk.state, self._desk.policy
        while self._late:
            metrics = self._late.pop(0)
            self._unreported[metrics.round] = metrics
            if metrics.round < policy.rounds or metrics.round in state.evals:
                self._report(metrics.round)
                continue
            # The last round's states are the newest ones: no step was taken since.
            payloads = tuple(shard.payload for shard in state.shards)
            self._assemble(AssembleModel(metrics.round, payloads, checkpoint=True))
        if self.assemble_at is not None and now >= self.assemble_at and self._assembling is not None:
            self.assemble_at = None
            self._desk.out.append(self._assembling)
        while state.round < policy.rounds and self._assembling is None:
            number = state.round + 1
            marks = [shard.marks.get(number) for shard in state.shards]
            kept = [mark for mark in marks if mark is not None]
            if len(kept) < len(marks):
                return
            losses = [mark.loss for mark in kept if mark.loss is not None]
            seconds = max(now - (self._began if self._began is not None else now), 1e-9)
            tokens = policy.plan.steps_per_round * policy.plan.tokens_per_step * len(marks)
            losses = losses or [self._last_loss()]
            loss = sum(losses) / len(losses)
            busy = sum(mark.compute_s for mark in kept)
            finished = RoundFinished(
                round=number,
                workers=len(marks),
                tokens=tokens,
                tokens_total=state.tokens_total + tokens,
                loss=loss,
                seconds=seconds,
                compute_fraction=min(1.0, busy / (len(marks) * seconds)),
                durable=True,
            )
            self._began = now
            views = self._views.pop(number, {})
            self._unreported[number] = self._metrics(finished, kept, views)
            self._desk.append(finished)
            if policy.eval_due(number) or policy.checkpoint_due(number):
                payloads = tuple(mark.payload for mark in kept)
                seen = tuple(one.payload for one in views.values()) if len(views) == len(kept) else ()
                self._assemble(AssembleModel(number, payloads, policy.checkpoint_due(number), views=seen))
            else:
                self._report(number)

    def _assemble(self, wanted: AssembleModel) -> None:
        state = self._desk.state
        experts = tuple(state.experts_of(shard) for shard in range(len(state.shards))) if state.experts else ()
        self._parts = frozenset((*wanted.shards, *wanted.views, *(name for layers in experts for name in layers)))
        self._assembling = msgspec.structs.replace(wanted, experts=experts)
        self._desk.out.append(self._assembling)

    def _last_loss(self) -> float:
        """Return the loss of a round whose states were all saved by composers that took no step in it."""
        unknown = math.log(self._desk.policy.plan.model.vocab_size)
        return self._desk.state.train_losses.get(self._desk.state.round, unknown)

    def _metrics(self, finished: RoundFinished, kept: Sequence[ShardKept], views: Mapping[int, Viewed]) -> RoundMetrics:
        shards = tuple(
            ShardMetrics(
                loss=mark.loss,
                mixed_loss=views[number].mixed if number in views else None,
                surrogate_loss=views[number].surrogates if number in views else None,
                surrogate_error=shard.surrogate_error,
                surrogate_step=shard.surrogate_step,
                surrogate_age=owner.surrogate_age if owner is not None else None,
                steps=mark.step - shard.round_step,
                sketch_bytes=self._sketch_bytes[number],
            )
            for number, (mark, shard) in enumerate(zip(kept, self._desk.state.shards, strict=True))
            for owner in [next((c for c in self._composing.values() if c.shard == number), None)]
        )
        mixture = MixtureMetrics(
            shards=shards,
            seconds=finished.seconds,
            refused=dict(self.refused),
            merges={tier.value: len(found) for tier, found in self.merges.items()},
            updates=dict(self.updates),
            refused_sketches=dict(self.refused_sketches),
            merge_s={tier.value: sum(found) / len(found) for tier, found in self.merges.items()},
            sketch_bytes=self._sketch_bytes.total(),
        )
        self._sketch_bytes.clear()
        self.merges.clear()
        self.refused.clear()
        self.updates.clear()
        self.refused_sketches.clear()
        return RoundMetrics(
            round=finished.round,
            loss=finished.loss,
            eval_loss=None,
            tokens=finished.tokens,
            tokens_total=finished.tokens_total,
            seconds=finished.seconds,
            workers=finished.workers,
            inner_steps=self._desk.policy.plan.steps_per_round,
            bytes_up=0,
            bytes_down=0,
            tokens_per_s=finished.tokens / finished.seconds,
            compute_fraction=finished.compute_fraction,
            own=mixture,
        )

    def _report(self, round_: int) -> None:
        """A round's metrics are complete; they are written in the order of rounds."""
        self._complete.add(round_)
        while self._unreported and min(self._unreported) in self._complete:
            metrics = self._unreported.pop(min(self._unreported))
            self._complete.discard(metrics.round)
            evaluated = msgspec.structs.replace(metrics, eval_loss=self._desk.state.evals.get(metrics.round))
            self._desk.out.append(e.WriteMetrics(evaluated))

    # --- evaluation -------------------------------------------------------------------------------------------

    def assembled(self, event: ModelAssembled, now: float) -> str:
        """A model was put together, or was not; return why the run cannot end well, or "".

        The last one is the run's result, so it is tried several times; any other has a successor.
        """
        policy = self._desk.policy
        if event.failed and event.round == policy.rounds:
            self._failures += 1
            self.unassembled = event.failed
            self._desk.append(CheckpointFailed(round=event.round, reason=event.failed))
            if self._failures >= policy.last_model_tries:
                return f"the model of the last round could not be put together: {event.failed}"
            self.assemble_at = now + policy.grace_s
            return ""
        self._assembling, self._parts = None, frozenset()
        metrics = self._unreported.get(event.round)
        if event.routing is not None and metrics is not None and metrics.own is not None:
            agreed = {"routing_overlap": event.routing.overlap, "routing_divergence": event.routing.divergence}
            mixture = msgspec.structs.replace(metrics.own, **agreed)
            self._unreported[event.round] = msgspec.structs.replace(metrics, own=mixture)
        if event.failed:
            self._desk.append(CheckpointFailed(round=event.round, reason=event.failed))
        elif event.checkpoint:
            self._desk.append(CheckpointWritten(round=event.round, path=event.checkpoint, seconds=event.seconds))
        if event.failed or not policy.eval_due(event.round):
            self._report(event.round)
            return ""
        self._board.offer(Evaluating(event.round, event.payload))
        return ""

    def hand_out(self, standby: Sequence[int], now: float) -> None:
        """Give each model without an evaluator to a worker; `standby`: sessions without a shard."""
        for one in self._board.waiting:
            if not isinstance(one, Evaluating):
                continue
            # Workers without a shard first; then composers with the fewest steps: the others take more meanwhile.
            composing = sorted(self._composing.values(), key=lambda c: (c.step, c.shard))
            able = [*standby, *(composer.session for composer in composing)]
            session = next((session for session in able if not self.evaluates(session)), None)
            if session is None:
                return
            loan = self._board.lend(session, (one,), "evaluation", now)
            message = mm.EvaluateMixture(task=loan.number, version=one.round, payload=one.payload)
            self._desk.send(session, message, StoredPayload(one.payload))
            loan.flight.awaits = self._desk.under_way.count(session)

    def evaluated(self, worker: WorkerSession, result: mm.MixtureEvaluated, now: float) -> None:
        """Take a result, if it is from who was asked."""
        loan = self._board.loan(worker.session, result.task)
        if loan is None or not isinstance(one := loan.tasks[0], Evaluating):
            return
        self._board.done(loan, now)
        self._board.forget([one])
        self._desk.append(EvalFinished(version=one.round, loss=result.loss, batches=result.batches))
        self._report(one.round)
