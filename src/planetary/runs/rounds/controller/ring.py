"""The ring topology at the controller: reducing groups, their outcomes, and the holders of each outer state.

The controller sees no deltas. It tells the workers with the round's parameters to reduce (`Reduce`), and waits until
each has answered or is lost. The order names each worker's results and their weights: the sum is that of the
contributions in the journal. A worker that lacks a result it reported refuses, and is lost.

Most of the live workers decide, by equal digests: the reduction commits on all or none, so a failed worker only missed
the end. Where fewer say so, they may be wrong or lie: they get the next outer state from others, and their results do
not count. The others try again, in a new group of the ring's master, without the deltas of the lost ones.

The outer state (master parameters and velocity) is with the workers. The gateway gets it from one of them when a
checkpoint is due or a newcomer needs it. When every worker that had it is gone, the run goes back to the version the
gateway has.

Repeated failures to reduce mean unreachable workers, perhaps behind a router with address translation. The ring then is
`unfit`, and the run goes on in a star from the newest outer state the gateway can get. So it is when the workers have
different outer states and none has most, or when most say that the outer step fails: the gateway of a star sees who is
right, and no worker's word ends the run.

With overlap the next round is trained meanwhile, and closes when the previous round is finished and every worker has
the parameters (`may_close`): one reduction at a time, and newcomers get theirs while nothing is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import msgspec

from planetary.core.configuration.needs import Need
from planetary.fleet.controller.stalls import Wait
from planetary.fleet.protocol.events import DropAttachment
from planetary.machine.events import Received
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.topology import ReductionOutcome, Topology
from planetary.runs.rounds.events import KeepOuterState, OuterStateOf
from planetary.runs.rounds.records import DigestsDiffered, LeaseMark, ReduceRetried, RoundClosed
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.state import OpenRound

_FIRST_PAUSE_S = 0.1


class _Attempt(msgspec.Struct):
    """One reduction under way."""

    round: int
    number: int
    sessions: tuple[int, ...]
    waiting: set[int]  # sessions that have not answered
    done: dict[int, str]  # session -> digest
    began_at: float
    overflows: set[int] = msgspec.field(default_factory=set)  # sessions whose outer step was not finite
    reason: str = ""  # reason of the first failure
    failed_at: float | None = None  # when the first worker answered that it failed
    half_at: float | None = None  # when half of the workers had answered that they are done


_OF_STAR = 'only the star has an effect of it: set sync.topology = "star"'
_UNSEEN = "the gateway of a ring sees no contribution"


class Ring(Topology):
    """The topology in which workers reduce their deltas among themselves.

    Attributes:
        held: the version the gateway has.
        again_at: when the next attempt may begin; None: at any time.
        attempts: that were begun.
        groups: that were formed for them.
    """

    name = "ring"
    in_ring = True
    result = "held"
    fixed_step = (
        "in a ring workers hold the outer state, which a worker that loads another step loses: resume the run with "
        '--set, or train with sync.topology = "star"'
    )
    without: ClassVar[Mapping[str, str]] = {
        "outer.judge": f"{_UNSEEN}, and judges none",
        "outer.trimmed": f"{_UNSEEN}, and cuts off no values",
        "outer.weights": "a ring weighs contributions by their tokens",
        **dict.fromkeys(
            ("sync.compression", "sync.broadcast_compression", "sync.start_compression"),
            f"{_OF_STAR}, or sync.ring_compression",
        ),
        **dict.fromkeys(("sync.fragments", "sync.delay", "sync.mixing", "sync.grace_steps"), _OF_STAR),
    }
    needs = (
        Need("sync.compression", "only the star compresses; begin with --preset ring", among=("none",)),
        Need(
            "outer.merge",
            "the workers of a ring sum their shares, and no worker sees one of them alone; the star has them all",
            having="in_ring",
        ),
    )

    def __init__(self, desk: RoundsDesk) -> None:
        """The gateway has the outer state of the desk's version, and no worker has any."""
        super().__init__(desk)
        policy = desk.policy.ring
        assert policy is not None
        self._policy = policy
        self._why = ""  # why the round that is reduced was closed
        self._held_by: dict[int, int] = {}  # accepted task -> session with the tensors
        version = desk.state.version
        self.held = version
        self._marks: dict[int, LeaseMark] = {version: desk.state.mark()}
        self._digests: dict[int, str] = {version: policy.start_digest}
        self._attempt: _Attempt | None = None
        self.attempts = self.groups = 0
        self._group: tuple[int, ...] = ()  # sessions of the newest group; empty: the next attempt gets a new one
        self._reduced_by = 0  # workers that took part in the newest reduction
        self._in_a_row = 0  # attempts that failed without a lost worker
        self._unclosed = ""  # why the ring cannot be closed; "": it may be
        self._collecting = 0  # the round whose outer state must reach the gateway before the round is finished
        self._asked = (0, -1)  # session asked for the outer state, and the version
        self._asked_at = 0.0  # when
        self._told: list[tuple[str, str]] = []  # workers with other outer states and reasons, for `take_refused`
        self._bereft_since: float | None = None  # start of the time without a worker with the newest outer state
        self.again_at: float | None = None

    # --- contributions ----------------------------------------------------------------------------------------

    def accept(self, worker: Trainer, task: int, attachment: int) -> None:
        """The worker keeps the result until the reduction."""
        self._held_by[task] = worker.session

    def lost(self, ended: OpenRound) -> dict[int, str]:
        """Results of workers that are gone, or whose parameters turned out to be others."""
        tasks = {}
        for contribution in ended.contributions:
            holder = self._desk.workers.get(self._held_by[contribution.task])
            if holder is None or holder.version < 0:
                del self._held_by[contribution.task]
                tasks[contribution.task] = "the worker that held it was lost"
        return tasks

    # --- reducing ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a round's reduction has begun and is not settled."""
        return self._attempt is not None or self._collecting > 0 or self.again_at is not None or bool(self._unclosed)

    @property
    def may_close(self) -> bool:
        """With overlap every worker must have the parameters the next outer step starts from."""
        return not self.overlap.overlaps or all(w.version == self._desk.state.version for w in self._participants())

    def begin(self, ended: OpenRound, why: str, now: float) -> None:
        """Every worker with the newest parameters takes part."""
        self._why = why
        self.begin_again(ended, now)

    def begin_again(self, ended: OpenRound, now: float) -> None:
        desk = self._desk
        sessions = tuple(w.session for w in self._partners())
        own: dict[int, dict[int, int]] = {session: {} for session in sessions}
        for contribution in ended.contributions:
            holder = self._held_by[contribution.task]
            own.setdefault(holder, {})[contribution.task] = contribution.tokens
        strangers = [w for w in desk.all_workers() if w.session in own and w.session not in sessions]
        for worker in strangers:  # they changed their word about their version: their results do not count
            worker.version = -1
        if len(own) > len(sessions):
            self.again_at = now
            return
        if sessions != self._group:
            self._group = sessions
            self.groups += 1
        self.attempts += 1
        self.again_at = None
        self._attempt = _Attempt(ended.round, self.attempts, sessions, set(sessions), {}, now)
        for session in sessions:
            desk.send(
                session,
                rm.Reduce(
                    round=ended.round,
                    attempt=self.attempts,
                    group=self.groups,
                    peers=len(sessions),
                    own=own[session],
                    contributions=len(ended.contributions),
                    tokens=ended.tokens,
                ),
            )

    def take(self, worker: Trainer, event: Received, now: float) -> bool:
        match message := event.message:
            case rm.ReduceDone():
                self._done(worker, message, now)
            case rm.ReduceFailed():
                self._failed(worker, message, now)
            case rm.RingState():
                self._uploaded(worker, message, event)
            case _:
                return False
        return True

    def _done(self, worker: Trainer, message: rm.ReduceDone, now: float) -> None:
        """A worker has taken the outer step."""
        attempt = self._attempt
        if attempt is not None and attempt.number == message.attempt and worker.session in attempt.waiting:
            attempt.waiting.discard(worker.session)
            attempt.done[worker.session] = message.digest
            if attempt.half_at is None and 2 * len(attempt.done) >= len(attempt.sessions):
                attempt.half_at = now

    def _failed(self, worker: Trainer, message: rm.ReduceFailed, now: float) -> None:
        """A worker's reduction failed."""
        attempt = self._attempt
        if attempt is None or attempt.number != message.attempt or worker.session not in attempt.waiting:
            return
        attempt.waiting.discard(worker.session)
        attempt.reason = attempt.reason or f"{worker.worker}: {message.reason}"
        if attempt.failed_at is None:
            attempt.failed_at = now
        if message.kind == "numerics":
            attempt.overflows.add(worker.session)

    def settle(self, ended: OpenRound, now: float) -> ReductionOutcome:
        outcome = self._settled(now)
        if outcome is ReductionOutcome.DONE:
            self._desk.append(
                RoundClosed(
                    round=ended.round, contributions=len(ended.contributions), why=self._why, peers=self._reduced_by
                )
            )
            for contribution in ended.contributions:
                del self._held_by[contribution.task]
        return outcome

    def _settled(self, now: float) -> ReductionOutcome:
        self.stall = ""
        if self._attempt is not None:
            self._settle_attempt(self._attempt, now)
        if self._attempt is not None:
            return ReductionOutcome.WAIT
        if self._unclosed:
            return self._leave(now)
        if self._collecting:
            return self._collect(now)
        if self.again_at is None:
            return ReductionOutcome.DONE
        if now >= self.again_at:
            return ReductionOutcome.RETRY
        self.stall = f"round {self._desk.state.round + 1}: the workers' reduction failed and is tried again"
        return ReductionOutcome.WAIT

    def give_up(self) -> LeaseMark:
        self.again_at = None
        return self._marks[self._desk.state.version]

    def wait(self, session: int) -> Wait | None:
        """Among several, the collectives' deadlines tell at least one of the failure; the others answer soon after.

        When half say that it succeeded, it ends for the others at about the same time. An outer state may be long on
        its way; it has to begin to arrive.
        """
        attempt, policy, worker = self._attempt, self._desk.policy, self._desk.workers.get(session)
        if session == self._asked[0] and worker is not None and not worker.arriving:
            since = self._asked_at
            return Wait(session, since, since + policy.first_step_s, "did not send its outer state")
        if attempt is None or session not in attempt.waiting:
            return None
        began, failed = attempt.began_at, attempt.failed_at
        if failed is not None:
            return Wait(session, failed, failed + policy.stall_floor_s, "did not answer after a reduction that failed")
        if len(attempt.sessions) > 1:
            half = attempt.half_at
            if half is None:
                return None
            most_s = max(policy.stall_floor_s, policy.stall_steps * (half - began))
            return Wait(session, half, half + most_s, "did not answer after others had ended the reduction")
        return Wait(session, began, began + policy.first_step_s, "did not end its reduction")

    def _settle_attempt(self, attempt: _Attempt, now: float) -> None:
        workers = self._desk.workers
        attempt.waiting.intersection_update(workers)
        if attempt.waiting:
            return
        self._attempt = None
        live = {session: digest for session, digest in attempt.done.items() if session in workers}
        here = sum(session in workers for session in attempt.sessions)
        if len(live) < len(attempt.sessions):
            self._group = ()
        counts = Counter(live[session] for session in sorted(live))
        digest, agreed = counts.most_common(1)[0] if counts else ("", 0)
        if 2 * agreed > here:
            self._reduced_by = len(attempt.sessions)
            self._decide(attempt.round, live, digest)
            return
        for session in live:  # it went on from the state of the round before, whatever it has now
            workers[session].version = -1
        if len(counts) > 1 or 2 * len(attempt.overflows & workers.keys()) > here > 0:
            self._unclosed = self._disputed(attempt, live)
            return
        lost = len(attempt.sessions) > here or bool(live)
        self._in_a_row = 0 if lost else self._in_a_row + 1
        reason = attempt.reason or "every worker that took part was lost"
        self._desk.append(ReduceRetried(round=attempt.round, attempt=attempt.number, reason=reason))
        pause = 0.0 if lost else _FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)
        self.again_at = now + min(pause, self._desk.policy.round.grace_s)
        if self._in_a_row >= self._policy.most_attempts:
            self.again_at = None
            self._unclosed = (
                f"the workers could not reduce their results {self._in_a_row} times in a row; the last time: {reason}. "
                "Do they reach each other (planetary doctor --master on each)?"
            )

    def _leave(self, now: float) -> ReductionOutcome:
        """Give the ring up, once the gateway has the newest outer state or no worker has it."""
        version = self._desk.state.version
        if self.held != version and self._ask(version, now):
            self.stall = f"the gateway gets the parameters of round {version}, to go on in a star"
        else:
            self.unfit = self._unclosed, self._marks[self.held]
        return ReductionOutcome.WAIT

    def _disputed(self, attempt: _Attempt, live: dict[int, str]) -> str:
        """Return why the workers' reports do not tell how a reduction ended."""
        if not live:
            return f"the outer step of round {attempt.round} is not finite: {attempt.reason}"
        names = sorted(self._desk.workers[session].worker for session in live)
        return f"the outer states of {' and '.join(names)} after round {attempt.round} differ, and none is that of most"

    def _decide(self, round_: int, live: dict[int, str], digest: str) -> None:
        """Those of `live` with the digest of most have the new version."""
        desk = self._desk
        for session, found in live.items():
            desk.workers[session].version = round_ if found == digest else -1
        differing = tuple(sorted(desk.workers[s].worker for s, found in live.items() if found != digest))
        if differing:
            self._group = ()
            desk.append(DigestsDiffered(round=round_, workers=differing))
            self._told += [(name, f"its outer state of round {round_} is not that of the others") for name in differing]
        self._in_a_row = 0
        self._keep(round_, desk.state.mark(), digest)
        if desk.checkpoint_due(round_):
            self._collecting = round_

    def _collect(self, now: float) -> ReductionOutcome:
        round_ = self._collecting
        if self.held == round_:
            self._collecting = 0
            return ReductionOutcome.DONE
        if self._ask(round_, now):
            return ReductionOutcome.WAIT
        # Holders died before the state was safe, so it never counted: the remaining deltas are reduced again.
        self._collecting = 0
        del self._marks[round_], self._digests[round_]
        return ReductionOutcome.RETRY

    def keeps(self, worker: Trainer) -> bool:
        """Results wait for the reduction."""
        return worker.session in self._held_by.values()

    def _partners(self) -> list[Trainer]:
        """Return the reducing workers: participants with the newest parameters."""
        version = self._desk.state.version
        return [w for w in self._participants() if w.version == version]

    def _participants(self) -> list[Trainer]:
        """Return the workers whose results are, or will be, in a sum.

        A leaving worker stays until its results are reduced. While it trains it takes every outer step with the others,
        since the next sum, with the worker's result, is added to the following version.
        """
        workers = self._desk.all_workers()
        return [w for w in workers if w.ready and (not w.leaving or w.train is not None or self.keeps(w))]

    def take_refused(self) -> list[tuple[str, str]]:
        told, self._told = self._told, []
        return told

    # --- holders of outer states ------------------------------------------------------------------------------

    def able_workers(self) -> list[Trainer]:
        """Those with the newest parameters."""
        return [w for w in self._desk.ready_workers() if w.version == self._desk.state.version]

    def send_parameters(self, worker: Trainer, version: int) -> None:
        """A worker that is given a task has them."""

    def holds(self, worker: Trainer, task: int) -> bool:
        return self._held_by.get(task) == worker.session

    def can_evaluate(self, worker: Trainer, version: int) -> bool:
        """Without overlap a worker's parameters change under it while it reduces."""
        return worker.version == version and (self.overlap.overlaps or not self.busy)

    def newest(self) -> int:
        workers = self._desk.workers.values()
        return max([self._desk.state.version, *(w.version for w in workers)])

    def ready(self, worker: Trainer, message: rm.Ready) -> None:
        """A worker's outer state counts if the digest is the agreed one."""
        if message.outer_digest and self._digests.get(message.outer_version) == message.outer_digest:
            worker.version = message.outer_version

    def supply(self, now: float) -> LeaseMark | None:
        desk = self._desk
        if self.busy or desk.state.ends:
            self._bereft_since = None  # the newest version is in the making
            return None
        self.stall = ""
        version = desk.state.version
        if self.held == version:
            self._bereft_since = None
            for worker in self._participants():
                if worker.version != version:
                    worker.version = version
                    message = rm.RingState(version=version, digest=self._digests[version])
                    desk.send(worker.session, message, OuterStateOf(version))
            return None
        if any(w.version == version for w in desk.workers.values()):
            self._bereft_since = None
            if any(w.version != version for w in self._participants()):
                self._ask(version, now)
            return None
        # A holder may only have lost the connection.
        self._bereft_since = now if self._bereft_since is None else self._bereft_since
        if now < self._bereft_since + desk.policy.round.grace_s:
            self.stall = f"no worker with the parameters of round {version} is connected"
            return None
        return self._marks[self.held]

    def _uploaded(self, worker: Trainer, message: rm.RingState, event: Received) -> None:
        """Take an outer state from a worker, which may differ from the version the worker claims."""
        desk, version = self._desk, message.version
        if self._asked == (worker.session, version):
            self._asked = (0, -1)
        good = not event.defect and message.digest == self._digests.get(version)
        if good and version > self.held:
            desk.out.append(KeepOuterState(version, event.attachment))
            self.held = version
        else:
            desk.out.append(DropAttachment(event.attachment))
        if not good and worker.version == version:
            worker.version = -1  # it does not have the version it claims

    def went_back(self, version: int) -> None:
        """Holders of the version still have it, and no result counts any more."""
        self._held_by.clear()
        self._marks = {v: mark for v, mark in self._marks.items() if v in (self.held, version)}
        self._digests = {v: digest for v, digest in self._digests.items() if v in (self.held, version)}
        self._bereft_since, self._asked, self._group = None, (0, -1), ()
        for worker in self._desk.workers.values():
            if worker.version != version:
                worker.version = -1

    def restored(self, mark: LeaseMark, digest: str) -> None:
        self.held = mark.round
        self._marks, self._digests = {mark.round: mark}, {mark.round: digest}
        for worker in self._desk.workers.values():
            worker.version = -1

    def next_deadline(self) -> float | None:
        bereft = self._bereft_since
        times = [self.again_at, None if bereft is None else bereft + self._desk.policy.round.grace_s]
        return min((t for t in times if t is not None), default=None)

    def _ask(self, version: int, now: float) -> bool:
        """Have a worker send the outer state, unless one does; false when no worker has it."""
        session, asked = self._asked
        if asked == version and session in self._desk.workers:
            return True
        holders = [w for w in self._desk.ready_workers() if w.version == version]
        if not holders:
            return False
        # Preferably a worker between leases: a result would wait behind the upload.
        holder = next((w for w in holders if w.train is None), holders[0])
        self._asked, self._asked_at = (holder.session, version), now
        self._desk.send(holder.session, rm.SendOuterState(version=version))
        return True

    def _keep(self, version: int, mark: LeaseMark, digest: str) -> None:
        """Remember the newest version; of older ones only those the gateway has or a worker may have."""
        wanted = {self.held, version - 1}
        self._marks = {**{v: k for v, k in self._marks.items() if v in wanted}, version: mark}
        self._digests = {**{v: d for v, d in self._digests.items() if v in wanted}, version: digest}
