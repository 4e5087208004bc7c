"""The controller's part about expert workers: which sketches become work, who does it, and how results are used.

Workers without a shard improve experts. The experts' weights and moments live in the payload store, in one stream of
versions per shard and layer; a composer uses the newest it has, and never waits for the next. A wholly refused update
makes no version; the composer is answered all the same.

A sketch and its work name the composer's expert version behind the sketch. A sketch more than the window behind is
refused at the offer, at the lease, and at the judgement.

Some work is checked: audited where it is judged, or made by two workers, who must agree. Where there is no second one,
the first one's result is judged alone.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.board import TaskPhase
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.desk import MixtureDesk
from planetary.runs.mixture.controller.events import (
    ExpertsJudged,
    JudgeExperts,
    NothingNew,
    StoredPayload,
    WeightsOf,
    WorkOf,
)
from planetary.runs.mixture.controller.rounds import Composing
from planetary.runs.mixture.controller.tasks import Improving, MixtureBoard
from planetary.runs.mixture.methods.acceptance import Policy, Refusal, lag_refusal
from planetary.runs.mixture.methods.sketch_pools import OfferedSketch, OwnSketches, SketchPool
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import FORGET_STEPS, ExpertsAdvanced, ExpertWork, ExpertWorkEnded, SyncNote

replace = msgspec.structs.replace


ATTEMPTS = 3
"""Expert work fails after so many lost workers and unusable results."""


class JudgedWork(msgspec.Struct, frozen=True):
    """Whose work was judged, and what it claimed falsely; "": nothing."""

    worker: str
    false_claim: str = ""


class WaitingSketches:
    """Sketches without answer yet: the gateway's side of `runs.mixture.composer.machine.SketchWindow`.

    Reports of a composer's steps come ahead of all payloads; so the gateway reports when sketches are too old.

    Args:
        left: shard, layer and step of sketches that wait since an earlier life.
    """

    def __init__(self, left: Iterable[tuple[int, int, int]] = ()) -> None:
        """No composer is connected."""
        self._waiting: dict[tuple[int, int], set[int]] = {}  # steps by shard and layer
        self._arrived: dict[tuple[int, int, int], int] = {}  # newest step by session, shard and layer
        for shard, layer, step in left:
            self._waiting.setdefault((shard, layer), set()).add(step)

    def arrived(self, session: int, shard: int, layer: int, step: int) -> None:
        """A sketch has come on a connection; it is answered unless it `waits`."""
        self._arrived[session, shard, layer] = step

    def waits(self, shard: int, layer: int, step: int) -> None:
        """A sketch becomes work."""
        self._waiting.setdefault((shard, layer), set()).add(step)

    def forget(self, shard: int, step: int, begun: Collection[tuple[int, int, int]]) -> list[int]:
        """Drop a shard's sketches too old after `step` steps; return the affected layers.

        `begun`: shard, layer and step of work under way.
        """
        found = []
        for (owner, layer), waiting in self._waiting.items():
            old = {s for s in waiting if s <= step - FORGET_STEPS and (owner, layer, s) not in begun}
            if owner == shard and old:
                waiting.difference_update(old)
                found.append(layer)
        return found

    def is_waiting(self, shard: int, layer: int, step: int) -> bool:
        """Whether a sketch waits to become, or is, work."""
        return step in self._waiting.get((shard, layer), ())

    def end(self, shard: int, layer: int, step: int) -> bool:
        """End a sketch's wait; return whether it has waited until now."""
        waiting = self._waiting.get((shard, layer), set())
        found = step in waiting
        waiting.discard(step)
        return found

    def lost(self, session: int) -> None:
        """A connection has ended."""
        self._arrived = {key: step for key, step in self._arrived.items() if key[0] != session}

    def report(self, session: int, shard: int, layer: int) -> tuple[int, tuple[int, ...]]:
        """Return the report for a connection: see `SketchWindow.take_report`. A step of -1: none has come."""
        return self._arrived.get((session, shard, layer), -1), tuple(sorted(self._waiting.get((shard, layer), ())))


def _pool_of(plan: MixturePlan) -> SketchPool:
    training = plan.training
    if training.sketches == "owner":
        return OwnSketches()
    return plan.pace.pool(training.composers, training.cadence.refresh)


