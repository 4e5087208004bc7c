"""The star: workers send end parameters to the gateway, which judges them, takes the outer step and sends new ones."""

from __future__ import annotations

from planetary.diloco.deltas import Table
from planetary.diloco.judgement import Claim
from planetary.diloco.sanity import CAUTIOUS_RULE, is_cautious
from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.topology import ReductionOutcome, Topology
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.fabric_events import (
    ChangeOf,
    DropAttachment,
    KeepParameters,
    MeasureContributions,
    OuterStepDone,
    ParametersOf,
    TakeOuterStep,
)
from planetary.fabric.protocol.records import ContributionsJudged, Mark, RoundClosed
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import OpenRound


class Star(Topology):
    """See the module. Any ready worker can be sent any version that the gateway keeps.

    A round that closes is measured, judged and stepped: what was refused is withdrawn in between, and when nothing is
    left the round is trained again.
    """

    def __init__(self, desk: RoundsDesk) -> None:
        """See `Topology`."""
        super().__init__(desk)
        self.result = "end_parameters" if desk.policy.compression.up == "none" else "delta"
        self._change = (0, "")  # the newest version that the gateway has as a change, and its digest
        self._attachments: dict[int, int] = {}  # accepted task -> where its tensors are
        self._why = ""  # the round under way closed
        self._measuring = 0  # the round whose contributions the gateway compares; 0: none
        self._table: Table | None = None  # what that gave
        self._refused: dict[int, str] = {}  # tasks whose contributions do not count, and why
        self._told: list[tuple[str, str]] = []  # whose contributions were refused, and why, for `take_refused`
        self._stepping = 0  # the round whose outer step the gateway takes; 0: none
        self._stepped = 0  # the newest whose outer step is taken

    def able_workers(self) -> list[WorkerSession]:
        """See `Topology`."""
        return self._desk.ready_workers()

    def send_parameters(self, worker: WorkerSession, version: int) -> None:
        """See `Topology`."""
        if worker.version == version:
            return
        newest, digest = self._change
        since, worker.version = worker.version, version
        if digest and version == newest == since + 1:
            message = m.Parameters(version=version, since=since, digest=digest)
            self._desk.send(worker.session, message, ChangeOf(version))
        else:
            self._desk.send(worker.session, m.Parameters(version=version), ParametersOf(version))

    def can_evaluate(self, worker: WorkerSession, version: int) -> bool:
        """See `Topology`. A worker in the middle of a lease holds other parameters; it evaluates when it is done."""
        return worker.train is None or worker.version == version

    def accept(self, worker: WorkerSession, task: int, attachment: int) -> None:
        """See `Topology`."""
        self._attachments[task] = attachment

    def lost(self, ended: OpenRound) -> dict[int, str]:
        """See `Topology`: results are here, so that only judging takes them from a round."""
        refused, self._refused = self._refused, {}
        for task in refused:
            self._desk.out.append(DropAttachment(self._attachments.pop(task)))
        return refused

    def take_refused(self) -> list[tuple[str, str]]:
        """See `Topology`."""
        told, self._told = self._told, []
        return told

    @property
    def busy(self) -> bool:
        """See `Topology`."""
        return self._measuring > 0 or self._stepping > 0

    def begin(self, ended: OpenRound, why: str, now: float) -> None:
        """See `Topology`."""
        self._why, self._measuring, self._table = why, ended.round, None
        parts = tuple((task, self._attachments[task]) for task in sorted(c.task for c in ended.contributions))
        self._desk.out.append(MeasureContributions(ended.round, parts))

    def begin_again(self, ended: OpenRound, now: float) -> None:
        """See `Topology`: the contributions that are left count."""
        assert ended.judged is not None
        self._measuring, self._stepping = 0, ended.round
        self._desk.append(RoundClosed(round=ended.round, contributions=len(ended.contributions), why=self._why))
        parts = sorted(self._weights(ended).items())
        contributions = tuple((task, weight, self._attachments.pop(task)) for task, weight in parts)
        self._desk.out.append(TakeOuterStep(ended.round, ended.judged.rule, contributions))

    def _weights(self, ended: OpenRound) -> dict[int, int]:
        """Return what each contribution weighs in the mean, by task: its tokens."""
        return {c.task: c.tokens for c in ended.contributions}

    def settle(self, ended: OpenRound, now: float) -> ReductionOutcome:
        """See `Topology`."""
        if self._measuring:
            if self._table is None:
                return ReductionOutcome.WAIT
            self._judge(ended, self._table)
            if self._refused:
                return ReductionOutcome.RETRY
            self.begin_again(ended, now)
        if self._stepped < self._stepping:
            return ReductionOutcome.WAIT
        self._stepping = 0
        return ReductionOutcome.DONE

    def _judge(self, ended: OpenRound, table: Table) -> None:
        self._table = None
        claims = [Claim(c.task, c.worker, c.loss) for c in ended.contributions]
        state, policy = self._desk.state, self._desk.policy
        judgement = policy.judge(claims, table, state.lengths, policy.rates_of(ended.round))
        self._refused = judgement.refused
        self._told += [(c.worker, self._refused[c.task]) for c in ended.contributions if c.task in self._refused]
        rule = CAUTIOUS_RULE if is_cautious(ended.round, state.retreats) else policy.merge
        self._desk.append(
            ContributionsJudged(round=ended.round, measures=judgement.measures, length=judgement.length, rule=rule)
        )

    def give_up(self) -> Mark | None:
        """See `Topology`: nothing counts, so the round goes on."""
        self._measuring = 0
        return None

    def went_back(self, version: int) -> None:
        """See `Topology`; versions after this one will be others with the same numbers."""
        self._stepped, self._change = version, (0, "")
        for attachment in self._attachments.values():
            self._desk.out.append(DropAttachment(attachment))
        self._attachments.clear()
        for worker in self._desk.workers.values():
            worker.version = -1

    def measured(self, round_: int, table: Table) -> None:
        """See `Topology`."""
        if round_ == self._measuring:
            self._table = table

    def stepped(self, done: OuterStepDone) -> None:
        """See `Topology`."""
        self._stepped, self.delta_norm, self.autocorrelation = done.round, done.delta_norm, done.autocorrelation
        self._change = (done.round, done.change)

    def made(self, round_: int, needed: tuple[int, ...]) -> None:
        """See `Topology`."""
        self._desk.out.append(KeepParameters((*needed, round_)))
