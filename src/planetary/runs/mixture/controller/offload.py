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
from collections.abc import Collection, Iterable, Sequence

import msgspec

from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.desk import MixtureDesk
from planetary.runs.mixture.controller.events import (
    EndWork,
    ExpertsJudged,
    JudgeExperts,
    LeaseExpertWork,
    NothingNew,
    QueueWork,
    StoredPayload,
    WeightsOf,
    WorkLeased,
    WorkOf,
    WorkOver,
)
from planetary.runs.mixture.controller.patience import Task
from planetary.runs.mixture.controller.work_queue import ExpertWork, Lease
from planetary.runs.mixture.methods.acceptance import Policy, Refusal, lag_refusal
from planetary.runs.mixture.methods.sketch_pools import OfferedSketch, OwnSketches, SketchPool
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import ExpertsAdvanced, SyncNote

replace = msgspec.structs.replace


FORGET_STEPS = 20
"""Work on sketches that are older by so many steps is dropped (12.10), unless an expert worker has begun it."""


class Improving(msgspec.Struct):
    """An expert worker's task under way.

    Attributes:
        before: payload of the experts.
        version: theirs.
        twice: whether two workers make it, one after the other.
        fits: whether surrogates are fitted, too.
        first: attachment of the first one's result; 0: there is none yet.
        by: who has made a result.
    """

    task: int
    lease: Lease
    before: str
    version: int
    twice: bool = False
    fits: bool = False
    first: int = 0
    by: tuple[str, ...] = ()


