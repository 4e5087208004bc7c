"""One board of lent work: tasks wait, are lent to workers and answered, and wait again when a worker is lost.

Pure, and without knowledge of any kind of run. The owner chooses the waiting tasks that a worker gets, and judges the
answer: it offers an answered task again, counts a failure, or forgets the task. A loan has a limit, a multiple of the
measured durations of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from planetary.core.errors import LocalProtocolError
from planetary.machine.state_table import Table, advance
from planetary.machine.task_times import InFlight, TaskTimes

TaskT = TypeVar("TaskT")


class TaskPhase(StrEnum):
    """The state of a task."""

    WAITING = "waiting"  # a worker is wanted
    LENT = "lent"
    ANSWERED = "answered"  # the owner judges the answers


TASK: Table = {
    (TaskPhase.WAITING, "lend"): TaskPhase.LENT,
    (TaskPhase.WAITING, "settle"): TaskPhase.ANSWERED,
    (TaskPhase.LENT, "last answer"): TaskPhase.ANSWERED,
    (TaskPhase.LENT, "answer"): TaskPhase.WAITING,  # another worker is to do it, too
    (TaskPhase.LENT, "lost"): TaskPhase.WAITING,
    (TaskPhase.ANSWERED, "offer"): TaskPhase.WAITING,
    (TaskPhase.ANSWERED, "failed"): TaskPhase.WAITING,
}
"""A forgotten task leaves the board from any phase but `LENT`."""


@dataclass(eq=False)
class Loan(Generic[TaskT]):
    """Tasks that a worker has, which it answers together.

    Attributes:
        number: of the loan; no other has it.
        session: of the worker.
        tasks: lent tasks, in the owner's order.
        kind: of tasks whose durations are compared.
        flight: payloads under way to the worker, and since when its answer is waited for.
    """

    number: int
    session: int
    tasks: tuple[TaskT, ...]
    kind: str
    flight: InFlight

    @property
    def since(self) -> float:
        """Monotonic seconds since which the answer is waited for."""
        return self.flight.complete_at


@dataclass
class _Entry:
    wanted: int  # answers
    attempts: float  # failures left
    phase: TaskPhase = TaskPhase.WAITING
    answers: int = 0

    def advance(self, event: str) -> None:
        self.phase = TaskPhase(advance(TASK, self.phase, event))


class TaskBoard(Generic[TaskT]):
    """Tasks and the workers that have them. Tasks are hashable; times are monotonic seconds.

    Payloads in flight extend a limit: a line may be slow. A worker does one task after the other, so an answer to one
    is a sign of life for all its loans.
    """

    def __init__(self, times: TaskTimes, first: int = 1) -> None:
        """Start without a task; `first`: number of the first loan."""
        self.times = times
        self.next_number = first
        self._entries: dict[TaskT, _Entry] = {}
        self._loans: dict[int, Loan[TaskT]] = {}  # by number
        self._arriving: dict[int, set[int]] = {}  # message ids by session
        self._given_up: list[TaskT] = []

    # --- tasks ------------------------------------------------------------------------------------------------

    def offer(self, task: TaskT, wanted: int = 1, attempts: float = math.inf) -> None:
        """Have a task wait for a worker: a new one, or an answered one once more.

        Args:
            task: the task.
            wanted: answers, of one worker after the other.
            attempts: losses and failures after which the task is given up.

        An answered task keeps these two.
        """
        if task in self._entries:
            self._entries[task].advance("offer")
            self._entries[task].answers = 0
        else:
            self._entries[task] = _Entry(wanted, attempts)

    def forget(self, tasks: Iterable[TaskT]) -> None:
        """Remove tasks that are not lent: their answers are used, or not wanted any more."""
        for task in tasks:
            if self.phase(task) is TaskPhase.LENT:
                raise LocalProtocolError(f"the task {task} is lent, and cannot be forgotten")
            self._entries.pop(task, None)

    def failed(self, task: TaskT) -> None:
        """Refuse the answers to a task: it waits for other workers, or is given up after the last attempt."""
        self._entries[task].answers = 0
        self._again(task, "failed")

    def take_given_up(self) -> list[TaskT]:
        """Return the tasks without an attempt left, each once."""
        found, self._given_up = self._given_up, []
        return found

    @property
    def waiting(self) -> list[TaskT]:
        """The tasks without a worker, in the order in which they were first offered."""
        return [task for task, entry in self._entries.items() if entry.phase is TaskPhase.WAITING]

    def phase(self, task: TaskT) -> TaskPhase | None:
        """Return the phase of a task; None: it is not on the board."""
        entry = self._entries.get(task)
        return None if entry is None else entry.phase

    def __iter__(self) -> Iterator[TaskT]:
        return iter(self._entries)

    # --- loans ------------------------------------------------------------------------------------------------

    def lend(self, session: int, tasks: Sequence[TaskT], kind: str, now: float) -> Loan[TaskT]:
        """Give waiting tasks to a worker as one loan."""
        for task in tasks:
            self._entries[task].advance("lend")
        loan = Loan(self.next_number, session, tuple(tasks), kind, InFlight(complete_at=now))
        self._loans[loan.number] = loan
        self.next_number += 1
        return loan

    def loan(self, session: int, number: int) -> Loan[TaskT] | None:
        """Return a worker's loan; None: that worker does not have it, or not any more."""
        loan = self._loans.get(number)
        return loan if loan is not None and loan.session == session else None

    def loans(self, session: int | None = None) -> list[Loan[TaskT]]:
        """Return the loans of a worker, or all, the oldest first."""
        return [loan for loan in self._loans.values() if session in (None, loan.session)]

    def done(self, loan: Loan[TaskT], now: float) -> None:
        """Take note of a worker's answer: the owner judges it, unless answers of other workers are wanted, too."""
        del self._loans[loan.number]
        self.times.observe(loan.session, loan.kind, now - loan.since)
        self._lives(loan.session, now)
        for task in loan.tasks:
            entry = self._entries[task]
            entry.answers += 1
            entry.advance("answer" if entry.answers < entry.wanted else "last answer")

    def settle(self, task: TaskT) -> None:
        """Judge the answers that are here, as no other worker can give one: the waiting task counts as answered."""
        self._entries[task].advance("settle")

    def take_back(self, session: int) -> list[Loan[TaskT]]:
        """Return a worker's loans, which end: the tasks wait for others, or are given up after the last attempt."""
        ended = self.loans(session)
        for loan in ended:
            del self._loans[loan.number]
            for task in loan.tasks:
                self._again(task, "lost")
        return ended

    def lost(self, session: int) -> list[Loan[TaskT]]:
        """A worker is gone: as `take_back`, and nothing of the connection is remembered."""
        self._arriving.pop(session, None)
        self.times.forget(session)
        return self.take_back(session)

    def _again(self, task: TaskT, event: str) -> None:
        entry = self._entries[task]
        entry.advance(event)
        entry.attempts -= 1
        if entry.attempts <= 0:
            del self._entries[task]
            self._given_up.append(task)

    # --- limits -----------------------------------------------------------------------------------------------

    def sent(self, session: int, now: float) -> None:
        """A payload has left the gateway for good."""
        for loan in self.loans(session):
            loan.flight.sent(now)

    def arrives(self, session: int, message: int) -> None:
        """A message with a payload has begun to arrive: an answer, or a message ahead of one."""
        self._arriving.setdefault(session, set()).add(message)

    def arrived(self, session: int, message: int, now: float) -> None:
        """A message is here."""
        if message in (ids := self._arriving.get(session, set())):
            ids.discard(message)
            self._lives(session, now)

    def limits(self) -> Iterator[tuple[Loan[TaskT], float]]:
        """Return until when each loan has to be answered; a connection on which no byte moves ends by itself."""
        for loan in self._loans.values():
            if not loan.flight.awaits and not self._arriving.get(loan.session):
                kinds = {other.kind for other in self.loans(loan.session)}
                yield loan, loan.since + max(self.times.limit_s(loan.session, kind) for kind in kinds)

    def _lives(self, session: int, now: float) -> None:
        for loan in self.loans(session):
            loan.flight.complete_at = now

    def invariants(self, live: Collection[int]) -> Iterator[tuple[bool, str]]:
        """Yield the invariants, each with a sentence for a violation; `live`: sessions of the connected workers."""
        lent = [task for loan in self._loans.values() for task in loan.tasks]
        yield len(set(lent)) == len(lent), "a task is lent twice"
        marked = {task for task, entry in self._entries.items() if entry.phase is TaskPhase.LENT}
        yield marked == set(lent), f"{len(marked)} tasks count as lent, loans have {len(lent)}"
        yield all(loan.session in live for loan in self._loans.values()), "a worker that is gone has tasks"
        yield all(entry.attempts > 0 for entry in self._entries.values()), "a task without an attempt left waits"
        yield all(entry.answers <= entry.wanted for entry in self._entries.values()), "a task has too many answers"
