"""Name the operation a refused artifact gets wrong.

The graph is cut at intermediate values; the compiler in question compiles the pieces, and their results are compared
with a right execution. The search itself is pure: operations stand in an order in which each follows those it needs.
First the shortest prefix with a wrong value is found, then how many of the operations before that value's own it takes
to see the mistake when the piece starts from right values.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from planetary.compiler.check.pieces import ARGUMENT, Key, Node, Outline, Piece, as_crossing, cut_out, outline
from planetary.compiler.step.train_step import TrainStep
from planetary.core.errors import PlanetaryError


@dataclass(frozen=True)
class Reading:
    """Result of running a piece of the graph.

    Attributes:
        deviation: of the value that is furthest off, as a fraction of the tolerance; above 1 or NaN is wrong.
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
    """Limits of a search. No question is asked once either is used up.

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
class BisectionResult:
    """Where the search ended.

    Attributes:
        outcome: "alone": `operation` is wrong although it is given right values. "together": so is the piece of
            `operations`, of which `operation` is the last. "in company": `operation` has the first wrong value of
            the shortest wrong prefix, and no piece that ends with it is known to be wrong. "between": the budget
            or the answers did not suffice; the first wrong value is made by one of the operations from
            `operations[0]` to `operations[-1]`. "hidden": the whole graph is right once it is asked like this.
            "unanswered": it cannot be asked.
        operations: see `outcome`; empty for the last two.
        deviation: of the last wrong value, as a fraction of the tolerance.
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


def find_first_wrong(count: int, questions: Questions, budget: SearchBudget) -> BisectionResult:
    """Search a graph of `count` operations known to give something wrong.

    Whatever the answers are, even if a mistake comes and goes with the length of the prefix: the prefix that is one
    operation shorter than the one found was right, and the one found was wrong.
    """
    whole = questions.prefix(count) if budget.spend() else None
    if whole is None:
        return BisectionResult("unanswered")
    if not whole.wrong:
        return BisectionResult("hidden", deviation=whole.deviation)
    right, wrong, reading = 0, count, whole
    open_ends = set(range(1, count))  # prefixes that may still be asked about
    while wrong - right > 1:
        middle = _nearest(open_ends, right, wrong)
        if middle is None or not budget.spend():
            return BisectionResult("between", tuple(range(right, wrong)), reading.deviation, smallest=False)
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


def _smallest_piece(reading: Reading, questions: Questions, budget: SearchBudget) -> BisectionResult:
    """Find the shortest piece that ends with the operation of `reading` and is wrong by itself."""
    operation = reading.operation
    chain = list(questions.needed(operation))
    deviation = reading.deviation
    known_wrong: int | None = None  # the shortest piece known to be wrong, by number of operations
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
        return BisectionResult("in company", (operation,), deviation)
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
    return BisectionResult(outcome, tuple(chain[-known_wrong:]), deviation, smallest=not ended)


MOST_COMPILATIONS = 40
"""Of pieces in one search. Halving 4000 operations takes 13, the smallest wrong piece a few more."""
SEARCH_SECONDS = 300.0
"""No piece is compiled once so much time has passed; one that is being compiled is waited for."""

VALUE_TOLERANCE = 1e-4
"""Accepted deviation of an intermediate value, relative to the tensor's largest element, beside the change under a
nudge of the inputs. Compilers that add in another order stay far below; a wrong term does not.
"""
_NUDGE_ROUNDINGS = 4  # the inputs are moved at random by so many roundings, to see how far values follow
_FOLLOWS = 64.0  # a value may deviate by so many times the change under nudged inputs
_SHARE = 2e-3  # share of an integer or boolean tensor that may differ: a rounding decides a comparison
_MOST_NAMES = 6  # kinds of operations listed in a message

Execute: TypeAlias = Callable[[TrainStep, Sequence[np.ndarray]], list[np.ndarray]]
"""Runs `train_step` of a piece on the inputs' values; returns the computed values."""


