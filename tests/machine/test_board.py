"""The board of lent work: random sequences against a plain model of what may happen, and the limits of loans."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from planetary.core.errors import LocalProtocolError
from planetary.machine.board import Loan, TaskBoard, TaskPhase
from planetary.machine.machine import check_invariants
from planetary.machine.task_times import STUCK_FACTOR, TaskTimes

FIRST_S, LEAST_S = 300.0, 30.0


def board(*, apart: bool = True) -> TaskBoard[str]:
    return TaskBoard(TaskTimes(LEAST_S, FIRST_S, apart=apart))


def lent(found: TaskBoard[str], session: int, task: str, now: float = 0.0, kind: str = "k") -> Loan[str]:
    if found.phase(task) is None:
        found.offer(task)
    return found.lend(session, (task,), kind, now)


def limit_of(found: TaskBoard[str], loan: Loan[str]) -> float | None:
    return dict(found.limits()).get(loan)


class World:
    """A board under random calls, and a plain model of it."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.board = TaskBoard[int](TaskTimes(LEAST_S, FIRST_S, apart=seed % 2 == 0), first=10)
        self.now = 0.0
        self.sessions = [1, 2, 3]
        self.offered = 0
        self.answers, self.wanted, self.failures = Counter[int](), dict[int, int](), Counter[int]()
        self.used, self.dropped, self.given_up = set[int](), set[int](), set[int]()
        self.numbers: list[int] = []
        self.old: list[tuple[int, int]] = []  # session and number of loans that ended

    def step(self) -> None:
        self.now += self.source.expovariate(1.0)
        calls = (self.offer, self.lend, self.lend, self.answer, self.answer, self.judge, self.lose, self.forget)
        self.source.choice(calls)()
        check_invariants("the board", self.board.invariants(self.sessions))
        for task in self.board.take_given_up():
            assert task not in self.given_up
            assert self.failures[task] == ATTEMPTS
            self.given_up.add(task)
        for session, number in self.old:
            assert self.board.loan(session, number) is None
        for loan, until in self.board.limits():
            assert until >= loan.since + min(LEAST_S, FIRST_S)
        gone = self.used | self.dropped | self.given_up
        assert set(self.board) == set(range(self.offered)) - gone

    def offer(self) -> None:
        self.wanted[self.offered] = self.source.randint(1, 2)
        self.board.offer(self.offered, self.wanted[self.offered], ATTEMPTS)
        self.offered += 1

    def lend(self) -> None:
        waiting = self.board.waiting
        if waiting:
            tasks = self.source.sample(waiting, min(len(waiting), self.source.randint(1, 3)))
            loan = self.board.lend(self.source.choice(self.sessions), tasks, "k", self.now)
            assert loan.number not in self.numbers
            self.numbers.append(loan.number)

    def answer(self) -> None:
        if loans := self.board.loans():
            loan = self.source.choice(loans)
            self.board.done(loan, self.now)
            self.old.append((loan.session, loan.number))
            self.answers.update(loan.tasks)

    def judge(self) -> None:
        for task in [one for one in self.board if self.board.phase(one) is TaskPhase.ANSWERED]:
            assert self.answers[task] == self.wanted[task]
            if self.source.random() < 0.5:
                self.board.forget([task])
                self.used.add(task)
            else:
                self.failures[task] += 1
                self.answers[task] = 0
                self.board.failed(task)

    def lose(self) -> None:
        session = self.source.choice(self.sessions)
        for loan in self.board.lost(session):
            self.old.append((loan.session, loan.number))
            self.failures.update(loan.tasks)
        self.sessions = [*(one for one in self.sessions if one != session), max(self.sessions) + 1]

    def forget(self) -> None:
        waiting = self.board.waiting
        if waiting and self.source.random() < 0.3:
            self.dropped.add(waiting[0])
            self.board.forget(waiting[:1])


ATTEMPTS = 3


def test_random_sequences_use_drop_or_give_up_each_task_once() -> None:
    """Each task is on the board until it is used, dropped or given up; each loan has one holder and one end."""
    seen = Counter[str]()
    for seed in range(60):
        world = World(seed)
        for _ in range(200):
            world.step()
        seen.update(used=len(world.used), dropped=len(world.dropped), given_up=len(world.given_up))
    assert min(seen.values()) > 20, seen


def test_every_task_ends_when_workers_stay_and_answer() -> None:
    world = World(7)
    for _ in range(150):
        world.step()
    while list(world.board):
        world.now += 1.0
        world.lend()
        for loan in world.board.loans():
            world.board.done(loan, world.now)
        world.board.forget([one for one in world.board if world.board.phase(one) is TaskPhase.ANSWERED])
    assert not world.board.loans()