class Offload:
    """The mixture controller's part for expert workers."""

    def __init__(
        self,
        desk: MixtureDesk,
        board: MixtureBoard,
        owner_of: Callable[[int], Composing | None],
        updates: dict[str, int],
        refused_sketches: dict[str, int],
    ) -> None:
        """Start with the work that the journal has of an earlier life.

        Args:
            desk: of the mixture.
            board: of the mixture.
            owner_of: returns the live composer of a shard.
            updates: counts of experts, by the fate of their updates.
            refused_sketches: counts sketches that were not used, by reason.
        """
        self._desk, self._board, self._owner_of = desk, board, owner_of
        self._updates = updates
        self._refused_sketches = refused_sketches
        self._work: dict[tuple[int, int, int], Improving] = {}  # by shard, layer and step
        self._judging: dict[int, Improving] = {}  # results under judgement, by task
        self._seen: dict[int, deque[str]] = {}  # payloads of the newest sketches, by layer
        self._fitted: dict[tuple[int, int], int] = {}  # progress of the run at the last fit, by shard and layer
        self._pool = _pool_of(desk.policy.plan)
        self._sent: dict[tuple[int, int, int], int] = {}  # version there, by session, shard and layer
        self._waiting = WaitingSketches(desk.state.work)
        for work in desk.state.work.values():
            self._put_on_board(work)

    def unusable(self, session: int, message: mm.OfferSketches) -> None:
        """Answer a composer whose sketch is unusable."""
        if (message.shard, message.layer) in self._desk.state.experts:
            self._waiting.arrived(session, message.shard, message.layer, message.step)
            self.send_experts(session, message.shard, message.layer)

    def offered(self, session: int, message: mm.OfferSketches, payload: str) -> bool:
        """A composer has made a sketch; return False where it came too late to be used."""
        plan = self._desk.policy.plan
        if (message.shard, message.layer) not in self._desk.state.experts:
            return True  # this mixture has no expert workers
        self._waiting.arrived(session, message.shard, message.layer, message.step)
        late = self._late(message.shard, message.layer, message.version)
        if late:
            self._refused_sketches[late] = self._refused_sketches.get(late, 0) + 1
            return False
        self._waiting.waits(message.shard, message.layer, message.step)
        recent = self._seen.setdefault(message.layer, deque(maxlen=2 * plan.training.composers))
        recent.append(payload)
        sketch = OfferedSketch(message.shard, message.layer, message.step, message.progress, message.version, payload)
        for batch in self._pool.add(sketch):
            work = ExpertWork(
                shard=batch.shard,
                layer=sketch.layer,
                step=sketch.step,
                payloads=batch.payloads,
                progress=sketch.progress,
                version=batch.version,
            )
            self._offer(work)
        return True

    def _offer(self, work: ExpertWork) -> None:
        """Put new work on the board, or work of a repeated step with newer experts; remove work that is too old."""
        known = self._work.get(work.key)
        if work.key in self._desk.state.judged:
            self._answer(*work.key)
        elif known is None or (not self._has_begun(known) and known.work.version < work.version):
            if known is not None:
                self._board.forget([known])
            self._desk.append(work)
            self._put_on_board(work)
        for one in list(self._work.values()):
            if not self._has_begun(one) and work.outdates(one.work.key, one.work.progress):
                self._end(one, "old")

    def _put_on_board(self, work: ExpertWork) -> None:
        one = self._work[work.key] = Improving(work)
        twice = self._drawn("redundant", work, self._policy.redundant)
        self._board.offer(one, 1 + twice, ATTEMPTS)

    def _has_begun(self, one: Improving) -> bool:
        return bool(one.first) or self._board.phase(one) is not TaskPhase.WAITING

    def _end(self, one: Improving, why: str) -> None:
        """End work without an update of the experts, and answer the composer."""
        self._board.forget([one])
        shard, layer, step = one.work.key
        del self._work[one.work.key]
        self._desk.append(ExpertWorkEnded(shard=shard, layer=layer, step=step, why=why))
        self._answer(shard, layer, step)

    def _answer(self, shard: int, layer: int, step: int) -> None:
        """End the wait for an answer to a sketch."""
        if self._waiting.end(shard, layer, step):
            self._send_to_owner(shard, layer)

    def _send_to_owner(self, shard: int, layer: int) -> None:
        owner = self._owner_of(shard)
        if owner is not None:
            self.send_experts(owner.session, shard, layer)

    def stepped(self, session: int, shard: int, step: int) -> None:
        """Report to a composer that has taken steps which sketches are too old by now."""
        if not self._desk.policy.plan.pace.sketches_expire:
            return
        layers = self._waiting.forget(shard, step, {one.work.key for one in self._begun()})
        old = [one for one in self._work.values() if one.work.shard == shard and one.work.step <= step - FORGET_STEPS]
        for one in old:
            if not self._has_begun(one):
                self._end(one, "old")
        for layer in layers:
            self.send_experts(session, shard, layer)

    def hand_out(self, present: Sequence[WorkerSession], now: float) -> list[ExpertWork]:
        """Give work to expert workers that have none; return the work that failed in every attempt."""
        failed = [one for one in self._board.take_given_up() if isinstance(one, Improving)]
        for one in failed:
            if one.first:
                self._desk.out.append(e.DropAttachment(one.first))
            self._count("failed", self._experts(*one.work.key[:2]))
            self._end(one, "failed")
        for one in self._work.values():
            if one.first and self._is_waiting(one) and all(worker.worker in one.by for worker in present):
                self._board.settle(one)
                self._judge(one, one.first, 0)
        for worker in present:
            if not self._is_improving(worker.session) and (one := self._next_for(worker)) is not None:
                self._give(one, worker, now)
        return [one.work for one in failed]

    def _next_for(self, worker: WorkerSession) -> Improving | None:
        """Return the work a worker gets: that of which a second result is wanted, or the oldest that is of use."""
        waiting = [one for one in self._work.values() if self._is_waiting(one)]
        for one in waiting:
            if one.first and worker.worker not in one.by:
                return one
        if self._run_is_over:
            return None
        # Two updates of the same version would not both count.
        busy = {one.work.key[:2] for one in self._begun()}
        for one in sorted(waiting, key=lambda one: (one.work.progress, one.work.step, one.work.key)):
            if one.first or one.work.key[:2] in busy:
                continue
            late = self._late(*one.work.key[:2], one.work.version)
            if not late:
                return one
            self._count(late, self._experts(*one.work.key[:2]))
            self._end(one, "stale")
        return None

    def _is_waiting(self, one: Improving) -> bool:
        return self._board.phase(one) is TaskPhase.WAITING

    def _is_improving(self, session: int) -> bool:
        """Whether a worker has expert work, or a result that is being judged."""
        lent = any(loan.kind == "work" for loan in self._board.loans(session))
        return lent or any(one.session == session for one in self._judging.values())

    def improved(self, worker: WorkerSession, message: mm.ExpertsImproved, attachment: int, now: float) -> None:
        """A result has arrived."""
        loan = self._board.loan(worker.session, message.task)
        if loan is None or not isinstance(one := loan.tasks[0], Improving):
            self._desk.out.append(e.DropAttachment(attachment))
            return
        self._board.done(loan, now)
        one.by = (*one.by, worker.worker)
        if self._is_waiting(one):
            one.first = attachment
        elif one.first:
            self._judge(one, one.first, attachment)
        else:
            self._judge(one, attachment, 0)

    def unanswered_sketches(self, shard: int, layer: int) -> tuple[int, ...]:
        """Return the steps of a composer's sketches of a layer that have come and have no answer yet."""
        return self._waiting.report(0, shard, layer)[1]

    def judged(self, event: ExpertsJudged) -> JudgedWork | None:
        """Record a judgement, and answer the shard's composer."""
        one = self._judging.pop(event.task, None)
        if one is None:
            return None
        if event.payload:  # otherwise another worker may try again
            self._waiting.end(*one.work.key)
        judged = self._record(one, event)
        self._send_to_owner(one.work.shard, one.work.layer)
        return judged

    def _record(self, one: Improving, event: ExpertsJudged) -> JudgedWork:
        work = one.work
        if self._run_is_over:
            self._end(one, "over")
            return JudgedWork(one.by[0])
        doubts = dict(event.doubts)
        for reason, why in doubts.items():
            self._desk.append(SyncNote(what=reason, why=f"{' and '.join(one.by)}: {why}"))
        answer = JudgedWork(one.by[0], doubts.get(Refusal.FALSE_CLAIM, ""))
        if event.failed:
            self._count("unusable", self._experts(work.shard, work.layer))
            one.first, one.by = 0, ()
            self._board.failed(one)
            return answer
        self._board.forget([one])
        del self._work[work.key]
        if one.fits:
            self._fitted[work.shard, work.layer] = work.progress + 1
        self._count("accepted", event.accepted)
        for reason, count in event.refused.items():
            self._count(reason, count)
        self._desk.append(
            ExpertsAdvanced(
                shard=work.shard,
                layer=work.layer,
                version=one.version + (event.accepted > 0),
                step=work.step,
                worker=one.by[0],
                accepted=event.accepted,
                refused=event.refused,
                payload=event.payload,
                change=event.change,
            )
        )
        return answer

    def lost(self, session: int) -> None:
        """A connection has ended; a result that came on it is judged all the same."""
        self._sent = {key: version for key, version in self._sent.items() if key[0] != session}
        self._waiting.lost(session)

    def send_experts(self, session: int, shard: int, layer: int) -> None:
        """Send a composer the newest experts of a layer, or their changes to those it got on this connection."""

        def newest() -> tuple[m.Message, e.Payload]:
            held = self._desk.state.experts[shard, layer]
            there = self._sent.get((session, shard, layer), -1)
            self._sent[session, shard, layer] = held.version
            arrived, waiting = self._waiting.report(session, shard, layer)
            message = mm.ExpertsUpdate(
                shard=shard,
                layer=layer,
                version=held.version,
                base=there,
                step=held.step,
                arrived=arrived,
                waiting=waiting,
                payload=held.change,
            )
            if there == held.version:  # an update was refused, or a sketch
                return replace(message, payload=""), NothingNew()
            if held.change and there == held.version - 1:
                return message, StoredPayload(held.change)
            return replace(message, base=-1, payload=held.payload), WeightsOf(held.payload)

        self._desk.send_newest(session, ("experts", shard, layer), newest)

    @property
    def _run_is_over(self) -> bool:
        """The last round's model is made of the experts as they are: nothing may change them any more."""
        return self._desk.state.round >= self._desk.policy.rounds

    @property
    def _policy(self) -> Policy:
        return self._desk.policy.plan.training.acceptance or Policy()

    def _give(self, one: Improving, worker: WorkerSession, now: float) -> None:
        work = one.work
        if not one.first:
            held = self._desk.state.experts[work.shard, work.layer]
            one.before, one.version, one.fits = held.payload, held.version, self._fit_due(work)
        loan = self._board.lend(worker.session, (one,), "work", now)
        one.task, one.session = loan.number, worker.session
        message = mm.ImproveExperts(
            task=one.task, shard=work.shard, layer=work.layer, progress=work.progress, fits=one.fits, payload=""
        )
        self._desk.send(worker.session, message, WorkOf(work, one.before))
        loan.flight.awaits = self._desk.under_way.count(worker.session)

    def _judge(self, one: Improving, first: int, second: int) -> None:
        self._judging[one.task] = one
        work = one.work
        found = JudgeExperts(
            one.task,
            work.shard,
            work.layer,
            one.before,
            first,
            second,
            one.version,
            work.version,
            used=work.payloads,
            fits=one.fits,
            progress=work.progress,
        )
        if self._drawn("audit", work, self._policy.audited):
            other = next((p for p in reversed(self._seen.get(work.layer, ())) if p not in work.payloads), "")
            found = replace(found, audited=True, other=other)
        self._desk.out.append(found)

    def _fit_due(self, work: ExpertWork) -> bool:
        plan = self._desk.policy.plan
        if not plan.training.workers_fit(plan.model):
            return False
        return work.progress + 1 - self._fitted.get((work.shard, work.layer), 0) >= plan.training.cadence.refresh

    def _drawn(self, what: str, work: ExpertWork, share: float) -> bool:
        drawn = hashlib.sha256(
            f"{self._desk.policy.secret}/{what}/{work.step}/{work.shard}/{work.layer}".encode()
        ).digest()
        return int.from_bytes(drawn[:8], "big") < share * 2**64

    def _late(self, shard: int, layer: int, version: int) -> str:
        """Return why a sketch made with that version of experts is not used, or ""."""
        current = self._desk.state.experts[shard, layer].version
        made_with = self._desk.policy.plan.pace.made_with(current, version)
        refusal = lag_refusal(current, made_with, self._policy.window)
        return "" if refusal is Refusal.NONE else refusal.value

    def _experts(self, shard: int, layer: int) -> int:
        """How many experts of a layer a shard has."""
        return self._desk.policy.plan.owners[layer].count(shard)

    def _begun(self) -> list[Improving]:
        return [one for one in self._work.values() if self._has_begun(one)]

    def _count(self, what: str, number: int) -> None:
        if number:
            self._updates[what] = self._updates.get(what, 0) + number
