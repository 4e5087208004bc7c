"""The controller's state, as a fold over the journal's records.

`ControllerState.apply` is the only code that changes it. Connections, progress within a task and
timings are not in it: after a restart every worker is gone, and tasks under way are trained again.
"""

from __future__ import annotations

import msgspec

from planetary.core.configuration.ranges import MOST_FRAGMENTS
from planetary.core.errors import LocalProtocolError
from planetary.fleet.protocol.records import RunStarted, WorkerLeft, WorkerLost
from planetary.machine.journal import Record
from planetary.runs.rounds.fold import NewestWork, TrainingFold
from planetary.runs.rounds.lease_ledger import LeaseLedger, check_ledger
from planetary.runs.rounds.records import (
    ContributionsJudged,
    DeltaAccepted,
    DeltaWithdrawn,
    DigestsDiffered,
    EvalFinished,
    LeaseAssigned,
    LeaseCarried,
    LeaseMark,
    LeaseReturned,
    LeaseStarted,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RoundsResumed,
    RoundStarted,
    StepReplaced,
    WorkerRecovered,
    WorkerSlow,
)
from planetary.sync.judgement import REMEMBERED


class Holding(msgspec.Struct):
    """Who trains a lease."""

    worker: str
    task: int
    started: bool = False
    early: bool = False  # it is of the round after this one


