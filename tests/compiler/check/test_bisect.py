"""The search for the first wrong operation, with a made-up compiler that answers from what it gets wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from planetary.compiler.check.offender import BisectionResult, Reading, SearchBudget, find_first_wrong


class Compiler:
    """Over a chain or a random graph: wrong from an operation on, and by itself only from pieces of a size on."""

    def __init__(self, needs: Sequence[Sequence[int]], wrong: Callable[[int, int], bool], company: int = 1) -> None:
        self.needs = needs
        self.wrong = wrong  # (first operation of the piece, operation): whether its value is wrong
        self.company = company
        self.asked: list[tuple[int, int]] = []
        self.refuses: Callable[[int], bool] = lambda stop: False

    def prefix(self, stop: int) -> Reading | None:
        self.asked.append((0, stop))
        if self.refuses(stop):
            return None
        off = [i for i in range(stop) if self.wrong(0, i)]
        return Reading(7.0, off[0]) if off else Reading(0.1, stop - 1)

    def piece(self, start: int, operation: int) -> Reading | None:
        self.asked.append((start, operation))
        return Reading(5.0 if self.wrong(start, operation) else 0.2, operation)

    def needed(self, operation: int) -> list[int]:
        found = {operation}
        for i in range(operation, -1, -1):
            if i in found:
                found.update(self.needs[i])
        return sorted(found)


def chain(count: int) -> list[list[int]]:
    return [[i - 1] if i else [] for i in range(count)]


def budget(questions: int = 100, seconds: float = math.inf) -> SearchBudget:
    ticks = iter(range(10**6))
    return SearchBudget(questions, seconds, lambda: float(next(ticks)))


def search(compiler: Compiler, allowed: SearchBudget | None = None) -> BisectionResult:
    return find_first_wrong(len(compiler.needs), compiler, allowed or budget())


@pytest.mark.parametrize("culprit", [0, 1, 499, 730, 998, 999])
def test_one_wrong_operation_of_1000_takes_a_dozen_questions(culprit: int) -> None:
    compiler = Compiler(chain(1000), lambda start, i: i >= culprit >= start)
    assert search(compiler) == BisectionResult("alone", (culprit,), 5.0)
    assert len(compiler.asked) <= 12


@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_jointly_wrong_operations_are_the_smallest_piece(size: int) -> None:
    """Operations that are wrong only together are the smallest such piece."""
    compiler = Compiler(chain(300), lambda start, i: i >= 200 and start <= 201 - size)
    assert search(compiler) == BisectionResult("together", tuple(range(201 - size, 201)), 5.0)


def test_independent_operations_are_no_part_of_the_piece() -> None:
    """Operations that the wrong one does not need are no part of the piece."""
    needs = [[], *([0] for _ in range(50)), [3, 7]]
    compiler = Compiler(needs, lambda start, i: i == 51 and start <= 3)
    assert search(compiler).operations == (3, 7, 51)


def test_a_value_that_only_goes_wrong_beside_others() -> None:
    compiler = Compiler(chain(40), lambda start, i: i >= 20)
    compiler.piece = lambda start, operation: Reading(0.3, operation)  # type: ignore[method-assign]
    assert search(compiler) == BisectionResult("in company", (20,), 7.0)


def test_right_or_unaskable_whole_names_nothing() -> None:
    assert search(Compiler(chain(9), lambda start, i: False)).outcome == "hidden"
    silent = Compiler(chain(9), lambda start, i: True)
    silent.refuses = lambda stop: True
    assert search(silent).outcome == "unanswered"
    assert search(Compiler(chain(9), lambda start, i: True), budget(questions=0)).outcome == "unanswered"


def test_prefixes_without_an_answer_are_gone_round() -> None:
    compiler = Compiler(chain(64), lambda start, i: i >= 41 >= start)
    compiler.refuses = lambda stop: stop in {16, 31, 32, 33, 48}
    assert search(compiler).operations == (41,)
    compiler.refuses = lambda stop: 40 <= stop <= 45
    found = search(compiler)
    assert (found.outcome, found.operations, found.smallest) == ("between", tuple(range(39, 46)), False)


def test_not_a_number_is_wrong() -> None:
    assert Reading(math.nan, 0).wrong
    assert Reading(math.inf, 0).wrong
    assert not Reading(1.0, 0).wrong


@pytest.mark.parametrize("questions", range(1, 16))
def test_no_more_is_asked_than_allowed(questions: int) -> None:
    compiler = Compiler(chain(1000), lambda start, i: i >= 777 and start <= 770)
    found = search(compiler, budget(questions))
    assert len(compiler.asked) <= questions
    assert found.operations[0] <= 777 <= found.operations[-1]
    assert found.outcome in {"between", "in company", "together"}
    if found.outcome == "between":
        assert len(found.operations) <= max(1, math.ceil(1000 / 2 ** (questions - 1)))


def test_time_ends_a_search() -> None:
    compiler = Compiler(chain(1000), lambda start, i: i >= 777)
    found = search(compiler, budget(seconds=5))
    assert found.outcome == "between"
    assert len(compiler.asked) <= 5


def test_found_operation_is_wrong_and_its_prefix_right() -> None:
    """A mistake may come and go with the length of the prefix."""
    rng = random.Random(0)
    for _ in range(50):
        count = rng.randrange(2, 60)
        off = {stop: rng.random() < 0.5 for stop in range(1, count)} | {count: True, 0: False}

        class Fickle(Compiler):
            def prefix(self, stop: int, off: dict[int, bool] = off) -> Reading:
                self.asked.append((0, stop))
                return Reading(3.0 if off[stop] else 0.0, stop - 1)

        compiler = Fickle(chain(count), lambda start, i: True)
        found = search(compiler)
        assert off[found.operation + 1]
        assert not off[found.operation]
