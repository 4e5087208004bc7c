"""Finds the operation that a compiler gets wrong, by asking about ever smaller pieces of a graph.

A pure search: the graph is a number of operations in an order in which each follows what it needs, and whoever
answers the questions compiles and runs. First the shortest prefix with a wrong value is found, then how many of the
operations before that value's own it takes to see the mistake when the piece starts from right values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Reading:
    """What a piece of the graph gave.

    Attributes:
        deviation: of the value that is furthest off, as a fraction of what is accepted; above 1 or NaN is wrong.
        operation: the first operation with a wrong value; if none is wrong, the one whose value is furthest off.
    """

    deviation: float
    operation: int

    @property
    def wrong(self) -> bool:
        """Whether it is further off than accepted."""
        return not self.deviation <= 1  # also NaN


class Questions(Protocol):
    """Compiles a piece of the graph with the compiler in question, runs it, and compares with right values.

    None as an answer: this piece cannot be compiled, run or compared.
    """

    def prefix(self, stop: int) -> Reading | None:
        """Compare all values after the first `stop` operations that anything after them uses."""
        ...

    def piece(self, start: int, operation: int) -> Reading | None:
        """Compare the values of one operation, computed from right values of everything before `start`."""
        ...

    def needed(self, operation: int) -> Sequence[int]:
        """Return the operations that one needs, directly or not, and itself, in ascending order."""
        ...


@dataclass
class SearchBudget:
    """What a search may spend. No question is asked once either is used up.

    Attributes:
        questions: how many compilations it may take in all.
        seconds: when to ask no more, in seconds after `started`; an answer under way is waited for.
        clock: monotonic, in seconds.
    """

    questions: int
    seconds: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        """Start the clock."""
        self.started = self.clock()
        self.spent = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.started

    def spend(self) -> bool:
        """Take one question; False if there is none left."""
        if self.spent >= self.questions or self.elapsed >= self.seconds:
            return False
        self.spent += 1
        return True


Outcome = Literal["alone", "together", "in company", "between", "hidden", "unanswered"]


@dataclass(frozen=True)
class Finding:
    """Where the search ended.

    Attributes:
        outcome: "alone": `operation` is wrong although it is given right values. "together": so is the piece of
            `operations`, of which `operation` is the last. "in company": `operation` has the first wrong value of
            the shortest wrong prefix, and no piece that ends with it is known to be wrong. "between": the budget
            or the answers did not suffice; the first wrong value is made by one of the operations from
            `operations[0]` to `operations[-1]`. "hidden": the whole graph is right once it is asked like this.
            "unanswered": it cannot be asked.
        operations: see `outcome`; empty for the last two.
        deviation: of the last wrong value, as a fraction of what is accepted.
        smallest: whether `operations` is known to be the smallest such piece.
    """

    outcome: Outcome
    operations: tuple[int, ...] = ()
    deviation: float = float("nan")
    smallest: bool = True

    @property
    def operation(self) -> int:
        """The last of the operations."""
        return self.operations[-1]


def find_first_wrong(count: int, questions: Questions, budget: SearchBudget) -> Finding:
    """Search a graph of `count` operations that is known to give something wrong.

    Whatever the answers are, even if a mistake comes and goes with the length of the prefix: the prefix that is one
    operation shorter than the one found was right, and the one found was wrong.
    """
    whole = questions.prefix(count) if budget.spend() else None
    if whole is None:
        return Finding("unanswered")
    if not whole.wrong:
        return Finding("hidden", deviation=whole.deviation)
    right, wrong, reading = 0, count, whole
    open_ends = set(range(1, count))  # prefixes that may still be asked about
    while wrong - right > 1:
        middle = _nearest(open_ends, right, wrong)
        if middle is None or not budget.spend():
            return Finding("between", tuple(range(right, wrong)), reading.deviation, smallest=False)
        open_ends.discard(middle)
        answer = questions.prefix(middle)
        if answer is None:
            continue
        if answer.wrong:
            wrong, reading = middle, answer
        else:
            right = middle
    return _smallest_piece(reading, questions, budget)


def _nearest(candidates: set[int], low: int, high: int) -> int | None:
    """Return the candidate nearest to the middle between two bounds, both exclusive."""
    middle = (low + high) // 2
    for distance in range(high - low):
        for found in (middle - distance, middle + distance):
            if low < found < high and found in candidates:
                return found
    return None


def _smallest_piece(reading: Reading, questions: Questions, budget: SearchBudget) -> Finding:
    """Find the shortest piece that ends with the operation of `reading` and is wrong by itself."""
    operation = reading.operation
    chain = list(questions.needed(operation))
    deviation = reading.deviation
    known_wrong: int | None = None  # the shortest piece known to be wrong, by its number of operations
    known_right = 0  # the longest that was not seen to be wrong
    ended = False

    def is_wrong(size: int) -> bool | None:
        nonlocal deviation
        if not budget.spend():
            return None
        answer = questions.piece(chain[-size], operation)
        if answer is None or not answer.wrong:
            return False
        deviation = answer.deviation
        return True

    size = 1
    while known_wrong is None and not ended:
        answer = is_wrong(size)
        if answer:
            known_wrong = size
        elif answer is None or size == len(chain):
            ended = True
        else:
            known_right, size = size, min(2 * size, len(chain))
    if known_wrong is None:
        return Finding("in company", (operation,), deviation)
    while known_wrong - known_right > 1 and not ended:
        middle = (known_wrong + known_right) // 2
        answer = is_wrong(middle)
        if answer:
            known_wrong = middle
        elif answer is None:
            ended = True
        else:
            known_right = middle
    outcome: Outcome = "alone" if known_wrong == 1 else "together"
    return Finding(outcome, tuple(chain[-known_wrong:]), deviation, smallest=not ended)