class AcceptedLease(msgspec.Struct):
    """A trained and accepted lease."""

    worker: str
    lease: int
    task: int
    tokens: int
    loss: float
    seconds: float
    grad_norm: float = 0.0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    version_lag: int = 0
    through: int = 0
    more: tuple[int, ...] = ()  # leases trained after `lease`
    untrained: int = 0  # leases of the task the deadline cut off

    stale: int = 0
    share: float = -1.0

    @property
    def leases(self) -> tuple[int, ...]:
        """All that are trained, in order."""
        return (self.lease, *self.more)

    @property
    def weight(self) -> int:
        """Weight in the merged delta, in tokens."""
        return max(1, self.tokens // (1 + self.stale))


class OpenRound(msgspec.Struct):
    """A round under way. Every lease of it is in exactly one of the three collections."""

    round: int
    version: int
    contributions: list[AcceptedLease] = []
    holders: dict[int, Holding] = {}  # lease -> holder
    orphans: list[int] = []  # leases without a holder, ascending
    closed: bool = False
    judged: ContributionsJudged | None = None  # the newest verdict on the contributions

    @property
    def tasks(self) -> int:
        """Number of tasks of this round in the hands of workers."""
        return len({holding.task for holding in self.holders.values() if not holding.early})

    @property
    def early(self) -> list[int]:
        """The leases of the round after this one that are in the hands of workers, ascending."""
        return sorted(lease for lease, holding in self.holders.items() if holding.early)

    @property
    def trained(self) -> int:
        """Number of leases that are trained."""
        return sum(len(c.leases) for c in self.contributions)

    @property
    def tokens(self) -> int:
        """Target tokens that count in this round."""
        return sum(c.tokens for c in self.contributions)

    @property
    def counted(self) -> dict[str, int]:
        """Of a hub: last contributed token of each site to this round."""
        return {c.worker: c.through for c in self.contributions if c.through}

    @property
    def mean_loss(self) -> float:
        """Training loss over the contributions, weighted by tokens; NaN without any."""
        tokens = self.tokens
        return sum(c.loss * c.tokens for c in self.contributions) / tokens if tokens else float("nan")


class ControllerState(TrainingFold):
    """Everything the journal of a run in rounds determines.

    Attributes:
        version: the newest global parameters.
        next_task: number of the next task.
        ledger: which leases are trained, held or free.
        open: the round in training; in lock-step also while the parameters are being made.
        closing: under overlap, the round before it, whose parameters are being made meanwhile.
        durable_round: the newest round with a checkpoint.
        lengths: of the deltas that counted, by round; see `sync.judgement.Judgement`.
        refusals: rounds of which a worker's contribution, held-out loss or outer state was refused, by worker.
        retreats: versions the run went back from because they were of no use.
        slow: why each slow worker is.
        counted: of a hub: each site's tokens since its run began in the newest version, or given up with a useless
            later version.
        values: version -> named set -> metric -> value, beside `evals`.
        steps: digests of the training steps that led to the one in use, which is the last; a roll-back drops the later
            ones.
        inner_state_of: the step that workers' optimizer states belong to: those of equal signature share them.
    """

    version: int = 0
    next_task: int = 1
    ledger: LeaseLedger = msgspec.field(default_factory=LeaseLedger)
    open: OpenRound | None = None
    closing: OpenRound | None = None
    durable_round: int = 0
    lengths: dict[int, float] = msgspec.field(default_factory=dict)
    refusals: dict[str, list[int]] = msgspec.field(default_factory=dict)
    retreats: list[int] = msgspec.field(default_factory=list)
    slow: dict[str, str] = msgspec.field(default_factory=dict)
    counted: dict[str, int] = msgspec.field(default_factory=dict)
    values: dict[int, dict[str, dict[str, float]]] = msgspec.field(default_factory=dict)
    steps: list[str] = msgspec.field(default_factory=list)
    inner_state_of: str = ""

    @property
    def reducing(self) -> int:
        return 0 if self.closing is None else self.closing.round

    @property
    def busy(self) -> set[str]:
        rounds = [one for one in (self.open, self.closing) if one is not None]
        return {holding.worker for one in rounds for holding in one.holders.values()}

    def slowness(self, worker: str) -> str:
        return self.slow.get(worker, "")

    def mark(self) -> LeaseMark:
        """Return the checkpoint's part of the state at the close of a round.

        Untrained leases of the round have been returned by then. Leases of a round in training are free in it: a run
        resumed from the checkpoint trains that round anew.
        """
        ledger, ended = self.ledger.copy(), self.closing or self.open
        if self.closing is not None and self.open is not None:
            for contribution in self.open.contributions:
                for lease in contribution.leases:
                    ledger.retract(lease)
            for lease in list(ledger.held):
                ledger.give_back(lease)
        if ended is None:
            return LeaseMark(self.round, self.tokens_total, self.next_task, ledger, self.counted)
        counted = {**self.counted, **ended.counted}
        return LeaseMark(ended.round, self.tokens_total + ended.tokens, self.next_task, ledger, counted)

    @property
    def ends(self) -> bool:
        """Whether a round is closed and not finished: the parameters exist and are not the run's newest yet."""
        ended = self.closing or self.open
        return ended is not None and ended.closed

    def under_way(self, round_: int) -> OpenRound:
        """Return a round that has begun and is not finished.

        Raises:
            LocalProtocolError: there is none with this number.
        """
        for found in (self.open, self.closing):
            if found is not None and found.round == round_:
                return found
        raise LocalProtocolError(f"round {round_} is not under way after round {self.round}")

    def _apply_own(self, record: Record) -> None:
        match record:
            case RunStarted():
                self.steps, self.inner_state_of = [record.model], record.model
            case StepReplaced():
                _replace_step(self, record)
            case RoundsResumed():
                _resume(self, record)
            case RolledBack():
                counted = self.counted
                _go_back(self, record.mark)
                if record.bad:
                    self.retreats.append(record.bad)
                    self.counted |= counted  # a site never offers again the tokens behind, or after, a bad version
            case ContributionsJudged():
                _judged(self, record)
            case DeltaWithdrawn():
                _withdraw(self, record)
            case RoundStarted():
                _start(self, record)
            case WorkerSlow():
                self.slow[record.worker] = record.reason
            case WorkerRecovered() | WorkerLost() | WorkerLeft():
                self.slow.pop(record.worker, None)
            case LeaseAssigned():
                _assign(self, record)
            case LeaseStarted():
                _holding(self, record.round, record.lease, record.task).started = True
            case LeaseReturned():
                _give_back(self, record)
            case LeaseCarried():
                _carry(self, record)
            case DeltaAccepted():
                work = self.newest.setdefault(record.worker, NewestWork())
                work.loss, work.transfer_s = record.loss, record.transfer_s
                work.version_lag, work.contributed_at = record.version_lag, record.t
                opened = self.under_way(record.round)
                _release(self, record, (record.lease, *record.more, *record.untrained))
                for lease in (record.lease, *record.more):
                    self.ledger.complete(lease)
                for lease in record.untrained:
                    self.ledger.give_back(lease)
                opened.contributions.append(
                    AcceptedLease(
                        record.worker,
                        record.lease,
                        record.task,
                        record.tokens,
                        record.loss,
                        record.seconds,
                        record.grad_norm,
                        record.transfer_s,
                        record.waited_s,
                        record.version_lag,
                        record.through,
                        record.more,
                        len(record.untrained),
                        record.stale,
                        record.share,
                    )
                )
            case RoundClosed():
                self.under_way(record.round).closed = True
            case RoundFinished():
                _finish(self, record)
            case EvalFinished():
                self.values[record.version] = record.values
                for worker in record.wrong:
                    self.refusals.setdefault(worker, []).append(record.version)
            case DigestsDiffered():
                for worker in record.workers:
                    self.refusals.setdefault(worker, []).append(record.round)
            case _:
                pass


_LOST_TASKS = 1000
"""How many numbers of tasks a resumed run leaves out. The journal's last records may be lost with the power of the
gateway's machine, and workers may still answer to tasks that only these records had."""


def contradiction(state: ControllerState) -> str:
    """Return a contradiction between two parts of a state, or "" for a possible state.

    Every held lease is in exactly one round under way, with one holder or none for the moment; a lease behind a
    contribution to such a round is trained. So the leases handed out, those trained, held and returned, sum to zero.
    """
    ledger = state.ledger
    if wrong := check_ledger(ledger):
        return f"the ledger of leases is damaged: {wrong}"
    held: list[int] = []
    for opened in (state.open, state.closing):
        if opened is None:
            continue
        trained = [lease for c in opened.contributions for lease in c.leases]
        leases = [*trained, *opened.holders, *opened.orphans]
        if len(set(leases)) != len(leases):
            return f"round {opened.round} has a lease twice: {sorted(leases)}"
        lost = [lease for lease in trained if lease >= ledger.next or lease in ledger.held or lease in ledger.returned]
        if lost:
            return f"leases {lost} contributed to round {opened.round}, and the ledger says that they are not trained"
        held += [*opened.holders, *opened.orphans]
    if sorted(held) != ledger.held:
        return f"the ledger has the leases {ledger.held} as held, the rounds under way have {sorted(held)}"
    if state.closing is not None and (state.open is None or state.open.round != state.closing.round + 1):
        return f"round {state.closing.round} is being closed, and the round after it is not under way"
    if state.durable_round > state.round + 1:
        return f"round {state.durable_round} has a checkpoint, and the last finished round is {state.round}"
    return ""


def _replace_step(state: ControllerState, record: StepReplaced) -> None:
    if state.open is not None:
        raise LocalProtocolError(f"the training step cannot be replaced while round {state.open.round} is under way")
    if record.round != state.round or record.before != state.steps[-1]:
        raise LocalProtocolError(
            f"the step {record.before[:12]} cannot be replaced after round {record.round}: the run has the step "
            f"{state.steps[-1][:12]} after round {state.round}"
        )
    if record.back and record.model in state.steps:
        del state.steps[state.steps.index(record.model) + 1 :]
    else:
        state.steps.append(record.model)
    state.step = record.model
    if not record.keeps_state:
        state.inner_state_of = record.model


def _start(state: ControllerState, record: RoundStarted) -> None:
    before = state.open
    if before is None:
        allowed = record.round == state.round + 1
    else:  # overlap: the results of the one before are reduced while this one is trained
        allowed = state.closing is None and record.round == before.round + 1 == state.round + 2
    if not allowed:
        raise LocalProtocolError(f"round {record.round} cannot start after round {state.round}")
    state.closing, state.open, state.opened = before, OpenRound(record.round, record.version), record.round


def _holding(state: ControllerState, round_: int, lease: int, task: int) -> Holding:
    holding = state.under_way(round_).holders.get(lease)
    if holding is None or holding.task != task:
        raise LocalProtocolError(f"lease {lease} is not held by task {task}")
    return holding


def _release(state: ControllerState, record: DeltaAccepted | LeaseReturned, leases: tuple[int, ...]) -> None:
    """Take leases from their holder, which has to hold all of them."""
    holders = state.under_way(record.round).holders
    for lease in leases:
        _holding(state, record.round, lease, record.task)
        del holders[lease]


def _assign(state: ControllerState, record: LeaseAssigned) -> None:
    opened = state.under_way(record.round)
    for lease in (record.lease, *record.more):
        if lease in opened.orphans:
            opened.orphans.remove(lease)
        elif state.ledger.take() != lease:
            raise LocalProtocolError(f"lease {lease} is not the next one to hand out")
        opened.holders[lease] = Holding(record.worker, record.task, early=record.early)
    state.next_task = record.task + 1
    state.newest.setdefault(record.worker, NewestWork()).round = record.round


def _carry(state: ControllerState, record: LeaseCarried) -> None:
    holding = _holding(state, record.round, record.lease, record.task)
    if state.open is None or state.open.round != record.to:
        raise LocalProtocolError(f"lease {record.lease} cannot go on for round {record.to}, which is not open")
    del state.under_way(record.round).holders[record.lease]
    holding.early = False
    state.open.holders[record.lease] = holding


def _give_back(state: ControllerState, record: LeaseReturned) -> None:
    opened, leases = state.under_way(record.round), (record.lease, *record.more)
    if record.task:
        _release(state, record, leases)
    else:
        opened.orphans = [lease for lease in opened.orphans if lease not in leases]
    if record.to == "round":
        opened.orphans = sorted([*opened.orphans, *leases])
        return
    for lease in leases:
        state.ledger.give_back(lease)


def _judged(state: ControllerState, record: ContributionsJudged) -> None:
    opened = state.under_way(record.round)
    workers = {c.task: c.worker for c in opened.contributions}
    if sorted(workers) != sorted(measure.task for measure in record.measures):
        raise LocalProtocolError(f"the contributions judged are not those of round {record.round}")
    opened.judged = record
    if record.length > 0:
        lengths = {**state.lengths, record.round: record.length}
        state.lengths = {number: lengths[number] for number in sorted(lengths)[-REMEMBERED * MOST_FRAGMENTS :]}
    for measure in record.measures:
        if measure.refused:
            state.refusals.setdefault(workers[measure.task], []).append(record.round)


def _withdraw(state: ControllerState, record: DeltaWithdrawn) -> None:
    opened = state.under_way(record.round)
    kept = [c for c in opened.contributions if c.task != record.task]
    if len(kept) == len(opened.contributions):
        raise LocalProtocolError(f"task {record.task} contributed nothing that could be withdrawn")
    opened.contributions = kept
    for lease in (record.lease, *record.more):
        state.ledger.retract(lease)
    opened.orphans = sorted([*opened.orphans, record.lease, *record.more])


def _finish(state: ControllerState, record: RoundFinished) -> None:
    ended = state.under_way(record.round)
    if record.tokens_total != state.tokens_total + ended.tokens:
        raise LocalProtocolError(
            f"round {record.round} ended with {record.tokens_total} tokens of the run; its contributions have "
            f"{ended.tokens}, the rounds before it {state.tokens_total}"
        )
    state.version = record.round
    state.counted = {**state.counted, **ended.counted}
    if state.closing is not None:
        state.closing = None
    else:
        state.open = None
    if record.durable:
        state.durable_round = record.round


def _resume(state: ControllerState, record: RoundsResumed) -> None:
    state.durable_round = record.mark.round
    _go_back(state, record.mark)
    state.slow.clear()  # no worker is connected
    state.next_task += _LOST_TASKS


def _go_back(state: ControllerState, mark: LeaseMark) -> None:
    state.round = state.version = mark.round
    state.durable_round = min(state.durable_round, mark.round)
    state.tokens_total = mark.tokens_total
    # Task numbers go on: a late answer to a task from before the restart must not look like one of after.
    state.next_task = max(state.next_task, mark.next_task)
    state.ledger = mark.ledger.copy()
    state.counted = dict(mark.counted)
    state.open = state.closing = None
    for table in (state.evals, state.values, state.train_losses):
        for later in [key for key in table if key > mark.round]:
            del table[later]
