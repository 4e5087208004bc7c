"""The controller's part about expert workers: which sketches become work, who does it, and what its results change.

Whoever composes nothing works on experts. The experts' weights and moments live in the payload store, in one stream of
versions per shard and layer; a composer uses the newest that it has, and never waits for the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.fabric import events as e
from planetary.fabric.sessions import WorkerSession
from planetary.moe.mixture_desk import MixtureDesk
from planetary.moe.mixture_events import (
    EndWork,
    ExpertsJudged,
    JudgeExperts,
    LeaseWork,
    QueueWork,
    StoredPayload,
    WeightsOf,
    WorkLeased,
    WorkOf,
)
from planetary.moe.records import ExpertsAdvanced
from planetary.moe.work_queue import Lease, Work
from planetary.wire import messages as m


class Improving(msgspec.Struct):
    """An expert worker's task under way."""

    task: int
    worker: str
    lease: Lease
    before: str  # payload of the experts


class Offload:
    """See the module."""

    def __init__(self, desk: MixtureDesk, updates: dict[str, int]) -> None:
        """Nobody works yet; the queue may hold work of an earlier life. `updates`: counts experts, by what was said."""
        self._desk = desk
        self._updates = updates
        self.improving: dict[int, Improving] = {}  # by session; still there while its result is judged
        self._judging: dict[int, Improving] = {}  # by task
        self._asked: set[int] = set()
        self._may_have_work = desk.policy.plan.offloads
        self._next_task = 1
        self._sketches: dict[tuple[int, int], dict[int, str]] = {}  # lock step: by step and layer, then shard
        self._newest: dict[int, dict[int, tuple[int, str]]] = {}  # by layer and shard: step and payload
        self._sent: dict[tuple[int, int, int], int] = {}  # by session, shard and layer: the version that is there

    def offered(self, message: m.OfferSketches, payload: str) -> bool:
        """A composer has made a sketch; return False where it came too late to be used."""
        plan = self._desk.policy.plan
        held = self._desk.state.experts[message.shard, message.layer]
        if held.version - message.version > plan.window and plan.pace == "free":
            self._count("stale", 1)
            return False
        if plan.training.sketches == "owner":
            self._queue(message.layer, message.shard, message.step, (payload,))
        elif plan.pace == "lockstep":
            found = self._sketches.setdefault((message.step, message.layer), {})
            found[message.shard] = payload
            if len(found) == plan.training.composers:
                payloads = tuple(found[shard] for shard in sorted(found))
                for shard in sorted(found):
                    self._queue(message.layer, shard, message.step, payloads)
                del self._sketches[message.step, message.layer]
        else:
            newest = self._newest.setdefault(message.layer, {})
            newest[message.shard] = (message.step, payload)
            # Composers are not at the same step; what is older than a refresh would mislead more than help.
            near = plan.training.cadence.refresh
            used = [p for _, (s, p) in sorted(newest.items()) if abs(s - message.step) <= near]
            self._queue(message.layer, message.shard, message.step, tuple(used))
        return True

    def hand_out(self, idle: Sequence[WorkerSession]) -> None:
        """Look for work for those who have none."""
        if not self._may_have_work:
            return
        for worker in idle:
            if worker.session not in self.improving and worker.session not in self._asked:
                self._asked.add(worker.session)
                self._desk.out.append(LeaseWork(worker.session, worker.worker, self._busy()))
                return  # one at a time: the next must know what this one is busy with

    def leased(self, event: WorkLeased) -> None:
        """The queue has answered."""
        self._asked.discard(event.session)
        worker = self._desk.workers.get(event.session)
        lease = event.lease
        if lease is None:
            self._may_have_work = False
            return
        place = lease.work.owner, lease.work.layer
        if worker is None or place in self._busy():
            self._desk.out.append(EndWork(lease, ""))
            return
        task, self._next_task = self._next_task, self._next_task + 1
        held = self._desk.state.experts[place]
        self.improving[event.session] = Improving(task, worker.worker, lease, held.payload)
        message = m.ImproveExperts(task=task, shard=place[0], layer=place[1], step=lease.work.step, payload="")
        self._desk.send(event.session, message, WorkOf(lease, held.payload))

    def improved(self, worker: WorkerSession, message: m.ExpertsImproved, attachment: int) -> None:
        """A result has arrived."""
        one = self.improving.get(worker.session)
        if one is None or one.task != message.task:
            self._desk.out.append(e.DropAttachment(attachment))
            return
        self._judging[one.task] = one
        work = one.lease.work
        self._desk.out.append(JudgeExperts(one.task, work.owner, work.layer, one.before, attachment))

    def judged(self, event: ExpertsJudged) -> tuple[int, int] | None:
        """A result was judged; return the shard and layer whose composer is to be told."""
        one = self._judging.pop(event.task, None)
        if one is None:
            return None
        self.improving = {s: i for s, i in self.improving.items() if i is not one}
        self._may_have_work = True
        work = one.lease.work
        held = self._desk.state.experts[work.owner, work.layer]
        self._desk.out.append(EndWork(one.lease, event.payload))
        if event.failed or held.payload != one.before:
            self._count("unusable" if event.failed else "stale", 1)
            return work.owner, work.layer
        self._count("accepted", event.accepted)
        for reason, count in event.refused.items():
            self._count(reason, count)
        self._desk.append(
            ExpertsAdvanced(
                shard=work.owner,
                layer=work.layer,
                version=held.version + 1,
                step=work.step,
                worker=one.worker,
                accepted=event.accepted,
                refused=event.refused,
                payload=event.payload,
                change=event.change,
            )
        )
        return work.owner, work.layer

    def lost(self, session: int) -> None:
        """A worker is gone; a result that it has sent is judged all the same."""
        self._sent = {key: version for key, version in self._sent.items() if key[0] != session}
        self._asked.discard(session)
        one = self.improving.pop(session, None)
        if one is not None and one.task not in self._judging:
            self._desk.out.append(EndWork(one.lease, ""))
            self._may_have_work = True

    def send_experts(self, session: int, shard: int, layer: int) -> None:
        """Send a composer the newest experts of a layer, or what has changed since those that it has got here."""
        held = self._desk.state.experts[shard, layer]
        there = self._sent.get((session, shard, layer))
        self._sent[session, shard, layer] = held.version
        changes = bool(held.change) and there == held.version - 1
        payload = held.change if changes else held.payload
        message = m.UseExperts(
            shard=shard,
            layer=layer,
            version=held.version,
            step=held.step,
            base=held.version - 1 if changes else -1,
            payload=payload,
        )
        self._desk.send(session, message, StoredPayload(payload) if changes else WeightsOf(payload))

    def _queue(self, layer: int, shard: int, step: int, payloads: tuple[str, ...]) -> None:
        self._may_have_work = True
        self._desk.out.append(QueueWork(Work(layer, shard, step, payloads)))

    def _busy(self) -> frozenset[tuple[int, int]]:
        every = [*self.improving.values(), *self._judging.values()]
        return frozenset((one.lease.work.owner, one.lease.work.layer) for one in every)

    def _count(self, what: str, number: int) -> None:
        if number:
            self._updates[what] = self._updates.get(what, 0) + number
