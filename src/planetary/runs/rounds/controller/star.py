"""The star: workers send end parameters to the gateway, which judges them, takes the outer step and sends new ones."""

from __future__ import annotations

from collections.abc import Sequence

from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol.events import DropAttachment
from planetary.machine.events import Received
from planetary.runs.rounds.changes import Offer, ParametersOf, unchanged
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.topology import ReductionOutcome, Topology
from planetary.runs.rounds.events import KeepParameters, MeasureContributions, OuterStepDone, TakeOuterStep
from planetary.runs.rounds.messages import Parameters
from planetary.runs.rounds.records import ContributionsJudged, LeaseMark, ParametersSent, RoundClosed
from planetary.runs.rounds.sessions import Trainer, TrainInFlight
from planetary.runs.rounds.state import OpenRound
from planetary.sync.deltas import Table
from planetary.sync.judgement import Claim
from planetary.sync.sanity import CAUTIOUS_RULE, is_cautious


class Star(Topology):
    """The topology in which the gateway merges. Any ready worker can be sent any version the gateway keeps.

    A round that closes is collected, measured, judged and stepped: lost or refused results are withdrawn in between,
    and when nothing is left the round is trained again. In lock-step a result counts when the tensors are here, so none
    is collected. With overlap it counts when they begin to arrive: the next lease is trained while they travel.
    """

    name = "star"
    without = dict.fromkeys(
        ("sync.precision", "sync.connections", "sync.ring_order", "sync.ring_compression", "sync.port"),
        'only workers of a ring have an effect of it: set sync.topology = "ring"',
    )

    def __init__(self, desk: RoundsDesk) -> None:
        super().__init__(desk)
        self.result = "end_parameters" if desk.policy.compression.up == "none" else "delta"
        self._unchanged = unchanged(desk.policy.compression, desk.policy.spec.params)
        self._change = (0, self._unchanged)  # the newest version, and the form for workers with the previous version
        self._changed_by: dict[int, int] = {}  # task with a payload in that change -> session of the sender
        self._attachments: dict[int, int] = {}  # accepted task -> place of the tensors
        self._arriving: dict[int, tuple[int, int]] = {}  # accepted task whose tensors are not here -> session, message
        self._unusable: dict[int, str] = {}  # accepted task whose tensors turned out to be of no use -> why
        self._trained_by: dict[int, int] = {}  # accepted task of a round that is not reduced -> session
        self._mark = desk.state.mark()  # mark of the newest version
        self._why = ""  # the round under way closed
        self._collecting = 0  # the round whose contributions are arriving; 0: none
        self._measuring = 0  # the round whose contributions the gateway compares; 0: none
        self._table: Table | None = None  # result of that comparison
        self._refused: dict[int, str] = {}  # tasks whose contributions do not count, and why
        self._told: list[tuple[str, str]] = []  # refused workers and reasons, for `take_refused`
        self._stepping = 0  # the round whose outer step the gateway takes; 0: none
        self._stepped = 0  # the newest whose outer step is taken

    def able_workers(self) -> list[Trainer]:
        """None while the newest version is not yet the run's: the round ends soon."""
        return [] if self._stepped > self._desk.state.version else self._desk.ready_workers()

    def send_parameters(self, worker: Trainer, version: int) -> None:
        if worker.version == version:
            return
        offer = self._offer(worker, version)
        self._desk.send(worker.session, offer.message, offer.payload)
        if offer.why:
            sent = "relay" if offer.message.relay else offer.message.codec or "whole"
            self._desk.append(
                ParametersSent(version=version, form=sent, nbytes=offer.nbytes, why=offer.why, **worker.named)
            )
        worker.version = version
        if worker.train is not None and worker.train.mixes == version:
            worker.train.awaits = self._desk.under_way.count(worker.session)

    def _offer(self, worker: Trainer, version: int) -> Offer:
        """Return the form of a version for a worker."""
        policy, (newest, change) = self._desk.policy, self._change
        if version == 0 and policy.start_digest:
            return start_offer(policy.compression.start, policy.start_digest, policy.spec.params)
        if version == newest == worker.version + 1:
            own = [task for task, session in self._changed_by.items() if session == worker.session]
            return change.offer(version, worker.version, own)
        return change.whole(version, worker.version)

    def lacks_parameters(self, worker: Trainer) -> bool:
        """It is sent them whole."""
        had, worker.version = worker.version, -1
        return had >= 0

    def can_evaluate(self, worker: Trainer, version: int) -> bool:
        """A worker in the middle of a lease holds other parameters; it evaluates when it is done.

        A lease that mixes in a version which was not sent yet waits for it alone, so nothing is put before it.
        """
        train = worker.next or worker.train
        return train is None or (worker.version == version and worker.version >= train.mixes)

    def accept(self, worker: Trainer, task: int, attachment: int) -> None:
        self._attachments[task] = attachment
        self._trained_by[task] = worker.session

    def begins_to_arrive(self, worker: Trainer, train: TrainInFlight, message: int) -> bool:
        if self.overlap.overlaps:
            self._arriving[train.task] = worker.session, message
            self._trained_by[train.task] = worker.session
        return self.overlap.overlaps

    def arrived(self, task: int, event: Received) -> str | None:
        """Another message about the task does not count: the journal has the numbers of the one that began."""
        if self._arriving.get(task) != (event.session, event.message.id):
            return None
        del self._arriving[task]
        if event.defect:
            self._unusable[task] = event.defect
            self._trained_by.pop(task, None)  # nothing may begin from it
            if event.attachment:
                self._desk.out.append(DropAttachment(event.attachment))
        else:
            self._attachments[task] = event.attachment
        return event.defect

    def holds(self, worker: Trainer, task: int) -> bool:
        return self._trained_by.get(task) == worker.session

    def keeps(self, worker: Trainer) -> bool:
        """Results that are arriving."""
        return any(session == worker.session for session, _ in self._arriving.values())

    def lost(self, ended: OpenRound) -> dict[int, str]:
        """Those refused or of no use, and those whose worker was lost before they were here."""
        reasons = {**self._refused, **self._unusable}
        for task, (session, _) in self._arriving.items():
            if session not in self._desk.workers:
                reasons[task] = "the worker that sent it was lost"
        lost = {c.task: reasons[c.task] for c in ended.contributions if c.task in reasons}
        for task in lost:
            for table in (self._refused, self._unusable, self._arriving, self._trained_by):
                table.pop(task, None)
            if task in self._attachments:
                self._desk.out.append(DropAttachment(self._attachments.pop(task)))
        return lost

    def take_refused(self) -> list[tuple[str, str]]:
        told, self._told = self._told, []
        return told

    @property
    def busy(self) -> bool:
        return self._collecting > 0 or self._measuring > 0 or self._stepping > 0

    def begin(self, ended: OpenRound, why: str, now: float) -> None:
        self._why, self._collecting = why, ended.round
        self._measure_complete(ended)

    def begin_again(self, ended: OpenRound, now: float) -> None:
        """The contributions that are left count."""
        if self._collecting:
            self._measure_complete(ended)
        else:
            self._step(ended)

    def _measure_complete(self, ended: OpenRound) -> None:
        """Compare the contributions with each other once all are here."""
        tasks = sorted(c.task for c in ended.contributions)
        if all(task in self._attachments for task in tasks):
            self._collecting, self._measuring, self._table = 0, ended.round, None
            parts = tuple((task, self._attachments[task]) for task in tasks)
            self._desk.out.append(MeasureContributions(ended.round, parts))

    def _step(self, ended: OpenRound) -> None:
        assert ended.judged is not None
        self._measuring, self._stepping = 0, ended.round
        self._desk.append(RoundClosed(round=ended.round, contributions=len(ended.contributions), why=self._why))
        parts = sorted(self._weights(ended).items())
        contributions = tuple((task, weight, self._attachments.pop(task)) for task, weight in parts)
        self._desk.out.append(TakeOuterStep(ended.round, ended.judged.rule, contributions))

    def _weights(self, ended: OpenRound) -> dict[int, int]:
        """Return the weight of each contribution in the mean, by task: the tokens."""
        return {c.task: c.weight for c in ended.contributions}

    def settle(self, ended: OpenRound, now: float) -> ReductionOutcome:
        if self._collecting:
            if self._is_short_of(ended):
                return ReductionOutcome.RETRY
            self._measure_complete(ended)
            return ReductionOutcome.WAIT
        if self._measuring:
            if self._table is None:
                return ReductionOutcome.WAIT
            self._judge(ended, self._table)
            if self._refused:
                return ReductionOutcome.RETRY
            self._step(ended)
        if self._stepped < self._stepping:
            return ReductionOutcome.WAIT
        self._stepping = 0
        self._mark = self._desk.state.mark()
        for contribution in ended.contributions:
            del self._trained_by[contribution.task]
        return ReductionOutcome.DONE

    def _is_short_of(self, ended: OpenRound) -> bool:
        """Whether a contribution that has not arrived never will, or was of no use."""
        return any(
            c.task in self._unusable or self._arriving.get(c.task, (0, 0))[0] not in {0, *self._desk.workers}
            for c in ended.contributions
        )

    def _judge(self, ended: OpenRound, table: Table) -> None:
        self._table = None
        state, policy = self._desk.state, self._desk.policy
        shares = self._shares(ended)
        claims = [Claim(c.task, c.worker, c.loss, shares[c.task]) for c in ended.contributions]
        history = [state.lengths[number] for number in policy.rounds_like(ended.round, state.lengths)]
        judgement = policy.judge(claims, table, history, policy.rates_of(ended.round))
        self._refused = judgement.refused
        self._told += [(c.worker, self._refused[c.task]) for c in ended.contributions if c.task in self._refused]
        rule = CAUTIOUS_RULE if is_cautious(ended.round, state.retreats) else policy.merge
        self._desk.append(
            ContributionsJudged(round=ended.round, measures=judgement.measures, length=judgement.length, rule=rule)
        )

    def _shares(self, ended: OpenRound) -> dict[int, float]:
        """Return the inner steps behind each contribution against the usual ones, by task.

        Of fragments, against the most of this round: after a resume all workers have few.
        """
        if not self.overlap.keeps_values:
            return {c.task: len(c.leases) / self._desk.policy.length.parts for c in ended.contributions}
        most = max((c.share for c in ended.contributions), default=0.0)
        return {c.task: c.share / most if most > 0 else 1.0 for c in ended.contributions}

    def give_up(self) -> LeaseMark | None:
        """Nothing counts, so the round goes on, or with overlap the run goes back to the round's start."""
        self._collecting = self._measuring = 0
        return self._mark

    def went_back(self, version: int) -> None:
        """Versions after this one will be others with the same numbers."""
        self._stepped, self._change, self._changed_by = version, (0, self._unchanged), {}
        self._collecting = self._measuring = self._stepping = 0
        for table in (self._arriving, self._unusable, self._trained_by, self._refused):
            table.clear()
        for attachment in self._attachments.values():
            self._desk.out.append(DropAttachment(attachment))
        self._attachments.clear()
        for worker in self._desk.workers.values():
            worker.version = -1

    def measured(self, round_: int, table: Table) -> None:
        if round_ == self._measuring:
            self._table = table

    def stepped(self, done: OuterStepDone) -> None:
        self._stepped, self.delta_norm, self.autocorrelation = done.round, done.delta_norm, done.autocorrelation
        self._change = done.round, done.change
        self._changed_by = {task: self._trained_by[task] for task in done.change.tasks}

    def made(self, round_: int, needed: tuple[int, ...]) -> None:
        self._desk.out.append(KeepParameters((*needed, round_)))


def start_offer(codec: str, digest: str, specs: Sequence[TensorSpec]) -> Offer:
    """Return the offer of the initial parameters in a codec, whose bytes have this digest."""
    from planetary.sync.payload import PayloadForm  # a node manager loads this module, and no codec

    nbytes = PayloadForm(codec, specs).spec.nbytes
    message = Parameters(version=0, digest=digest, codec=codec)
    return Offer(message, ParametersOf(0), nbytes, "initial parameters")