def test_lost_task_goes_to_another_worker_with_a_new_number() -> None:
    found = board()
    first = lent(found, 1, "a")
    assert found.lost(1) == [first]
    assert found.waiting == ["a"]
    second = found.lend(2, found.waiting, "k", 5.0)
    assert second.number > first.number
    assert found.loan(1, first.number) is None
    assert found.loan(1, second.number) is None
    assert found.loan(2, second.number) is second


def test_second_answer_is_wanted_from_another_loan() -> None:
    found = board()
    found.offer("a", wanted=2)
    found.done(lent(found, 1, "a"), 1.0)
    assert found.phase("a") is TaskPhase.WAITING
    found.done(lent(found, 2, "a"), 2.0)
    assert found.phase("a") is TaskPhase.ANSWERED
    found.offer("b", wanted=2)
    found.done(lent(found, 1, "b"), 3.0)
    found.settle("b")  # no other worker is there
    assert found.phase("b") is TaskPhase.ANSWERED


def test_answered_task_offered_again_keeps_its_attempts() -> None:
    found = board()
    found.offer("a", attempts=2)
    found.done(lent(found, 1, "a"), 1.0)
    found.failed("a")
    found.done(lent(found, 1, "a"), 2.0)
    found.offer("a")
    lent(found, 1, "a")
    found.lost(1)
    assert found.take_given_up() == ["a"]
    assert found.take_given_up() == []
    assert found.phase("a") is None


def test_impossible_steps_are_errors() -> None:
    found = board()
    lent(found, 1, "a")
    with pytest.raises(LocalProtocolError, match=r"'lend' cannot happen in the state .*lent"):
        lent(found, 2, "a")
    with pytest.raises(LocalProtocolError, match="'offer' cannot happen"):
        found.offer("a")
    found.forget(["never offered"])
    with pytest.raises(LocalProtocolError, match="cannot be forgotten"):
        found.forget(["a"])


@pytest.mark.parametrize(("took", "granted"), [(0.5, LEAST_S), (10.0, STUCK_FACTOR * 10.0)])
@pytest.mark.parametrize("apart", [True, False])
def test_limit_follows_the_longest_duration(took: float, granted: float, apart: bool) -> None:
    found = board(apart=apart)
    first = lent(found, 1, "a", 100.0)
    assert limit_of(found, first) == 100.0 + FIRST_S
    found.done(first, 100.0 + took)
    assert limit_of(found, lent(found, 1, "b", 200.0)) == 200.0 + granted
    assert limit_of(found, lent(found, 2, "c", 200.0)) == 200.0 + (FIRST_S if apart else granted)
    assert limit_of(found, lent(found, 3, "d", 200.0, "other")) == 200.0 + FIRST_S


def test_lost_workers_time_is_not_measured() -> None:
    found = board(apart=False)
    lent(found, 1, "a")
    found.lost(1)
    assert limit_of(found, lent(found, 2, "a", 150.0)) == 150.0 + FIRST_S


def test_payloads_in_flight_extend_the_limit() -> None:
    found = board()
    loan = lent(found, 1, "a")
    loan.flight.awaits = 2
    assert limit_of(found, loan) is None
    found.sent(1, 1e6)
    found.sent(2, 1e6)
    assert limit_of(found, loan) is None
    found.sent(1, 2e6)
    assert limit_of(found, loan) == 2e6 + FIRST_S
    found.arrives(1, 5)
    assert limit_of(found, loan) is None
    found.arrived(1, 4, 3e6)  # a message without a payload
    assert limit_of(found, loan) is None
    found.arrived(1, 5, 3e6)  # no answer
    assert limit_of(found, loan) == 3e6 + FIRST_S


def test_an_answer_is_a_sign_of_life_for_all_loans() -> None:
    found = board(apart=False)
    found.done(lent(found, 1, "a", 0.0, "short"), 1.0)
    short, long = lent(found, 1, "b", 1.0, "short"), lent(found, 1, "c", 1.0, "long")
    assert limit_of(found, short) == limit_of(found, long) == 1.0 + FIRST_S  # the short one may be behind the long one
    found.done(long, 150.0)
    assert limit_of(found, short) == 150.0 + LEAST_S


def test_arrivals_of_a_lost_connection_are_forgotten() -> None:
    found = board()
    lent(found, 1, "a")
    found.arrives(1, 5)
    found.lost(1)
    assert limit_of(found, lent(found, 2, "a", 2.0)) == 2.0 + FIRST_S
    assert limit_of(found, lent(found, 1, "b", 2.0)) == 2.0 + FIRST_S
