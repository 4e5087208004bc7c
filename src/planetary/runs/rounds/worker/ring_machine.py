"""The pure machine of a worker that trains leases in the ring: reductions and outer states beside the tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from planetary.fleet.protocol import messages as m
from planetary.machine.events import Event, Instruction
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.events import OuterStateOf
from planetary.runs.rounds.worker.events import (
    FollowRing,
    HoldEndParameters,
    LeaveRing,
    ReduceBroke,
    ReduceSucceeded,
    StartReduce,
    TrainingDone,
    UseOuterState,
)
from planetary.runs.rounds.worker.lease_machine import MOST_QUEUED, LeaseMachine, Task

MOST_VERSIONS = 3  # parameter versions: the newest, the one before it, and the one named by a queued task


class RingMachine(LeaseMachine):
    """In the ring: the worker holds results until the controller's message they are reduced.

    Reductions and outer states of the ring have an order of their own beside the tasks: a task waits until the worker
    has the version it names, and for nothing else. With overlap the worker keeps one version more than the newest, so a
    reduction may begin and end while it trains from the older one.
    """

    def __init__(self, ready: rm.Ready, *, progress_every_s: float) -> None:
        super().__init__(ready, progress_every_s=progress_every_s)
        self._of_ring: deque[rm.RingState | rm.SendOuterState | rm.Reduce] = deque()
        self._reducing: rm.Reduce | None = None
        self._outer_version, self._outer_digest = -1, ""  # the outer state that this worker has
        self._versions: tuple[int, ...] = ()  # versions of the parameters here

    def connected(self, session: int, job: m.WorkerJob) -> list[Instruction]:
        assert isinstance(job, rm.TrainingJob)
        assert job.ring is not None
        return [FollowRing(job.ring), *super().connected(session, job)]

    def disconnected(self) -> list[Instruction]:
        self._of_ring.clear()
        self._reducing = None
        return [LeaveRing(), *super().disconnected()]

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        yield from super()._invariants()
        waiting, kept = len(self._of_ring), len(self._versions)
        yield waiting <= MOST_QUEUED, f"it keeps {waiting} orders, of at most {MOST_QUEUED}"
        yield kept <= MOST_VERSIONS, f"it keeps {kept} versions, of at most {MOST_VERSIONS}"
        outer = self._outer_version
        known = outer < 0 or outer in self._versions
        yield known, f"it has the outer state of round {outer}, and the parameters of {self._versions}"
        if self._session is None:
            yield not waiting and self._reducing is None, "it keeps orders of a connection that is over"

    def _greeting(self) -> rm.Ready:
        return replace(self._ready, outer_version=self._outer_version, outer_digest=self._outer_digest)

    def _other(self, event: Event) -> None:
        match event:
            case ReduceSucceeded() if self._is_reduced(event.attempt):
                self._use_outer_state(event.round, event.digest)
                self._reduced(
                    rm.ReduceDone(
                        round=event.round,
                        attempt=event.attempt,
                        digest=event.digest,
                        sent_bytes=event.sent_bytes,
                        received_bytes=event.received_bytes,
                    )
                )
            case ReduceBroke() if self._is_reduced(event.attempt):
                self._reduced(
                    rm.ReduceFailed(round=event.round, attempt=event.attempt, kind=event.kind, reason=event.reason)
                )
            case _:
                pass

    def _other_message(self, message: m.Message) -> None:
        if isinstance(message, rm.RingState | rm.SendOuterState | rm.Reduce):
            self._of_ring.append(message)
            self._next()

    def _next(self) -> None:
        while self._of_ring and self._reducing is None:
            self._begin_of_ring(self._of_ring.popleft())
        super()._next()

    def _begin_of_ring(self, item: rm.RingState | rm.SendOuterState | rm.Reduce) -> None:
        match item:
            case rm.RingState():
                self._use_outer_state(item.version, item.digest)
            case rm.SendOuterState():
                if item.version == self._outer_version:
                    message = rm.RingState(version=item.version, digest=self._outer_digest)
                    self._send(message, OuterStateOf(item.version))
            case rm.Reduce():
                self._reducing = item
                self._out.append(StartReduce(item))

    def _may_begin(self, task: Task) -> bool:
        return task.version in self._versions

    def _trained(self, event: TrainingDone, result: rm.TrainResult) -> None:
        if self._is_wanted(event.task):
            self._out.append(HoldEndParameters(event.task, event.round, event.tokens))
        self._answer(event.task, replace(result, payload="held"))

    def _use_outer_state(self, version: int, digest: str) -> None:
        """The outer state `version` arrived or was made: it is the newest now."""
        wanted = {item.version for item in self._queue}
        assert self._job is not None
        if self._job.ring is not None and self._job.ring.overlap:
            wanted.add(version - 1)  # a task given before may be in flight
        self._versions = (version, *sorted(v for v in self._versions if v < version and v in wanted))
        self._outer_version, self._outer_digest = version, digest
        self._in_use = -1
        self._out.append(UseOuterState(version, self._versions))

    def _is_reduced(self, attempt: int) -> bool:
        return self._reducing is not None and self._reducing.attempt == attempt

    def _reduced(self, answer: m.Message) -> None:
        self._reducing = None
        self._send(answer)
        self._next()
