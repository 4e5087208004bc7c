"""Names the operation that a refused artifact gets wrong: cuts its graph at intermediate values, compiles the pieces
with the compiler in question and compares what they give with a right execution.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from planetary.compiler.check.bisect import Finding, Reading, SearchBudget, find_first_wrong
from planetary.compiler.check.pieces import ARGUMENT, Key, Node, Outline, Piece, as_crossing, cut_out, outline
from planetary.compiler.step.train_step import TrainStep
from planetary.core.errors import PlanetaryError

MOST_COMPILATIONS = 40
"""Of pieces in one search. Halving 4000 operations takes 13, the smallest wrong piece a few more."""
SEARCH_SECONDS = 300.0
"""No piece is compiled once so much time has passed; one that is being compiled is waited for."""

VALUE_TOLERANCE = 1e-4
"""Accepted deviation of an intermediate value, relative to the largest element of its tensor, beside what a nudge
of the inputs moves it by. Compilers that add in another order stay far below; a wrong term does not.
"""
_NUDGE_ROUNDINGS = 4  # the inputs are moved at random by so many roundings, to see how far values follow
_FOLLOWS = 64.0  # a value may deviate by so many times what it moves when the inputs are nudged
_SHARE = 2e-3  # of the elements of an integer or boolean tensor may differ: a rounding decides a comparison
_MOST_NAMES = 6  # kinds of operations listed in a message

Execute: TypeAlias = Callable[[TrainStep, Sequence[np.ndarray]], list[np.ndarray]]
"""Runs `train_step` of a piece on the values of its inputs; returns the values that it computes."""


@dataclass(frozen=True)
class RefusedFunction:
    """A function whose compiled form is wrong.

    Attributes:
        portable: its module.
        function: its name there.
        arguments: the host arrays on which it is wrong.
        dtypes: their element types.
        replaced: for the first results of the function, the argument that each replaces: those are compared by how
            far they are from it, as the whole step is.
        wrong: compiles and runs a piece as the refused artifact was made.
        right: runs it as it should be run.
        tolerance: accepted deviation of a value relative to the largest of its tensor.
        change_tolerance: accepted deviation of a replaced argument relative to its largest change.
        roundings: accepted on top of it by element type, relative to its largest element.
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
    """Return a sentence about the operation that makes a compiled function wrong, for the error that refuses it.

    Never raises: a search that fails says that it failed, and the refusal stands.
    """
    try:
        budget = SearchBudget(most_compilations, seconds, clock)
        pieces = _Pieces(refused)
        finding = find_first_wrong(len(pieces.outline.nodes), pieces, budget)
        return _sentence(finding, pieces.outline, budget, pieces.refusal)
    except Exception as error:  # noqa: BLE001 - what was refused is wrong, whatever happens here
        return f"The search for the operation that is wrong failed: {type(error).__name__}: {error}."


class _Pieces:
    """Answers the questions of the search; see `planetary.compiler.check.bisect.Questions`."""

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
    """Return how far values are off, as a fraction of what is accepted; infinite where only one side is finite.

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


def _sentence(finding: Finding, graph: Outline, budget: SearchBudget, refusal: str) -> str:
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
            f"The first wrong value, {off}, is that of {last}; it is right when only this operation and what it "
            f"needs are compiled {cost}."
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
    return f"{node.name} -> {', '.join(node.results)} {place(node.location)}"


def place(location: str) -> str:
    """Return where an operation stands, for people, from its location as MLIR prints it.

    Args:
        location: e.g. `loc("jit(loss)/tanh"("model.py":12:0 to :9))`, with the callers around it.
    """
    name = re.search(r'"([^"]*)"(?!:\d)', location)
    file = re.search(r'"([^"]+)":(\d+)', location)
    found = [f"in {name.group(1)}"] if name else []
    found += [f"at {file.group(1)}:{file.group(2)}"] if file else []
    return " ".join(found) or "at an unknown place"