class JudgedWork(msgspec.Struct, frozen=True):
    """Whose experts were judged, whose work it was, and what it claimed falsely; "": nothing."""

    shard: int
    layer: int
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
        updates: dict[str, int],
        refused_sketches: dict[str, int],
        waiting: Sequence[ExpertWork],
    ) -> None:
        """Start without work under way; the queue may hold work of an earlier life.

        Args:
            desk: of the mixture.
            updates: counts of experts, by the fate of their updates.
            refused_sketches: counts sketches that were not used, by reason.
            waiting: work in the queue.
        """
        self._desk = desk
        self._updates = updates
        self._refused_sketches = refused_sketches
        self.improving: dict[int, Improving] = {}  # work by session; kept until the judgement
        self._half: list[Improving] = []  # wait for another worker to make them, too
        self._judging: dict[int, Improving] = {}  # results under judgement, by task
        self._seen: dict[int, deque[str]] = {}  # payloads of the newest sketches, by layer
        self._fitted: dict[tuple[int, int], int] = {}  # progress of the run at the last fit, by shard and layer
        self._asked: set[int] = set()
        self._may_have_work = bool(desk.state.experts)
        self._changed_since_asked = False  # there may be work the queue's next answer does not contain
        self._next_task = desk.policy.first_task
        self._pool = _pool_of(desk.policy.plan)
        self._sent: dict[tuple[int, int, int], int] = {}  # version there, by session, shard and layer
        self._waiting = WaitingSketches((work.owner, work.layer, work.step) for work in waiting)

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
            self._may_have_work = self._changed_since_asked = True
            work = ExpertWork(sketch.layer, batch.shard, sketch.step, batch.payloads, sketch.progress, batch.version)
            self._desk.out.append(QueueWork(work))
        return True

    def stepped(self, session: int, shard: int, step: int) -> None:
        """Report to a composer that has taken steps which sketches are too old by now."""
        if not self._desk.policy.plan.pace.sketches_expire:
            return
        begun = {(one.lease.work.owner, one.lease.work.layer, one.lease.work.step) for one in self._begun()}
        for layer in self._waiting.forget(shard, step, begun):
            self.send_experts(session, shard, layer)

    def hand_out(self, present: Sequence[WorkerSession]) -> None:
        """Look for work for those of the expert workers who have none."""
        for one in list(self._half):
            others = [worker for worker in present if worker.worker not in one.by]
            free = [w for w in others if w.session not in self.improving and w.session not in self._asked]
            if free:
                self._half.remove(one)
                self._give(one, free[0])
            elif not others:
                self._half.remove(one)
                self._judge(one, one.first, 0)
        if not self._may_have_work or self._asked or self._run_is_over:
            return
        for worker in present:
            if worker.session not in self.improving and worker.session not in self._asked:
                self._asked.add(worker.session)
                self._changed_since_asked = False
                self._desk.out.append(LeaseExpertWork(worker.session, worker.worker, self._busy()))
                return  # one at a time, until the queue has answered: the next must know this one's shard and layer

    def leased(self, event: WorkLeased) -> tuple[int, int] | None:
        """The queue has answered; return the shard and layer whose sketch waited for too long to be used."""
        self._asked.discard(event.session)
        worker = self._desk.workers.get(event.session)
        lease = event.lease
        if lease is None:
            self._may_have_work = self._changed_since_asked
            return None
        place = lease.work.owner, lease.work.layer
        if worker is None or place in self._busy():
            self._desk.out.append(EndWork(lease, ""))
            return None
        if not self._waiting.is_waiting(*place, lease.work.step):  # too old, as the composer knows
            self._desk.out.append(EndWork(lease, "", again=False))
            return None
        late = self._late(*place, lease.work.version)
        if late:
            self._desk.out.append(EndWork(lease, "", again=False))
            self._count(late, self._experts(*place))
            self._waiting.end(*place, lease.work.step)
            return place
        twice = self._drawn("redundant", lease.work, self._policy.redundant)
        held = self._desk.state.experts[place]
        self._give(Improving(0, lease, held.payload, held.version, twice, self._fit_due(lease.work)), worker)
        return None

    def end_work(self, event: WorkOver) -> bool:
        """End a piece of work; return whether the composer waits for an answer."""
        work = event.work
        if event.failed:
            self._count("failed", self._experts(work.owner, work.layer))
        return self._waiting.end(work.owner, work.layer, work.step)

    def improved(self, worker: WorkerSession, message: mm.ExpertsImproved, attachment: int) -> None:
        """A result has arrived."""
        one = self.improving.get(worker.session)
        if one is None or one.task != message.task:
            self._desk.out.append(e.DropAttachment(attachment))
            return
        one.by = (*one.by, worker.worker)
        if one.twice and not one.first:
            one.first = attachment
            del self.improving[worker.session]
            self._half.append(one)
        elif one.first:
            self._judge(one, one.first, attachment)
        else:
            self._judge(one, attachment, 0)

    def unanswered_sketches(self, shard: int, layer: int) -> tuple[int, ...]:
        """Return the steps of a composer's sketches of a layer that have come and have no answer yet."""
        return self._waiting.report(0, shard, layer)[1]

    def unanswered(self) -> set[Task]:
        """Return the work that expert workers have and whose result is not here."""
        return {(s, "work", one.task) for s, one in self.improving.items() if one.task not in self._judging}

    def judged(self, event: ExpertsJudged) -> JudgedWork | None:
        """Record a judgement; the shard's composer is to be answered."""
        one = self._judging.pop(event.task, None)
        if one is None:
            return None
        self.improving = {s: i for s, i in self.improving.items() if i is not one}
        self._may_have_work = self._changed_since_asked = True
        work = one.lease.work
        held = self._desk.state.experts[work.owner, work.layer]
        self._desk.out.append(EndWork(one.lease, event.payload))
        if event.payload:  # otherwise another worker may try again
            self._waiting.end(work.owner, work.layer, work.step)
        if self._run_is_over:
            return JudgedWork(work.owner, work.layer, one.by[0])
        doubts = dict(event.doubts)
        for reason, why in doubts.items():
            self._desk.append(SyncNote(what=reason, why=f"{' and '.join(one.by)}: {why}"))
        answer = JudgedWork(work.owner, work.layer, one.by[0], doubts.get(Refusal.FALSE_CLAIM, ""))
        if event.failed or held.payload != one.before:
            self._count("unusable" if event.failed else "stale", self._experts(work.owner, work.layer))
            return answer
        if one.fits:
            self._fitted[work.owner, work.layer] = work.progress + 1
        self._count("accepted", event.accepted)
        for reason, count in event.refused.items():
            self._count(reason, count)
        self._desk.append(
            ExpertsAdvanced(
                shard=work.owner,
                layer=work.layer,
                version=held.version + (event.accepted > 0),
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
        """A worker is gone; a result it has sent is judged all the same."""
        self._sent = {key: version for key, version in self._sent.items() if key[0] != session}
        self._waiting.lost(session)
        self._asked.discard(session)
        one = self.improving.pop(session, None)
        if one is not None and one.first and one.task not in self._judging:
            self._half.append(one)
        elif one is not None and one.task not in self._judging:
            self._desk.out.append(EndWork(one.lease, ""))
            self._may_have_work = self._changed_since_asked = True

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

    def _give(self, one: Improving, worker: WorkerSession) -> None:
        one.task, self._next_task = self._next_task, self._next_task + 1
        self.improving[worker.session] = one
        work = one.lease.work
        known = {"shard": work.owner, "layer": work.layer, "progress": work.progress}
        message = mm.ImproveExperts(task=one.task, **known, fits=one.fits, payload="")
        self._desk.send(worker.session, message, WorkOf(one.lease, one.before))

    def _judge(self, one: Improving, first: int, second: int) -> None:
        self._judging[one.task] = one
        work = one.lease.work
        found = JudgeExperts(
            one.task,
            work.owner,
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
        return work.progress + 1 - self._fitted.get((work.owner, work.layer), 0) >= plan.training.cadence.refresh

    def _drawn(self, what: str, work: ExpertWork, share: float) -> bool:
        drawn = hashlib.sha256(f"{self._desk.policy.secret}/{what}/{work.key}".encode()).digest()
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

    def _busy(self) -> frozenset[tuple[int, int]]:
        return frozenset((one.lease.work.owner, one.lease.work.layer) for one in self._begun())

    def _begun(self) -> list[Improving]:
        return [*self.improving.values(), *self._half, *self._judging.values()]

    def _count(self, what: str, number: int) -> None:
        if number:
            self._updates[what] = self._updates.get(what, 0) + number