@dataclass(frozen=True)
class RefusedFunction:
    """A function whose compiled form is wrong.

    Attributes:
        portable: module.
        function: name in the module.
        arguments: the host arrays on which it is wrong.
        dtypes: their element types.
        replaced: for the first results of the function, the argument each replaces: those are compared by how far they
            are from it, as the whole step is.
        wrong: compiles and runs a piece as the refused artifact was made.
        right: runs it as it should be run.
        tolerance: accepted deviation of a value relative to the tensor's largest.
        change_tolerance: accepted deviation of a replaced argument relative to the largest change.
        roundings: accepted on top of it by element type, relative to the largest element.
    """

    portable: bytes
    function: str
    arguments: Sequence[np.ndarray]
    dtypes: Sequence[str]
    replaced: Sequence[int]
    wrong: Execute
    right: Execute
    tolerance: float
    change_tolerance: float
    roundings: Mapping[str, float]


def name_offender(
    refused: RefusedFunction,
    *,
    most_compilations: int = MOST_COMPILATIONS,
    seconds: float = SEARCH_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Return a sentence about the faulty operation of a compiled function, for the refusal's error.

    Never raises: a failed search says so, and the refusal stands.
    """
    try:
        budget = SearchBudget(most_compilations, seconds, clock)
        pieces = _Pieces(refused)
        finding = find_first_wrong(len(pieces.outline.nodes), pieces, budget)
        return _sentence(finding, pieces.outline, budget, pieces.refusal)
    except Exception as error:  # noqa: BLE001 - the artifact is refused all the same
        return f"The search for the operation that is wrong failed: {type(error).__name__}: {error}."


class _Pieces:
    """Answers the questions of the search; see `planetary.compiler.check.offender.Questions`."""

    def __init__(self, refused: RefusedFunction) -> None:
        self.outline = outline(refused.portable, refused.function)
        self.refusal = ""  # why the last piece could not be compared
        self._refused = refused
        self._known: dict[Key, np.ndarray] = {  # right values that cross cuts
            (ARGUMENT, i): as_crossing(array, dtype)
            for i, (array, dtype) in enumerate(zip(refused.arguments, refused.dtypes, strict=True))
        }
        self._replaced = {
            key: argument
            for key, argument in zip(self.outline.returned, refused.replaced, strict=False)
            if key is not None and key[0] != ARGUMENT
        }

    def prefix(self, stop: int) -> Reading | None:
        return self._read(0, self.outline.frontier(stop))

    def piece(self, start: int, operation: int) -> Reading | None:
        return self._read(start, [(operation, i) for i in range(len(self.outline.nodes[operation].results))])

    def needed(self, operation: int) -> Sequence[int]:
        return self.outline.needed(operation)

    def _read(self, start: int, wanted: list[Key]) -> Reading | None:
        if not wanted:
            return Reading(0.0, start)
        try:
            part = self._cut(start, wanted)
            inputs = self._values(part)
            want = self._refused.right(part.step, inputs)
            moved = self._refused.right(part.step, nudged(inputs))
            have = self._refused.wrong(part.step, inputs)
        except PlanetaryError as error:
            self.refusal = str(error)
            return None
        if start == 0:
            self._known.update(zip(wanted, want, strict=True))
        readings = [
            Reading(self._deviation(key, *values), key[0])
            for key, *values in zip(wanted, want, moved, have, strict=True)
        ]
        return next((r for r in readings if r.wrong), max(readings, key=lambda r: r.deviation))

    def _cut(self, start: int, wanted: Sequence[Key]) -> Piece:
        return cut_out(self._refused.portable, self._refused.function, start, wanted)

    def _values(self, part: Piece) -> list[np.ndarray]:
        """Return the right values of a piece's inputs."""
        missing = [key for key in part.inputs if key not in self._known]
        if missing:
            before = self._cut(0, missing)
            self._known.update(zip(missing, self._refused.right(before.step, self._values(before)), strict=True))
        return [self._known[key] for key in part.inputs]

    def _deviation(self, key: Key, want: np.ndarray, moved: np.ndarray, have: np.ndarray) -> float:
        argument = self._replaced.get(key)
        if argument is None or not np.issubdtype(want.dtype, np.floating):
            return deviation(want, moved, have, self._refused.tolerance)
        change = _largest(want.astype(np.float64) - self._known[ARGUMENT, argument])
        rounding = self._refused.roundings.get(self._refused.dtypes[argument], 0.0) * _largest(want)
        return _relative(want, have, self._refused.change_tolerance * change + rounding)


def nudged(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays whose numbers, where they are no integers, are moved by a few roundings at random."""
    rng = np.random.default_rng(0)
    found = []
    for array in arrays:
        if np.issubdtype(array.dtype, np.inexact):
            unit = _NUDGE_ROUNDINGS * np.finfo(array.dtype).eps
            found.append((array * (1 + unit * rng.uniform(-1, 1, array.shape))).astype(array.dtype))
        else:
            found.append(array)
    return found


def deviation(want: np.ndarray, moved: np.ndarray, have: np.ndarray, tolerance: float) -> float:
    """Return how far values are off, as a fraction of the tolerance; infinite where only one side is finite.

    Args:
        want: right values.
        moved: right values of nudged inputs: where rounding decides much, they are far from `want`.
        have: the values in question.
        tolerance: accepted relative to the largest right value.
    """
    if not np.issubdtype(want.dtype, np.inexact):
        accepted = max(0.5, _SHARE * want.size, _FOLLOWS * np.count_nonzero(want != moved))
        return float(np.count_nonzero(want != have)) / accepted
    with np.errstate(invalid="ignore", over="ignore"):
        followed = _largest(moved.astype(_wide(want)) - want)
    return _relative(want, have, tolerance * _largest(want) + _FOLLOWS * followed)


def _relative(want: np.ndarray, have: np.ndarray, accepted: float) -> float:
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    if np.all(same):
        return 0.0
    difference = np.abs(want[~same].astype(_wide(want)) - have[~same])
    if not np.all(np.isfinite(difference)) or accepted <= 0:
        return float("inf")
    return float(difference.max()) / accepted


def _largest(array: np.ndarray) -> float:
    """The largest magnitude of an array's finite elements; 0 if there is none."""
    sizes = np.abs(array[np.isfinite(array)])
    return float(sizes.max(initial=0.0))


def _wide(array: np.ndarray) -> type[np.inexact]:
    return np.complex128 if np.iscomplexobj(array) else np.float64


# --- words ----------------------------------------------------------------------------------------------------


def _sentence(finding: BisectionResult, graph: Outline, budget: SearchBudget, refusal: str) -> str:
    cost = f"({budget.spent} compilations, {budget.elapsed:.0f} s)"
    if finding.outcome == "unanswered":
        return f"The operation that is wrong could not be searched for: {refusal}."
    if finding.outcome == "hidden":
        return (
            f"No operation can be named: compiled once more, without writing over its arguments, the function is right "
            f"{cost}."
        )
    if finding.outcome == "between":
        return (
            f"The search for the first wrong operation ended early {cost}, with {len(finding.operations)} of "
            f"{len(graph.nodes)} left, from {_described(graph.nodes[finding.operations[0]])} to "
            f"{_described(graph.nodes[finding.operation])}" + (f"; {refusal}." if refusal else ".")
        )
    last = _described(graph.nodes[finding.operation])
    off = f"{finding.deviation:.3g} times the accepted deviation off"
    if finding.outcome == "in company":
        return (
            f"The first wrong value, {off}, is that of {last}; it is right when only this operation and "
            f"its operands are compiled {cost}."
        )
    if finding.outcome == "alone":
        return f"The first wrong operation is {last}: given right inputs, its result is {off} {cost}."
    others = Counter(graph.nodes[i].name for i in finding.operations[:-1])
    names = ", ".join(f"{count} {name}" if count > 1 else name for name, count in others.most_common(_MOST_NAMES))
    more = f" and {len(others) - _MOST_NAMES} other kinds" if len(others) > _MOST_NAMES else ""
    least = "" if finding.smallest else " at most"
    return (
        f"The first wrong operation is {last}, together with{least} {len(finding.operations) - 1} before it "
        f"({names}{more}): given right inputs, the result of them all is {off} {cost}."
    )


def _described(node: Node) -> str:
    return f"{node.name} -> {', '.join(node.results)} at {node.location}"
